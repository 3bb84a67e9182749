"""The exhaustive checker of the lease table alone: every fault of the ration in one story, over the real table.

The table is real; the readers around it are those of :mod:`tests.sim.exhaustive_table_model`. That leaves room for two
losses, a repetition, an expiry, an abort and a crash (or a reset) in the same story, of which
:mod:`tests.sim.exhaustive` has any three. ``docs/simulation.md`` tells what is taken together, and why nothing is
missed by it.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.sim.exhaustive import Broken, Planted
from tests.sim.exhaustive_machine import Violation
from tests.sim.exhaustive_table_model import (
    ABORT,
    CRASH,
    EXPIRY,
    FULL,
    KINDS,
    LEFT,
    MESSAGES,
    NO_MESSAGE,
    PAID,
    RELEASE,
    Model,
    Step,
    TablePart,
)

# The exploration


@dataclass(frozen=True)
class Report:
    """What an exploration saw. ``tables``: how many states the table itself had."""

    states: int
    tables: int
    transitions: int
    depth: int
    violation: Broken | None
    cpu_s: float


def explore(left: int = FULL, part: type[TablePart] = TablePart) -> Report:
    """Visit every world that the rations allow, or as many as lead to the first violation.

    Without rations and with siblings: L3 as well.
    """
    begun = time.process_time()
    model = Model(part)
    parents: dict[int, int] = {}
    depth, transitions, at = 0, 0, -1
    violation = None
    try:
        frontier = [model.first(left)]
        parents[frontier[0]] = -1
        while frontier:
            found = []
            for at in frontier:
                is_last = True
                for after in successors(model, at):
                    is_last = False
                    transitions += 1
                    if after not in parents:
                        parents[after] = at
                        found.append(after)
                if is_last and not left and part is TablePart and not model.is_served(at // LEFT):
                    model.attempt = ("over",)
                    raise Violation("L3: nothing went wrong, and a reader was not served")
            frontier = found
            depth += bool(found)
    except Violation as error:
        violation = Broken(str(error), tuple(_tell(model, parents, at)))
    return Report(len(parents), len(model.tables.records), transitions, depth, violation, time.process_time() - begun)


def successors(model: Model, at: int) -> Iterator[int]:
    """All worlds that are one step away."""
    for after, _, _ in options(model, at):
        yield after


def options(model: Model, at: int) -> Iterator[tuple[int, Step, int]]:
    """All worlds that are one step away, each with the step and the copy that is under way after it."""
    world, left = divmod(at, LEFT)
    paid = PAID[left]
    copy = model.unpack(world)[2]
    records = model.tables.records
    for step in model.steps(world):
        rest = paid[step.cost]
        if rest < 0:
            continue
        under_way = NO_MESSAGE if step.label[0] == "copy" else copy if step.copy == NO_MESSAGE else step.copy
        facts = records[step.table].facts
        if not facts.live:
            rest &= ABORT if facts.life else EXPIRY + ABORT + CRASH
            under_way = NO_MESSAGE
        yield model.world(step.table, step.readers, under_way) * LEFT + rest, step, under_way


def catch(mutant: Planted) -> Broken | None:
    """What is seen first when ``mutant`` is planted, by the scope without faults or by the full one."""
    with mutant.patch():
        return explore(0).violation or explore().violation


# Stories


def _tell(model: Model, parents: dict[int, int], at: int) -> Iterator[str]:
    """The steps from the beginning to ``at``, and what was tried last, by the names that everybody had at first."""
    last = model.attempt
    path = [at]
    while parents.get(path[-1], -1) >= 0:
        path.append(parents[path[-1]])
    path.reverse()
    names = list(range(NO_MESSAGE))  # what each message of the world was at first
    for before, after in itertools.pairwise(path):
        _, step, copy = next(option for option in options(model, before) if option[0] == after)
        yield _sentence(step.label, names)
        image = model.image_of(step.table, step.readers, copy)
        before_names = names.copy()
        for message in range(NO_MESSAGE):
            names[image[message]] = before_names[message]
    yield _sentence(last, names)


def _sentence(label: tuple[Any, ...], names: list[int]) -> str:
    match label:
        case ("handle", message, *answer):
            reply, lost, copied = answer or ("", False, False)
            text = f"{_who(names[message])} is handled" + f", answered {reply}" * bool(reply)
            return text + ", which is lost" * lost + "; a copy stays under way" * copied
        case ("copy", message):
            return f"the copy of {_who(names[message])} is handled"
        case ("end", reader, rank):
            which, kind = divmod(names[reader * KINDS + 1 + rank], KINDS)
            return f"reader {'AB'[which]}, rank {kind - 1} ends its read"
        case ("abort", reader):
            return f"reader {'AB'[names[reader * KINDS] // KINDS]} is aborted"
        case ("producer", ("jump", which)):
            return f"time passes until deadline {which + 1}"
        case _:
            return " ".join(map(str, label))


def _who(message: int) -> str:
    reader, kind = divmod(message, KINDS)
    rank = f" for rank {kind - 1}" if 0 < kind < RELEASE else ""
    return f"{type(MESSAGES[message]).__name__}{rank} of reader {'AB'[reader]}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim.exhaustive_table", description=__doc__)
    parser.add_argument("--mutants", action="store_true", help="plant each fault instead, and tell what is seen of it")
    console = Console(highlight=False)
    if parser.parse_args().mutants:
        return _mutants(console)
    for left, name in ((0, "no faults"), (FULL, "full budget")):
        report = explore(left)
        console.print(
            f"{name}: {report.states:,} states, {report.tables:,} of the table, {report.transitions:,} transitions, "
            f"{report.cpu_s:.1f} s of CPU"
        )
        if report.violation is not None:
            console.print(f"[red]{report.violation.rule}[/]", soft_wrap=True)
            for number, line in enumerate(report.violation.story, start=1):
                console.print(f"  {number:2}. {line}", markup=False, soft_wrap=True)
            return 1
    console.print(f"checker: {report.states} states, depth {report.depth}, 0 violations (full budget)")
    return 0


def _mutants(console: Console) -> int:
    from tests.sim.mutants import MUTANTS

    table = Table("planted fault", "what the code does", "depth", "what the checker sees")
    for name, mutant in MUTANTS.items():
        seen = catch(mutant)
        table.add_row(name, mutant.description, str(seen.depth) if seen else "-", seen.rule[:120] if seen else "")
    console.print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
