"""One producer as one consumer rank reads from it: the handshake, its NIXL agent and its prepared pages.

A source belongs to one incarnation of a producer. Its pages are prepared once, on the ``Welcome``, and used by every
load; after an error of NIXL they are thrown away and prepared anew for the next load. They are never thrown away
while a read from them is busy, because then nobody could tell any more when that read ends.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvlease.core.ids import EngineId, Incarnation, PeerKey, Rank
from kvlease.core.loads import FailureCause
from kvlease.core.messages import PROTOCOL_VERSION, AnyReply, Hello, RankInfo, Refused, Welcome
from kvlease.core.peers import Event, Peer, PeerState
from kvlease.core.plan import Pages, PlanError, check_pair
from kvlease.worker.agent import Agent, AgentError
from kvlease.worker.regions import RegionError, from_wire, pages_of, strided_rows

logger = logging.getLogger(__name__)

IDLE_READY_S = 600.0
"""How long a source stays connected without a load."""

IDLE_OTHER_S = 30.0
"""How long one that is refused, dead or unknown is remembered: longer than its back-off, or that would be forgotten."""


class Link(Protocol):
    """What is used of :class:`kvlease.net.channel.Channel`."""

    def peer(self, key: PeerKey) -> Peer:
        """The one peer of that key; raises TooManyPeers when there is no room for it."""

    def forget(self, key: PeerKey) -> None:
        """Close its socket."""

    def poll(self, timeout_s: float) -> None:
        """Send and receive; returns early when something happened."""

    def wake(self) -> None:
        """Let :meth:`poll` return now; from any thread."""

    def take_events(self) -> list[tuple[PeerKey, Event]]:
        """What happened since the last call."""

    def close(self) -> None:
        """Close all sockets."""


@dataclass(frozen=True)
class Identity:
    """Who this rank says it is. ``checksum``: how it wants bytes compared; empty: not at all."""

    engine_id: EngineId
    rank: Rank
    of_ranks: int
    factors: Mapping[str, str]
    fingerprint: str
    checksum: str = ""

    def hello(self, seq: int, to: Incarnation) -> Hello:
        """The greeting to a producer; it asks for the rank that mirrors ours."""
        return Hello(
            seq=seq,
            to=to,
            version=PROTOCOL_VERSION,
            factors=dict(self.factors),
            fingerprint=self.fingerprint,
            ranks=[self.rank],
        )


class SourceError(Exception):
    """The producer cannot be read from; ``cause`` is what its waiting loads fail with."""

    def __init__(self, cause: FailureCause, text: str) -> None:
        super().__init__(text)
        self.cause = cause


@dataclass(frozen=True)
class Remote:
    """A producer rank that NIXL can reach: the agent's name, the prepared list of its pages, and their layout."""

    name: str
    prepared: Any
    pages: Pages
    info: RankInfo


