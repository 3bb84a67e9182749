"""Two parts of the exhaustive checker, the real objects driven event by event: the producer, and a consumer's rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvlease.config import Settings
from kvlease.core.digest import prompt_digest
from kvlease.core.greeting import Site, answer_hello
from kvlease.core.ids import ChannelId, EngineId, Incarnation, LeaseId, LeaseToken, LoadId, PeerKey, Rank, ReaderId
from kvlease.core.leases import Grant, LeaseState, LeaseTable, LeaseTiming
from kvlease.core.messages import (
    AnyReply,
    AnyRequest,
    Commit,
    Committed,
    Hello,
    Invalid,
    Ping,
    ProtocolError,
    RankInfo,
    Release,
    Released,
)
from kvlease.core.orders import LoadOrder, Orders, Reports
from kvlease.core.peers import Event, Peer
from kvlease.core.silence import PeerTiming
from kvlease.worker.agent import ReadState
from kvlease.worker.outbox import Outbox
from kvlease.worker.puller import Local, Puller
from kvlease.worker.regions import Region, pages_of, to_wire
from kvlease.worker.sources import Identity
from tests.sim.exhaustive_machine import START, Part, Violation

RANKS = 2
BLOCK_SIZE = 16
LEASE = LeaseId("lease")
TOKEN = LeaseToken(b"t" * 16)
CHANNEL = ChannelId("channel")
PROMPT = list(range(BLOCK_SIZE))
INCARNATIONS = (Incarnation(b"first life......"), Incarnation(b"second life....."))
KEY = PeerKey(EngineId("producer"), INCARNATIONS[0], "127.0.0.1", 1)
FACTORS = {"kv": "bf16"}
TIMING = LeaseTiming(
    lease_duration_s=30.0,
    lease_extension_s=10.0,
    max_lease_lifetime_s=600.0,
    sibling_grace_s=0.2,
    tombstone_ttl_s=600.0,
    tombstone_max=100,
)
NUDGE_S = 5.0
"""A while in which nothing of the producer's runs out."""

SETTINGS = Settings(peer_timeout_s=16.0)
"""Pings (every quarter of the peer timeout) come only after all that a single message's loss sets off."""

REGION = Region(1 << 20, 4096, 4096, 8, 0, 0)


@dataclass(frozen=True)
class ProducerFacts:
    """``live``: the lease's blocks are its own. ``lingers``: all it waits for is the end of its grace."""

    life: int
    live: bool
    lingers: bool
    deadline: bool
    may_nudge: bool
    leases: int


class ProducerPart(Part):
    """The real lease table. ``life`` 0 has the one lease, life 1 begins with nothing at the same address."""

    def __init__(self, life: int) -> None:
        self.now = START
        self.life = life
        self.table = LeaseTable(INCARNATIONS[life], TIMING)
        self.ended = 0
        self.forgot = False
        self.released: set[str] = set()
        self.vouched: set[tuple[str, int]] = set()
        self.site = Site([rank_info(rank) for rank in range(RANKS)], FACTORS, "print", enforce=True)
        if life == 0:
            digest = prompt_digest(PROMPT, len(PROMPT), None, None, ())
            self.table.grant(Grant(LEASE, TOKEN, digest, len(PROMPT), [[(3, 1)]]), self.now)

    def apply(self, event: Any) -> AnyReply | None:
        """``tick`` (to the next deadline), ``nudge``, ``revoke``, or a request, which has a reply."""
        reply: AnyReply | None = None
        match event:
            case "tick":
                self.forgot = self.ended > 0
                self.now = self.table.next_deadline() or self.now
                self.table.expire(self.now)
            case "nudge":
                self.now += NUDGE_S
            case "revoke":
                self.table.revoke_all(self.now)
            case Hello():
                reply = answer_hello(event, self.table.incarnation, self.site)
            case _:
                reply = self._handle(event)
        for ended in self.table.take_ended():
            self.ended += 1
            if self.table.state_of(ended.lease) is not None:
                raise Violation(f"S4: the blocks of {ended.lease} are freed while it lives")
        self._check()
        return reply

    def _check(self) -> None:
        if self.ended > 1:
            raise Violation("S3: the lease was reported as ended twice")
        if self.life == 0 and not self.ended and self.table.state_of(LEASE) is None:
            raise Violation("S3: the lease is over and was not reported")
        for channel in self.table._channels.values():
            if back := self.released & channel.held.keys():
                raise Violation(f"P1: {sorted(back)} reads again after its Release")

    def _remember(self, request: AnyRequest, reply: AnyReply) -> None:
        """P1: what was answered to a message once is true of it for as long as it is remembered."""
        match request:
            case Release(reader=str() as reader) if isinstance(reply, Released) and self.life == 0:
                self.released.add(reader)
            case Commit(reader=reader, rank=rank) if isinstance(reply, Committed):
                self.vouched.add((reader, rank))
            case Commit(reader=reader, rank=rank) if (reader, rank) in self.vouched and not self.forgot:
                raise Violation("P1: a commit that was answered Committed is answered otherwise when it is repeated")

    def _handle(self, request: Any) -> AnyReply:
        try:
            reply = self.table.handle(request, self.now)
        except ProtocolError as error:
            return Invalid(seq=request.seq, incarnation=self.table.incarnation, reason=error.reason, text="")
        self._remember(request, reply)
        return reply

    def facts(self) -> ProducerFacts:
        state = self.table.state_of(LEASE)
        deadline = self.table.next_deadline()
        return ProducerFacts(
            life=self.life,
            live=self.life == 0 and not self.ended,
            lingers=state is LeaseState.LINGERING,
            deadline=deadline is not None,
            may_nudge=len(self.table) > 0 and deadline is not None and deadline > self.now + NUDGE_S,
            leases=len(self.table) + self.table.num_channels + self.table.num_tombstones,
        )

    def core(self) -> Any:
        return self.table, self.ended, self.released, self.vouched, self.forgot


