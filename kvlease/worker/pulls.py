"""One load in the worker half: its record, and how its pages are read, chunk by chunk.

States and their table are those of :mod:`kvlease.core.loads`; a pull starts at ``GRANTED``. A pull that has ended may
still have reads that have not: those are polled until NIXL says that they are terminal, because only then does nobody
write to the load's blocks any more.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvlease.core.loads import FailureCause, LoadEvent, LoadState, next_state
from kvlease.core.orders import LoadOrder
from kvlease.core.plan import Chunk, Plan
from kvlease.worker.agent import Agent, AgentError, ReadState
from kvlease.worker.sources import Source

if TYPE_CHECKING:
    from kvlease.worker.checks import Check

READS_PER_PULL = 4
"""Chunks of one load that may be posted at once: the transport has the next one before we hear of the last."""


@dataclass
class PulledBytes:
    """What one :meth:`Pull.poll` found finished."""

    reads: int = 0
    len_bytes: int = 0
    error: str | None = None


@dataclass
class _Posted:
    read: Any
    len_bytes: int


@dataclass(eq=False)
class Pull:
    """One load's record. Compared by identity, so it also names its own commit call."""

    order: LoadOrder
    source: Source
    deadline: float
    len_bytes: int
    state: LoadState = LoadState.GRANTED
    cause: FailureCause | None = None
    plan: Plan | None = None
    posted: list[_Posted] = field(default_factory=list)
    since: float = 0.0
    report_at: float | None = None
    check: Check | None = None

    def __repr__(self) -> str:
        return (
            f"<Pull {self.order.load} {self.state.value} pages_left={self.pages_left} posted={len(self.posted)} "
            f"bytes={self.len_bytes}>"
        )

    @property
    def pages_left(self) -> int:
        """Pages that no posted chunk covers yet."""
        return self.plan.pages_left if self.plan is not None else 0

    @property
    def may_post(self) -> bool:
        """Whether a chunk is waiting and may be posted now."""
        return self.state is LoadState.PULLING and self.pages_left > 0 and len(self.posted) < READS_PER_PULL

    @property
    def is_read(self) -> bool:
        """Whether every page is here."""
        return self.state is LoadState.PULLING and not self.pages_left and not self.posted

    def happen(self, event: LoadEvent) -> None:
        """Change state by the table."""
        self.state = next_state(self.state, event)

    def post(self, agent: Agent, local: Any) -> Chunk:
        """Start to read the next chunk.

        Raises:
            AgentError: nothing was started.
        """
        remote = self.source.remote
        if remote is None or self.plan is None:
            raise AgentError("the producer's pages were forgotten")
        chunk = next(self.plan)
        read = agent.post(local, chunk.local, remote.prepared, chunk.remote)
        self.posted.append(_Posted(read, chunk.len_bytes))
        self.source.busy_reads += 1
        self.source.busy_bytes += chunk.len_bytes
        return chunk

    def poll(self, agent: Agent) -> PulledBytes:
        """Ask for every posted read and give back those that have ended; never raises :class:`AgentError`."""
        found = PulledBytes()
        still: list[_Posted] = []
        for posted in self.posted:
            try:
                state = agent.state(posted.read)
            except AgentError as error:
                found.error = found.error or str(error)
                state = ReadState.BUSY
            if state is ReadState.BUSY:
                still.append(posted)
                continue
            self.source.busy_reads -= 1
            self.source.busy_bytes -= posted.len_bytes
            if state is ReadState.ERROR:
                found.error = found.error or agent.error(posted.read)
            else:
                found.reads += 1
                found.len_bytes += posted.len_bytes
            try:
                agent.release(posted.read)
            except AgentError as error:
                found.error = found.error or str(error)
        self.posted = still
        return found
