"""The list of rows, and what a row is given to work with.

A row is a function that does one fault to a fleet and tells its :class:`Case` what clients got::

    @row("main", bound_s=COMMITTED)
    def swapped(case: Case) -> None:
        '''Two handoffs of prompts of equal length, swapped.'''

Its name with dashes is the row's name, its docstring is the fault in words.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from devtools.engines import Engine
from tests.engines.clients import POLICIES, Answer, ask
from tests.engines.support import handoff_of, together
from tests.faults.fleets import CLAIM_S, KVLEASE, LEASE_S, NIXL, Fleet
from tests.faults.verdict import Result, Wants, judge

SLACK_S = 4.0
"""Added to every bound of the protocol: the step that is running, and a machine that has other work, too."""
COMMITTED = 0.5
"""Nothing is left to wait for but a round trip and the grace for siblings."""
UNRENEWED = CLAIM_S
UNCLAIMED = LEASE_S

BOTH = (KVLEASE, NIXL)


@dataclass(frozen=True)
class Row:
    """One fault."""

    name: str
    fault: str
    fleet: str | None
    """Which engines it needs; None: it makes its own processes."""
    run: Callable[[Case], None]
    policies: Sequence[str]
    connectors: Sequence[str]
    bound_s: float
    """In which time the protocol gives all blocks back, counted from the end of ``run`` or from ``blocks_from_now``."""


ROWS: dict[str, Row] = {}


def row(
    fleet: str | None,
    *,
    bound_s: float = COMMITTED,
    policies: Sequence[str] = tuple(POLICIES),
    connectors: Sequence[str] = BOTH,
) -> Callable[[Callable[[Case], None]], Callable[[Case], None]]:
    """Put a function on the list."""

    def register(run: Callable[[Case], None]) -> Callable[[Case], None]:
        name = run.__name__.replace("_", "-")
        fault = " ".join((run.__doc__ or "").split()).rstrip(".")
        assert fault, f"{name} does not say what its fault is"
        assert name not in ROWS, f"two rows are called {name}"
        ROWS[name] = Row(name, fault, fleet, run, policies, connectors, bound_s)
        return run

    return register


def select(names: Iterable[str], connector: str) -> list[Row]:
    """The rows called for (all when none is named) that make sense with ``connector``, grouped by fleet.

    A name may be the beginning of several. Raises KeyError for one that fits nothing.
    """
    wanted = list(names)
    for name in wanted:
        if not any(have.startswith(name) for have in ROWS):
            raise KeyError(name)
    chosen = [
        one
        for one in ROWS.values()
        if connector in one.connectors and (not wanted or any(one.name.startswith(name) for name in wanted))
    ]
    fleets = list(dict.fromkeys(one.fleet for one in chosen))
    return sorted(chosen, key=lambda one: fleets.index(one.fleet))


def passes(rows: Sequence[Row], connector: str) -> list[tuple[Sequence[str], list[Row]]]:
    """The rows as they are run: which policies at once, and what with them.

    Our consumers of both policies run side by side, on the same cores. The other connector's spin while they wait, and
    one would be blamed for what the other does to it: they run one policy after the other.
    """
    if connector == KVLEASE:
        return [(POLICIES, list(rows))] if rows else []
    split = [
        (policy, [replace(one, policies=[policy]) for one in rows if policy in one.policies]) for policy in POLICIES
    ]
    return [([policy], chosen) for policy, chosen in split if chosen]


@dataclass
class Side:
    """The part of a row that one policy sees."""

    case: Case
    policy: str
    result: Result

    @property
    def consumer(self) -> Engine:
        """The consumer with this policy (after a restart: the new one)."""
        return self.case.fleet.consumers[self.policy]

    def ask(self, prompt: list[int], params: dict[str, Any] | None, max_tokens: int = 8, **body: Any) -> Answer:
        """One request at this consumer, cut off after the case's patience."""
        return ask(self.consumer, prompt, params, max_tokens, timeout_s=self.case.patience_s, **body)

    def expect(self, answer: Answer, expected: list[int] | None, wants: Wants) -> None:
        """Judge one answer."""
        self.result.see(judge(answer, expected), wants[self.policy])

    def note(self, text: str) -> None:
        """Something seen that is neither an answer nor a cause."""
        self.result.notes.append(text)

    def require(self, holds: bool, otherwise: str) -> None:
        """Something that must hold beside the answers."""
        if not holds:
            self.result.problems.append(otherwise)


@dataclass
class Case:
    """What one run of a row works with."""

    row: Row
    fleet: Fleet
    patience_s: float
    """A request without an answer for so long counts as hanging."""
    sides: list[Side] = field(default_factory=list)
    blocks_since: float | None = None
    bound_s: float = 0.0
    _num_prompts: int = 0

    @property
    def producer(self) -> Engine:
        """The producer (after a restart: the new one)."""
        return self.fleet.producer

    @property
    def is_kvlease(self) -> bool:
        """Whether the connector under test is ours: its messages can be led through a relay."""
        return self.fleet.connector == KVLEASE

    def prompt(self, num_tokens: int) -> list[int]:
        """A prompt that no other row uses, nor this row before."""
        self._num_prompts += 1
        seed = zlib.crc32(self.row.name.encode()) + self._num_prompts
        return self.fleet.prompts.prompt_of(num_tokens, seed).token_ids

    def reference(self, prompt: list[int], max_tokens: int = 8, **body: Any) -> list[int]:
        """What one engine says alone. Also brings the prompt into the producer's prefix cache, so that leases of it are
        young when they are used.
        """
        answer = ask(self.producer, prompt, None, max_tokens, **body)
        assert answer.status == 200, answer.text
        assert answer.token_ids is not None
        return answer.token_ids

    def handoff(self, prompt: list[int], **body: Any) -> dict[str, Any]:
        """Prefill on the producer; its handoff."""
        return handoff_of(self.producer, prompt, **body)

    def each(self, do: Callable[[Side], None]) -> None:
        """``do`` for every side, at the same time."""
        together([lambda side=side: do(side) for side in self.sides])

    def ask_each(
        self, prompt: list[int], handoffs: Sequence[dict[str, Any]], wants: Wants, expected: list[int]
    ) -> None:
        """Every side asks at once, each with its own handoff."""
        by_policy = {side.policy: handoff for side, handoff in zip(self.sides, handoffs, strict=True)}
        self.each(lambda side: side.expect(side.ask(prompt, by_policy[side.policy]), expected, wants))

    def note(self, text: str) -> None:
        """Something seen, for every side."""
        for side in self.sides:
            side.note(text)

    def blocks_from_now(self, bound_s: float | None = None) -> None:
        """The event from which the bound counts happens now."""
        self.blocks_since = time.monotonic()
        self.bound_s = self.bound_s if bound_s is None else bound_s
