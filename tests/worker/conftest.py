"""One consumer rank and its producers, in one process, on a clock that stands still."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import pytest

from kvlease.config import Settings
from kvlease.core.checksums import ALGORITHM, leased_blocks_at
from kvlease.core.ids import EngineId, Incarnation, LeaseId, LeaseToken, LoadId, PeerKey, Rank, ReaderId
from kvlease.core.messages import (
    PROTOCOL_VERSION,
    AnyReply,
    AnyRequest,
    Checksum,
    Checksums,
    Commit,
    Committed,
    Hello,
    Ping,
    Pong,
    RankInfo,
    Welcome,
)
from kvlease.core.orders import LoadOrder, Orders, Reports
from kvlease.core.peers import Event, Peer, PeerForgotten
from kvlease.core.runs import Ids, expand_runs
from kvlease.core.silence import PeerTiming
from kvlease.testing import FakeAgent, FakeClock, FakeFabric
from kvlease.worker.hasher import Job
from kvlease.worker.outbox import Outbox
from kvlease.worker.page_sums import PageSums
from kvlease.worker.puller import Local, Puller
from kvlease.worker.regions import Layout, MemoryRange, Region, pages_of, strided_rows, to_wire
from kvlease.worker.sources import Identity

R = TypeVar("R", bound=AnyRequest)

PAGE = 64
BLOCKS = 32
REGIONS = 3
BLOCK_SIZE = 4


class Memory:
    """The KV of one engine: ``REGIONS`` arrays of pages, registered with an agent of its own."""

    def __init__(self, fabric: FakeFabric, fill: int | None = None) -> None:
        rng = np.random.default_rng(fill)
        self.pages = (
            rng.integers(0, 256, (REGIONS, BLOCKS, PAGE), dtype=np.uint8)
            if fill is not None
            else np.zeros((REGIONS, BLOCKS, PAGE), dtype=np.uint8)
        )
        self.regions = [Region(plane.ctypes.data, PAGE, PAGE, BLOCKS, 0, 0) for plane in self.pages]
        self.agent = FakeAgent(fabric)
        self.agent.register([MemoryRange(self.pages.ctypes.data, self.pages.nbytes, 0)], "DRAM")

    def sums(self, blocks: Sequence[Ids]) -> list[int]:
        """The checksums of these blocks, all at once."""
        steps = PageSums(Layout(self.regions, "DRAM", [])).sums(blocks)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                return end.value


class Producer:
    """Answers what it is told to: ``say[type]`` replaces the answer to one kind of request. None is silence."""

    def __init__(self, fabric: FakeFabric, name: str, port: int) -> None:
        self.memory = Memory(fabric, fill=sum(name.encode()))
        self.incarnation = Incarnation(name.encode().ljust(16, b"."))
        self.key = PeerKey(EngineId(name), self.incarnation, "127.0.0.1", port)
        self.say: dict[type, Callable[[AnyRequest], AnyReply | None]] = {}
        self.heard: list[AnyRequest] = []
        self.is_silent = False
        self.checksum = ""
        self.leases: dict[str, list[tuple[int, int]]] = {}
        self.is_settled = True

    def rank_info(self) -> RankInfo:
        regions = [to_wire(region) for region in self.memory.regions]
        return RankInfo(rank=0, agent_metadata=self.memory.agent.metadata(), regions=regions, checksum=self.checksum)

    def answer(self, request: AnyRequest) -> AnyReply | None:
        self.heard.append(request)
        if self.is_silent:
            return None
        if type(request) in self.say:
            return self.say[type(request)](request)
        match request:
            case Hello(seq=seq):
                ranks = [self.rank_info()]
                return Welcome(seq=seq, incarnation=self.incarnation, version=PROTOCOL_VERSION, ranks=ranks)
            case Ping(seq=seq):
                return Pong(seq=seq, incarnation=self.incarnation)
            case Checksum(seq=seq, lease=lease, positions=positions):
                (runs,) = leased_blocks_at(positions, [self.leases[lease]], self.is_settled)
                sums = self.memory.sums([expand_runs(runs, 0, sum(count for _, count in runs), BLOCKS)])
                return Checksums(seq=seq, incarnation=self.incarnation, sums=sums, is_whole=self.is_settled)
            case Commit(seq=seq):
                return Committed(seq=seq, incarnation=self.incarnation)
        raise AssertionError(request)

    def heard_of(self, kind: type[R]) -> list[R]:
        return [request for request in self.heard if isinstance(request, kind)]


class FakeLink:
    """A channel without sockets: real peers, and producers that answer within one poll."""

    def __init__(self, clock: Callable[[], float], timing: PeerTiming) -> None:
        self.clock, self.timing = clock, timing
        self.producers: dict[PeerKey, Producer] = {}
        self.peers: dict[PeerKey, Peer] = {}
        self.forgotten: list[PeerKey] = []
        self.events: list[tuple[PeerKey, Event]] = []

    def peer(self, key: PeerKey) -> Peer:
        return self.peers.setdefault(key, Peer(key, self.timing, changed=self._adopt))

    def let_go(self, key: PeerKey) -> None:
        """As a channel does with a peer that is idle for long, or when it has too many."""
        del self.peers[key]
        self.events.append((key, PeerForgotten()))

    def forget(self, key: PeerKey) -> None:
        self.peers.pop(key, None)
        self.forgotten.append(key)

    def poll(self, timeout_s: float) -> None:
        for key, peer in self.peers.items():
            peer.tick(self.clock())
            for request in peer.take_requests():
                producer = self.producers.get(key)
                reply = producer.answer(request) if producer is not None else None
                if reply is not None:
                    peer.hear(reply, self.clock())
            self.events += [(key, event) for event in peer.take_events()]

    def wake(self) -> None:
        pass

    def take_events(self) -> list[tuple[PeerKey, Event]]:
        events, self.events = self.events, []
        return events

    def close(self) -> None:
        self.peers.clear()

    def _adopt(self, peer: Peer) -> None:
        """A peer that was let go and is used again."""
        self.peers.setdefault(peer.key, peer)


class ScriptedHasher:
    """Computes at once, or with ``is_slow`` when it is told to; ``error`` instead of a result."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.jobs: list[Job] = []
        self.is_slow = False
        self.error = ""

    def submit(self, blocks: Sequence[Ids], tell: Callable[[list[int] | str], None]) -> Job:
        self.jobs.append(Job(blocks, tell))
        if not self.is_slow:
            self.finish()
        return self.jobs[-1]

    def finish(self) -> None:
        self.jobs[-1].tell(self.error or self.memory.sums(self.jobs[-1].blocks))


