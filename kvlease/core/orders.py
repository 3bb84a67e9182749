"""What the scheduler half tells the worker half, and what comes back: plain data, one batch for each engine step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from kvlease.core.ids import LeaseId, LeaseToken, LoadId, PeerKey, ReaderId
from kvlease.core.loads import FailureCause
from kvlease.core.messages import BlockRuns


@dataclass(frozen=True)
class LoadOrder:
    """Pull the pages of the tokens ``[start_token, end_token)`` from ``peer`` into our own blocks.

    ``local_blocks`` are all blocks of the request, one list for each KV-cache group, in token order: block ``i`` of a
    group holds the tokens ``[i * block_size, (i + 1) * block_size)``. ``remote_blocks`` are the producer's, as runs, in
    the same order from token 0. ``doomed``: fail at once with this cause and read nothing (then ``peer`` may be None).
    """

    load: LoadId
    lease: LeaseId
    token: LeaseToken
    reader: ReaderId
    peer: PeerKey | None
    start_token: int
    end_token: int
    local_blocks: tuple[list[int], ...]
    remote_blocks: list[BlockRuns]
    doomed: FailureCause | None = None

    def __repr__(self) -> str:
        doom = f" doomed={self.doomed.value}" if self.doomed else ""
        return f"<LoadOrder {self.load} lease={self.lease} tokens=[{self.start_token}, {self.end_token}){doom}>"


@dataclass(frozen=True)
class Orders:
    """One step's orders. ``leases_live``: how many leases the producer half has out, so that the worker half knows how
    often NIXL wants to be called (no progress thread spins for it). ``greet``: producers that loads may soon come from,
    so that hands are shaken while those wait to be scheduled; nothing is owed for it. ``may_rest``: the step runs no
    model, and nothing but loads and leases keeps the engine stepping.
    """

    loads: list[LoadOrder] = field(default_factory=list)
    aborts: list[LoadId] = field(default_factory=list)
    ended: list[LeaseId] = field(default_factory=list)
    leases_live: int = 0
    greet: list[PeerKey] = field(default_factory=list)
    may_rest: bool = False


NO_ORDERS: Final = Orders()
"""Those of a step in which there is nothing to say."""

REST: Final = Orders(may_rest=True)
"""Those of a step in which there is nothing to say and nothing to do."""


@dataclass
class Reports:
    """What one worker rank reports at the end of a step; each load appears once in ``received``.

    ``failed`` is a part of ``received``, and aborted loads are a part of ``failed`` (cause ``ABORTED``): nothing that
    was not committed is ever reported as good. ``unsettled`` loads were reported (or are, in this very batch) although
    a posted read may still write into their blocks: the scheduler half holds those blocks back until the rank lists the
    load in ``settled``.
    """

    sent: set[LeaseId] = field(default_factory=set)
    received: set[LoadId] = field(default_factory=set)
    failed: dict[LoadId, FailureCause] = field(default_factory=dict)
    unsettled: set[LoadId] = field(default_factory=set)
    settled: set[LoadId] = field(default_factory=set)