def rank_info(rank: int) -> RankInfo:
    """Where the pages of one producer rank lie."""
    return RankInfo(rank=rank, agent_metadata=b"agent", regions=[to_wire(REGION)])


class Peers:
    """Real peers, kept as a channel keeps them; what they send is taken from the outside."""

    def __init__(self) -> None:
        self.now = START
        self.peers: dict[PeerKey, Peer] = {}

    def peer(self, key: PeerKey) -> Peer:
        timing = PeerTiming(SETTINGS.peer_timeout_s, SETTINGS.ping_interval_s())
        return self.peers.setdefault(key, Peer(key, timing))

    def forget(self, key: PeerKey) -> None:
        self.peers.pop(key, None)

    def wake(self) -> None:
        """Nobody sleeps here."""

    def take_events(self) -> list[tuple[PeerKey, Event]]:
        return [(key, event) for key, peer in self.peers.items() for event in peer.take_events()]

    def take_requests(self) -> tuple[AnyRequest, ...]:
        """All but pings: the network of this model loses every one of those."""
        taken = [request for peer in self.peers.values() for request in peer.take_requests()]
        return tuple(request for request in taken if not isinstance(request, Ping))

    def hear(self, reply: AnyReply) -> None:
        for peer in self.peers.values():
            peer.hear(reply, self.now)

    def calls(self) -> frozenset[int]:
        return frozenset(seq for peer in self.peers.values() for seq in peer._calls._pending)

    def deadlines(self) -> list[float]:
        return [at for peer in self.peers.values() if (at := peer.next_deadline()) is not None]


@dataclass(eq=False)
class _Read:
    load: str
    state: ReadState = ReadState.BUSY


class GhostAgent:
    """Reads that end when the checker says so; see :class:`kvlease.worker.agent.Agent`."""

    name = "ghost"

    def __init__(self, loads: tuple[str, ...]) -> None:
        self.busy: list[_Read] = []
        self.started: list[str] = []
        self._loads = loads

    def post(self, local: Any, local_pages: Any, remote: Any, remote_pages: Any) -> _Read:
        read = _Read(self._loads[int(local_pages[0]) - 1])
        self.busy.append(read)
        self.started.append(read.load)
        return read

    def state(self, read: _Read) -> ReadState:
        return read.state

    def error(self, read: _Read) -> str:
        return "the peer is gone"

    def release(self, read: _Read) -> None:
        if read.state is ReadState.BUSY:
            raise Violation("S4: a busy read was given back")

    def add_peer(self, metadata: bytes) -> str:
        return "producer"

    def prepare(self, peer: str | None, rows: Any, memory: str) -> str:
        return "pages"

    def discard(self, prepared: Any) -> None:
        if self.busy:
            raise Violation("S4: pages were given back under a busy read")

    def remove_peer(self, peer: str) -> None:
        if self.busy:
            raise Violation("S4: a peer was forgotten under a busy read")


@dataclass(frozen=True)
class WorkerFacts:
    """``calls``: the numbers of unanswered requests; ``busy``: loads with a posted read."""

    calls: frozenset[int]
    can_start: bool
    busy: tuple[str, ...]
    waits_to_report: bool
    open: int
    quiet: str


