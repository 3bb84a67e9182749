"""What a client may get, what a row wants it to get, and what is written down of each row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from tests.engines.clients import NO_ANSWER, Answer


class Got(StrEnum):
    """What one client got."""

    RIGHT = "right text"
    WRONG = "WRONG TEXT"
    ERROR = "HTTP 500"
    REFUSED = "HTTP 400"
    HANG = "no answer"
    LOST = "connection lost"


Wants = Mapping[str, frozenset[Got]]
"""By policy, what a client may get."""


def _wants(recompute: set[Got], fail: set[Got]) -> Wants:
    return {"recompute": frozenset(recompute), "fail": frozenset(fail)}


SERVED = _wants({Got.RIGHT}, {Got.RIGHT})
"""The fault must not be felt."""
POLICY = _wants({Got.RIGHT}, {Got.ERROR})
"""The load must fail, and the policy decides."""
CLEAN = _wants({Got.RIGHT}, {Got.RIGHT, Got.ERROR})
"""Whether the load fails depends on who was first; a wrong text is none of the choices."""
REFUSED = _wants({Got.REFUSED}, {Got.REFUSED})
GONE = _wants({Got.LOST}, {Got.LOST})
"""The client's own engine was killed."""
GONE_OR_SERVED = _wants({Got.LOST, Got.RIGHT}, {Got.LOST, Got.RIGHT})
"""The same, and it may have answered before."""


def judge(answer: Answer, expected: list[int] | None) -> Got:
    """Compare what a client got with what one engine said alone."""
    if answer.status == 200:
        return Got.RIGHT if answer.token_ids == expected else Got.WRONG
    if answer.status == NO_ANSWER:
        return Got.HANG
    if answer.status < 0:
        return Got.LOST
    return Got.ERROR if answer.status >= 500 else Got.REFUSED


@dataclass
class Result:
    """One line of the table."""

    row: str
    policy: str
    fault: str
    got: Counter[str] = field(default_factory=Counter)
    causes: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """All that is not as it should be."""
    blocks_s: float | None = None
    """Seconds until all blocks were back; None when they were not, or could not be asked for."""
    bound_s: float | None = None
    leaked: bool = False
    took_s: float = 0.0

    def see(self, got: Got, wanted: frozenset[Got]) -> None:
        """Count one client's answer."""
        self.got[got.value] += 1
        if got not in wanted:
            self.problems.append(f"{got.value} instead of {' or '.join(sorted(wanted))}")

    def settle_blocks(self, blocks_s: float | None, bound_s: float) -> None:
        """Blocks were back after ``blocks_s``; None: not within a wait far longer than the bound."""
        self.blocks_s, self.bound_s, self.leaked = blocks_s, bound_s, blocks_s is None
        if blocks_s is None:
            self.problems.append("blocks are kept")
        elif blocks_s > bound_s:
            self.problems.append(f"blocks back after {blocks_s:.1f} s, later than {bound_s:.1f} s")

    @property
    def is_ok(self) -> bool:
        """Whether all is as it should be."""
        return not self.problems

    @property
    def wrong_texts(self) -> int:
        """Answers with status 200 and another text than one engine's."""
        return self.got[Got.WRONG.value]

    @property
    def happened(self) -> str:
        """What clients got, why, and what else was seen, in one line."""
        got = ", ".join(f"{count} × {what}" if count > 1 else what for what, count in self.got.items())
        causes = ", ".join(f"{count} × {cause}" if count > 1 else cause for cause, count in self.causes.items())
        return "; ".join(part for part in (got, causes, *self.notes) if part)

    @property
    def blocks(self) -> str:
        """Seconds until the blocks were back, and the bound."""
        if self.bound_s is None:
            return "–"
        return f"{'kept' if self.blocks_s is None else f'{self.blocks_s:.1f}'} / {self.bound_s:.1f}"

    @property
    def verdict(self) -> str:
        """``ok``, or all that is wrong, each once."""
        return "ok" if self.is_ok else "; ".join(dict.fromkeys(self.problems))

    def as_json(self) -> dict[str, Any]:
        """For the report."""
        shown = {name: getattr(self, name) for name in ("happened", "blocks", "verdict", "is_ok")}
        return {**vars(self), "got": dict(self.got), **shown}


def summary(results: list[Result]) -> str:
    """The last line of a run."""
    good, wrong = sum(one.is_ok for one in results), sum(one.wrong_texts for one in results)
    leaked = sum(one.leaked for one in results)
    return f"faults: {good}/{len(results)} as they should be, {wrong} wrong texts, {leaked} leaked blocks"
