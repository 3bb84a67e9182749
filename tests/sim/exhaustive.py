"""The exhaustive checker: every order in which one small handoff can go, and go wrong, over the real code.

One producer, one lease, two readers (two consumers, or two requests of one consumer) of two ranks each; messages may
overtake each other, and what can go wrong is rationed (:data:`~tests.sim.exhaustive_model.FAULTS`). Breadth first, so
the first violation that is found has the shortest story. ``docs/simulation.md`` tells how the states are kept few.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from rich.console import Console
from rich.status import Status
from rich.table import Table

from tests.sim.exhaustive_machine import Violation
from tests.sim.exhaustive_model import FAULTS
from tests.sim.exhaustive_story import tell
from tests.sim.exhaustive_world import Explorer, Scope, World


@dataclass(frozen=True)
class Broken:
    """A rule is broken: which, and the shortest story of it."""

    rule: str
    story: tuple[str, ...]

    @property
    def depth(self) -> int:
        """How many steps the story has."""
        return len(self.story)


@dataclass(frozen=True)
class Report:
    """What an exploration saw. ``endings``: where the readers stood when nothing more could happen."""

    scope: Scope
    states: int
    transitions: int
    depth: int
    violation: Broken | None
    endings: frozenset[tuple[str, ...]]
    seconds: float


def _rations(**most: int) -> tuple[int, ...]:
    assert most.keys() <= set(FAULTS), most
    return tuple(most.get(name, 0) for name in FAULTS)


_FAULTS = _rations(loss=2, duplicate=1, expiry=1, abort=1, crash=1)
_ALL = _rations(loss=2, duplicate=1, expiry=1, abort=1, crash=1, beat=1, nudge=1)

SCOPES = {
    "clean": Scope(("0_a",), 2, _rations(), 0),
    "single": Scope(("a",), 2, _ALL, 1),
    "renewals": Scope(("0_a",), 2, _ALL, 2),
    "siblings": Scope(("0_a", "1_a"), 1, _ALL, 1),
    "consumers": Scope(("0_a",), 2, _FAULTS, 3),
    "deep siblings": Scope(("0_a", "1_a"), 1, _ALL, 2),
    "deep consumers": Scope(("0_a",), 2, _ALL, 3),
}
"""What can be explored. Those of :data:`FULL` are what the tests do; the deep ones take memory and patience. Names like
``0_a`` are those of samples, whose lease lingers.
"""

FULL = ("clean", "renewals", "siblings", "consumers")


def explore(scope: Scope, progress: Callable[[int, int], None] | None = None) -> Report:
    """Visit every state of ``scope``, or as many as lead to the first violation.

    ``progress`` is told how many states were seen, and in how many steps.
    """
    begun = time.monotonic()
    explorer = Explorer(scope)
    parents: dict[World, World | None] = {}
    frontier: list[World] = []
    depth, transitions = 0, 0
    endings: set[tuple[str, ...]] = set()
    violation = None
    try:
        frontier = [explorer.first()]
        parents[frontier[0]] = None
        while frontier:
            found = []
            for world in frontier:
                explorer.visit(world)
                is_last = True
                for after in explorer.successors(world):
                    is_last = False
                    transitions += 1
                    if after not in parents:
                        parents[after] = world
                        found.append(after)
                if is_last:
                    endings.add(explorer.ending(world))
            frontier = found
            depth += bool(found)
            if progress is not None:
                progress(len(parents), depth)
        explorer.finish(endings)
    except Violation as error:
        violation = Broken(str(error), tuple(tell(explorer, parents)))
    return Report(scope, len(parents), transitions, depth, violation, frozenset(endings), time.monotonic() - begun)


class Planted(Protocol):
    """A fault that can be planted into the real code; see :mod:`tests.sim.mutants`."""

    patch: Callable[[], AbstractContextManager[None]]


def catch(mutant: Planted, scopes: tuple[str, ...] = ("single", "renewals")) -> Broken | None:
    """What the checker sees first when ``mutant`` is planted; None if nothing. Its ``depth`` counts the steps."""
    with mutant.patch():
        for name in scopes:
            violation = explore(SCOPES[name]).violation
            if violation is not None:
                return violation
    return None


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim.exhaustive", description=__doc__)
    parser.add_argument(
        "--scope", choices=SCOPES, action="append", help=f"what to explore (default: {', '.join(FULL)})"
    )
    parser.add_argument("--mutants", action="store_true", help="plant each fault instead, and tell what is seen of it")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)  # what the parts have to say of planted losses, a million times
    console = Console(highlight=False)
    return _mutants(console) if options.mutants else _scopes(options.scope or FULL, console)


def _scopes(names: Sequence[str], console: Console) -> int:
    reports = []
    for name in names:
        with console.status(f"{name}: ...") as status:

            def tell_progress(states: int, depth: int, name: str = name, status: Status = status) -> None:
                status.update(f"{name}: {states:,} states, depth {depth}")

            report = explore(SCOPES[name], tell_progress)
        reports.append(report)
        console.print(f"{name}: {report.states:,} states, {report.transitions:,} transitions, depth {report.depth}")
        if report.violation is not None:
            console.print(f"[red]{report.violation.rule}[/]", soft_wrap=True)
            for number, line in enumerate(report.violation.story, start=1):
                console.print(f"  {number:2}. {line}", markup=False, soft_wrap=True)
    states, depth = sum(report.states for report in reports), max(report.depth for report in reports)
    violations = sum(report.violation is not None for report in reports)
    console.print(f"checker: {states} states, depth {depth}, {violations} violations")
    return min(violations, 1)


def _mutants(console: Console) -> int:
    from tests.sim.mutants import MUTANTS

    table = Table("planted fault", "what the code does", "depth", "what the checker sees")
    for name, mutant in MUTANTS.items():
        with console.status(name):
            seen = catch(mutant)
        table.add_row(name, mutant.description, str(seen.depth) if seen else "-", seen.rule[:120] if seen else "")
    console.print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
