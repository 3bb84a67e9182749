"""A producer in parts, as in production: its worker is a process of its own, its endpoint a thread here."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection

import pytest
import torch
import zmq

from kvlease.config import Settings
from kvlease.core.ids import (
    ChannelId,
    EngineId,
    Incarnation,
    LeaseId,
    LeaseToken,
    LoadId,
    PeerKey,
    Rank,
    reader_id,
)
from kvlease.core.leases import Grant, LeaseTable, LeaseTiming
from kvlease.core.messages import (
    PROTOCOL_VERSION,
    Acquire,
    Hello,
    Ping,
    Pong,
    RankInfo,
    Welcome,
    decode_request,
    encode,
)
from kvlease.core.orders import LoadOrder, Orders, Reports
from kvlease.worker.regions import LayerSpec, Layout, find_regions
from kvlease.worker.worker import WorkerHalf

BLOCK_SIZE = 16
CHANNEL = ChannelId("consumer")
TOKEN = LeaseToken(b"t" * 16)
WAIT_S = 20.0


def make_caches(layers: int, blocks: int, page_bytes: int, seed: int | None) -> dict[str, torch.Tensor]:
    """KV caches as an engine has them: all layers in one allocation, here with a K and a V plane each."""
    if seed is None:
        raw = torch.zeros((layers, 2, blocks, page_bytes // 2), dtype=torch.uint8)
    else:
        generator = torch.Generator().manual_seed(seed)
        raw = torch.randint(0, 256, (layers, 2, blocks, page_bytes // 2), dtype=torch.uint8, generator=generator)
    return {f"layers.{layer}": raw[layer] for layer in range(layers)}


def layout_of(caches: dict[str, torch.Tensor]) -> Layout:
    specs = {
        name: LayerSpec(group=0, num_pages=cache.shape[1], page_bytes=2 * cache.shape[2])
        for name, cache in caches.items()
    }
    return find_regions(caches, specs)


def make_half(settings: Settings, name: str) -> WorkerHalf:
    return WorkerHalf(
        settings=settings, engine_id=EngineId(name), rank=Rank(0), of_ranks=1, factors={"kv": "u8"}, fingerprint="f"
    )


def worker_process(pipe: Connection, settings: Settings, shape: tuple[int, int, int], seed: int) -> None:
    """A producer's worker: registers, serves, and does what it is told until the pipe closes."""
    half = make_half(settings, "producer")
    caches = make_caches(*shape, seed)  # kept: it is what is registered
    half.register(layout_of(caches), [BLOCK_SIZE])
    pipe.send(half.rank_info())
    try:
        while True:
            half.take_orders(Orders(leases_live=pipe.recv()))
    except EOFError:
        half.shutdown()


class Endpoint(threading.Thread):
    """The least that answers: a lease table behind a socket."""

    def __init__(self, incarnation: Incarnation, ranks: list[RankInfo]) -> None:
        super().__init__(daemon=True)
        timing = LeaseTiming(60.0, 60.0, 600.0, 0.0, 600.0, 1000)
        self.table = LeaseTable(incarnation, timing)
        self.ranks = ranks
        self.is_silent = False
        self.commits = 0
        self.lock = threading.Lock()
        self._incarnation = incarnation
        self._ends = threading.Event()
        self._socket = zmq.Context.instance().socket(zmq.ROUTER)
        self.port = self._socket.bind_to_random_port("tcp://127.0.0.1")

    def run(self) -> None:
        while not self._ends.is_set():
            if self._socket.poll(20):
                sender, frame = self._socket.recv_multipart()
                request = decode_request(frame)
                if self.is_silent:
                    continue
                match request:
                    case Hello(seq=seq):
                        reply = Welcome(
                            seq=seq, incarnation=self._incarnation, version=PROTOCOL_VERSION, ranks=self.ranks
                        )
                    case Ping(seq=seq):
                        reply = Pong(seq=seq, incarnation=self._incarnation)
                    case _:
                        with self.lock:
                            reply = self.table.handle(request, time.monotonic())
                self._socket.send_multipart([sender, encode(reply)])
        self._socket.close(linger=0)

    def close(self) -> None:
        self._ends.set()
        self.join()