@dataclass(eq=False)
class Source:
    """One producer's record: ``open_loads`` are not over yet; ``busy_reads``, of ``busy_bytes``, have not ended."""

    peer: Peer
    identity: Identity
    agent: Agent
    local: Pages
    idle_since: float
    remote: Remote | None = None
    is_greeting: bool = False
    is_broken: bool = False
    open_loads: int = 0
    busy_reads: int = 0
    busy_bytes: int = 0
    _told: set[str] = field(default_factory=set)

    def __repr__(self) -> str:
        return (
            f"<Source {self.peer.key} {self.peer.state.value} loads={self.open_loads} reads={self.busy_reads}"
            f"{' broken' if self.is_broken else ''}>"
        )

    @property
    def is_ready(self) -> bool:
        """Whether hands were shaken; :meth:`repair` before reading."""
        return self.remote is not None and self.peer.state is PeerState.READY

    def enter(self, now: float) -> None:
        """One more load is open: the peer is watched."""
        self.open_loads += 1
        self.peer.watch(now)

    def leave(self, now: float) -> None:
        """That load is over."""
        self.open_loads -= 1
        self.idle_since = now
        self.peer.unwatch(now)

    def greet(self, now: float, timeout_s: float) -> None:
        """Shake hands, unless that is going on.

        Raises:
            SourceError: the producer has refused us a short while ago.
        """
        if self.peer.refusal is not None:
            raise SourceError(FailureCause.INCOMPATIBLE, f"refused: {self.peer.refusal.why}")
        if not self.is_greeting:
            self.is_greeting = True
            self.peer.greet(self.identity.hello, now, timeout_s)

    def greeted(self, reply: AnyReply) -> None:
        """Take the answer to the greeting: after a fitting ``Welcome`` the source :attr:`is_ready`.

        Raises:
            SourceError: refused, or what the producer says of itself cannot be used.
        """
        match reply:
            case Welcome():
                self._welcome(reply)
            case Refused():
                self._tell_differences(reply)
                raise SourceError(FailureCause.INCOMPATIBLE, f"refused: {reply.why}")
            case _:
                raise SourceError(
                    FailureCause.PEER_CONFUSED, f"answered the greeting with {type(reply).__name__}: {reply}"
                )

    def repair(self) -> None:
        """After an error of NIXL: make the producer reachable anew.

        Raises:
            SourceError: reads of before the error are still busy, or NIXL fails again.
        """
        if self.is_broken and self.remote is not None:
            self._replace(self.remote.info)

    def drop_remote(self, *, keep_agent: bool = False) -> None:
        """Forget the pages, and the agent unless another source reaches it, too. Not while a read is busy."""
        remote, self.remote, self.is_broken = self.remote, None, False
        self.peer.pinned = False
        if remote is None:
            return
        calls: list[tuple[Callable[[Any], None], Any]] = [(self.agent.discard, remote.prepared)]
        if not keep_agent:
            calls.append((self.agent.remove_peer, remote.name))
        for call, argument in calls:
            try:
                call(argument)
            except AgentError as error:
                logger.info("forgetting %s: %s", self.peer.key, error)

    @property
    def is_unused(self) -> bool:
        """Whether no load, no read and no greeting needs the source."""
        return not (self.open_loads or self.busy_reads or self.is_greeting)

    def is_stale(self, now: float) -> bool:
        """Whether nobody has needed the source for so long that it can be closed."""
        if not self.is_unused:
            return False
        return now - self.idle_since > (IDLE_READY_S if self.is_ready else IDLE_OTHER_S)

    def _welcome(self, reply: Welcome) -> None:
        if reply.version != PROTOCOL_VERSION:
            raise SourceError(
                FailureCause.INCOMPATIBLE, f"speaks protocol version {reply.version}, we speak {PROTOCOL_VERSION}"
            )
        info = next((info for info in reply.ranks if info.rank == self.identity.rank), None)
        if info is None:
            raise SourceError(FailureCause.PEER_CONFUSED, f"says nothing of its rank {self.identity.rank}")
        if self.identity.checksum not in ("", info.checksum):
            raise SourceError(
                FailureCause.INCOMPATIBLE,
                f"computes no {self.identity.checksum} checksums of its pages, and our kv_checksum wants them: "
                "set kv_checksum to 'sampled' or 'full' on the producer, too, or to 'off' here",
            )
        if self.remote is None or self.is_broken or self.remote.info != info:
            self._replace(info)

    def _replace(self, info: RankInfo) -> None:
        if self.busy_reads:
            raise SourceError(FailureCause.TRANSFER, f"{self.busy_reads} reads of before an error have not ended")
        self.drop_remote()
        self.remote = self._reach(info)
        self.peer.pinned = True

    def _reach(self, info: RankInfo) -> Remote:
        try:
            regions = from_wire(info)
        except RegionError as error:
            raise SourceError(FailureCause.PEER_CONFUSED, str(error)) from error
        pages = pages_of(regions)
        try:
            check_pair(self.local, pages)
        except PlanError as error:
            raise SourceError(FailureCause.INCOMPATIBLE, str(error)) from error
        try:
            name = self.agent.add_peer(info.agent_metadata)
            prepared = self.agent.prepare(name, strided_rows(regions), info.memory)
        except AgentError as error:
            raise SourceError(FailureCause.TRANSFER, str(error)) from error
        return Remote(name, prepared, pages, info)

    def _tell_differences(self, reply: Refused) -> None:
        """Log every difference once."""
        for difference in reply.differences:
            if difference.name not in self._told:
                self._told.add(difference.name)
                logger.error(
                    "producer %s refuses us: its %s is %r, ours is %r",
                    self.peer.key,
                    difference.name,
                    difference.ours,
                    difference.theirs,
                )