@dataclass(frozen=True)
class WorkerOut:
    """What a rank sends to the producer, which loads it began to read, and what it reports to its scheduler half."""

    requests: tuple[AnyRequest, ...]
    started: tuple[str, ...]
    report: Reports | None


class WorkerPart(Part):
    """The real ``Puller`` of one rank, which has shaken hands with the producer for an earlier load."""

    def __init__(self, loads: tuple[str, ...]) -> None:
        self.links = Peers()
        self.agent = GhostAgent((*loads, "earlier"))
        self.outbox = Outbox()
        self.puller = Puller(
            identity=Identity(EngineId("consumer"), Rank(0), RANKS, FACTORS, "print"),
            settings=SETTINGS,
            agent=self.agent,  # type: ignore[arg-type]
            link=self.links,  # type: ignore[arg-type]
            local=Local(pages_of([REGION]), [BLOCK_SIZE], "pages", None),
            outbox=self.outbox,
            clock=lambda: START,
        )
        self.committed = False
        self.loads = frozenset(loads)
        self.ordered: frozenset[str] = frozenset()
        self._warm_up(len(loads) + 1)
        self.ordered = frozenset()

    @property
    def now(self) -> float:  # type: ignore[override]
        return self.links.now

    def _warm_up(self, block: int) -> None:
        order = LoadOrder(
            load=LoadId("earlier"),
            lease=LeaseId("earlier"),
            token=TOKEN,
            reader=ReaderId("earlier"),
            peer=KEY,
            start_token=0,
            end_token=BLOCK_SIZE,
            local_blocks=([block],),
            remote_blocks=[[(1, 1)]],
        )
        self.committed = True  # nothing is checked here
        hello = self.apply(("orders", Orders(loads=[order]))).requests[0]
        sent = self.apply(("hear", ProducerPart(0).apply(hello))).requests
        sent += self.apply(("end", "earlier", True)).requests
        for commit in sent:
            self.apply(("hear", Committed(seq=commit.seq, incarnation=KEY.incarnation)))
        self.committed = False

    def apply(self, event: Any) -> WorkerOut:
        match event:
            case ("orders", orders):
                self.ordered |= {order.load for order in orders.loads}
                self.puller.take(orders, self.now)
                return self._out()
            case ("hear", reply):
                self.committed = self.committed or isinstance(reply, Committed)
                self.links.hear(reply)
            case ("end", load, good):
                read = next(read for read in self.agent.busy if read.load == load)
                read.state = ReadState.DONE if good else ReadState.ERROR
                self.agent.busy.remove(read)
            case "tick" | "expire":
                self.links.now = self._tick_at() if event == "tick" else self._expire_at()
                for peer in self.links.peers.values():
                    peer.tick(self.now)
        self.puller.step(self.now)
        return self._out()

    def _pulls(self) -> list[Any]:
        return list(self.puller._loads._pulls.values())

    def _tick_at(self) -> float:
        pulls = self._pulls()
        times = self.links.deadlines()
        times += [pull.deadline if pull.report_at is None else pull.report_at for pull in pulls]
        return max(self.now, min(times, default=self.now))

    def _expire_at(self) -> float:
        """When the commit that waits has waited too long; else, when the load has."""
        if self.links.calls():
            return self.now + SETTINGS.commit_timeout_s
        return min((pull.deadline for pull in self._pulls() if pull.report_at is None), default=self.now)

    def _out(self) -> WorkerOut:
        report = self.outbox.take()
        started, self.agent.started = tuple(self.agent.started), []
        if report.received - report.failed.keys() and not self.committed:
            raise Violation("S1: received, and no Committed was heard")
        is_empty = not (report.received or report.settled)
        return WorkerOut(self.links.take_requests(), started, None if is_empty else report)

    def facts(self) -> WorkerFacts:
        calls = self.links.calls()
        pulls = self._pulls()
        quiet = f"{len(pulls)} loads" * bool(pulls) + f" calls {sorted(calls)}" * bool(calls)
        return WorkerFacts(
            calls=calls,
            can_start=any(pull.may_post for pull in self.puller._loads.reading),
            busy=tuple(sorted(read.load for read in self.agent.busy)),
            waits_to_report=any(pull.report_at is not None for pull in pulls),
            open=len(pulls),
            quiet=quiet or ("" if self.puller.is_idle else "reads"),
        )

    def core(self) -> Any:
        puller = self.puller
        if self.ordered == self.loads and not self.facts().quiet:  # over: nothing that it still remembers can matter
            return "over"
        return (
            puller._loads,
            puller._sources._sources,
            puller._sweep_at,
            self.links.peers,
            self.agent.busy,
            self.committed,
            self.ordered,
        )
