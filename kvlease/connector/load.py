"""One request's load, as the consumer's scheduler half follows it through the states of :mod:`kvlease.core.loads`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvlease.core.handoff import Handoff
from kvlease.core.ids import LoadId
from kvlease.core.loads import FailureCause, LoadEvent, LoadState, next_state
from kvlease.core.messages import Granted


@dataclass
class Load:
    """One request's load, as the scheduler half sees it.

    ``asked_at`` is when it was claimed, and ``claim`` its name at the leaser and in its reader id. Request ids come
    again, and what the leaser had to say of an aborted request must not pass for an answer to the next one of that id.
    ``blocks`` are those it loads, by group.
    """

    id: LoadId
    handoff: Handoff | None
    state: LoadState
    asked_at: float
    claim: LoadId
    cause: FailureCause | None = None
    granted: Granted | None = None
    start_token: int = 0
    blocks: Sequence[Sequence[Any]] = field(default=(), repr=False)
    is_logged: bool = False
    is_held: bool = False

    def step(self, event: LoadEvent) -> None:
        """Follow ``event`` through the table."""
        self.state = next_state(self.state, event)

    def fail(self, cause: FailureCause) -> None:
        """Fail for ``cause``; the first cause stands."""
        self.step(LoadEvent.FAIL)
        self.cause = cause