@dataclass
class World:
    """A consumer's puller, and whom it can read from."""

    settings: Settings = field(default_factory=lambda: Settings(chunk_bytes=2 * PAGE))
    clock: FakeClock = field(default_factory=FakeClock)
    fabric: FakeFabric = field(default_factory=FakeFabric)

    def __post_init__(self) -> None:
        timing = PeerTiming(self.settings.peer_timeout_s, self.settings.ping_interval_s())
        self.link = FakeLink(self.clock, timing)
        self.memory = Memory(self.fabric)
        self.agent = self.memory.agent
        self.outbox = Outbox()
        rows = strided_rows(self.memory.regions)
        self.hasher = ScriptedHasher(self.memory)
        checksum = ALGORITHM if self.settings.kv_checksum != "off" else ""
        self.puller = Puller(
            identity=Identity(EngineId("consumer"), Rank(0), 1, {"kv": "bf16"}, "print", checksum),
            settings=self.settings,
            agent=self.agent,
            link=self.link,
            local=Local(pages_of(self.memory.regions), [BLOCK_SIZE], self.agent.prepare(None, rows, "DRAM"), None),
            outbox=self.outbox,
            clock=self.clock,
            hashing=self.hasher if checksum else None,
        )
        self.producer = self.new_producer("p")

    def also_at(self, producer: Producer, port: int) -> PeerKey:
        """Another address of a producer."""
        key = producer.key._replace(port=port)
        self.link.producers[key] = producer
        return key

    def new_producer(self, name: str, port: int | None = None) -> Producer:
        """At an address of its own, unless ``port`` says where."""
        producer = Producer(self.fabric, name, port or len(self.link.producers) + 1)
        producer.checksum = ALGORITHM if self.settings.kv_checksum != "off" else ""
        self.link.producers[producer.key] = producer
        return producer

    def order(self, load: str, blocks: dict[int, int], producer: Producer | None = None, **changes: Any) -> LoadOrder:
        """Read the producer's blocks (values) into ours (keys)."""
        (producer or self.producer).leases[f"lease-of-{load}"] = [(block, 1) for block in blocks.values()]
        fields: dict[str, Any] = {
            "load": LoadId(load),
            "lease": LeaseId(f"lease-of-{load}"),
            "token": LeaseToken(b"t" * 16),
            "reader": ReaderId(f"channel/{load}"),
            "peer": (producer or self.producer).key,
            "start_token": 0,
            "end_token": BLOCK_SIZE * len(blocks),
            "local_blocks": (list(blocks),),
            "remote_blocks": [[(block, 1) for block in blocks.values()]],
        }
        return LoadOrder(**{**fields, **changes})

    def take(self, *loads: LoadOrder, aborts: tuple[str, ...] = ()) -> None:
        self.puller.take(Orders(loads=list(loads), aborts=[LoadId(load) for load in aborts]), self.clock())

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            self.link.poll(0.0)
            self.puller.step(self.clock())

    def run_for(self, seconds: float, step_s: float = 0.05) -> None:
        for _ in range(round(seconds / step_s)):
            self.clock.advance(step_s)
            self.step()

    def reports(self) -> Reports:
        return self.outbox.take()

    def holds(self, blocks: dict[int, int], producer: Producer | None = None) -> bool:
        theirs = (producer or self.producer).memory.pages
        return all((self.memory.pages[:, ours] == theirs[:, their]).all() for ours, their in blocks.items())


@pytest.fixture
def world() -> World:
    return World()