class Producer:
    """One producer engine; ``caches`` is what its worker's memory holds."""

    def __init__(self, settings: Settings, shape: tuple[int, int, int], seed: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=worker_process, args=(theirs, settings, shape, seed), daemon=True)
        self.process.start()
        theirs.close()
        self.caches = make_caches(*shape, seed)
        self.incarnation = Incarnation(os.urandom(16))
        assert self.pipe.poll(60), "the worker did not come up"
        self.endpoint = Endpoint(self.incarnation, [self.pipe.recv()])
        self.endpoint.start()
        self.key = PeerKey(EngineId("producer"), self.incarnation, "127.0.0.1", self.endpoint.port)
        self.pipe.send(1)

    def lease(self, load: str, blocks: list[int]) -> None:
        """Grant a lease of ``blocks``, and let the load's reader acquire it."""
        runs = [[(block, 1) for block in blocks]]
        grant = Grant(LeaseId(f"lease-of-{load}"), TOKEN, b"digest", BLOCK_SIZE * len(blocks), runs)
        acquire = Acquire(
            seq=0,
            to=self.incarnation,
            lease=grant.lease,
            token=TOKEN,
            reader=reader_id(CHANNEL, LoadId(load)),
            channel=CHANNEL,
            digest=b"digest",
        )
        with self.endpoint.lock:
            self.endpoint.table.grant(grant, time.monotonic())
            self.endpoint.table.handle(acquire, time.monotonic())

    def expire(self) -> None:
        with self.endpoint.lock:
            self.endpoint.table.expire(time.monotonic() + 1000)

    def order(self, load: str, blocks: dict[int, int]) -> LoadOrder:
        """Read the producer's blocks (values) into ours (keys) under a new lease."""
        self.lease(load, list(blocks.values()))
        return LoadOrder(
            load=LoadId(load),
            lease=LeaseId(f"lease-of-{load}"),
            token=TOKEN,
            reader=reader_id(CHANNEL, LoadId(load)),
            peer=self.key,
            start_token=0,
            end_token=BLOCK_SIZE * len(blocks),
            local_blocks=(list(blocks),),
            remote_blocks=[[(block, 1) for block in blocks.values()]],
        )

    def signal_worker(self, which: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, which)
        if which is signal.SIGSTOP:
            os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)

    def close(self) -> None:
        self.endpoint.close()
        if self.process.is_alive():
            self.process.kill()
        self.process.join()
        self.pipe.close()


class Consumer:
    """One consumer rank: the real worker half."""

    def __init__(self, settings: Settings, shape: tuple[int, int, int]) -> None:
        self.caches = make_caches(*shape, None)
        self.half = make_half(settings, "consumer")
        self.half.register(layout_of(self.caches), [BLOCK_SIZE])
        self.reports = Reports()

    def take(self, *loads: LoadOrder, aborts: tuple[str, ...] = ()) -> None:
        self.half.take_orders(Orders(loads=list(loads), aborts=[LoadId(load) for load in aborts]))

    def wait(self, until: Callable[[], bool], timeout_s: float = WAIT_S) -> None:
        """Take reports, as an engine does at every step, until ``until`` says so."""
        ends_at = time.monotonic() + timeout_s
        while True:
            self._add(self.half.take_reports())
            if until():
                return
            assert time.monotonic() < ends_at, f"waited {timeout_s} s; {self.reports} {self.half.take_stats()}"
            time.sleep(0.0005)

    def wait_for(self, *loads: str, timeout_s: float = WAIT_S) -> None:
        self.wait(lambda: self.reports.received >= set(loads), timeout_s)

    def holds(self, producer: Producer, blocks: dict[int, int]) -> bool:
        ours, theirs = torch.tensor(list(blocks)), torch.tensor(list(blocks.values()))
        return all(
            torch.equal(self.caches[name][:, ours], producer.caches[name][:, theirs]) for name in producer.caches
        )

    def _add(self, more: Reports) -> None:
        assert not (more.received & self.reports.received), "reported twice"
        self.reports.received |= more.received
        self.reports.failed.update(more.failed)
        self.reports.unsettled |= more.unsettled
        self.reports.settled |= more.settled


@pytest.fixture
def make() -> Iterator[Callable[..., tuple[Consumer, Producer]]]:
    """Makes a consumer and a producer whose caches have ``(layers, blocks, page_bytes)``."""
    parts: list[Consumer | Producer] = []

    def pair(shape: tuple[int, int, int] = (3, 64, 4096), **extra: object) -> tuple[Consumer, Producer]:
        settings = Settings(num_threads=0, **extra)
        producer = Producer(settings, shape, seed=7)
        parts.append(producer)
        consumer = Consumer(settings, shape)
        parts.append(consumer)
        return consumer, producer

    yield pair
    for part in reversed(parts):
        if isinstance(part, Consumer):
            part.half.shutdown()
        else:
            part.close()
