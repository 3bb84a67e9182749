"""A producer as in production: its worker is a process of its own, its endpoint a thread here, or there."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from kvlease.config import Settings
from kvlease.core.calls import RequestFactory
from kvlease.core.digest import prompt_digest
from kvlease.core.ids import ChannelId, EngineId, Incarnation, LeaseId, LeaseToken, LoadId, PeerKey, Rank, reader_id
from kvlease.core.leases import LeaseTiming
from kvlease.core.messages import Acquire, AnyReply, Granted, RankInfo
from kvlease.core.orders import LoadOrder, Orders, Reports
from kvlease.core.peers import Answered, Unanswered
from kvlease.core.silence import PeerTiming
from kvlease.net.channel import Channel
from kvlease.net.endpoint import Endpoint, GrantItem
from kvlease.worker.regions import LayerSpec, Layout, find_regions
from kvlease.worker.worker import WorkerHalf

FACTORS = {"kv": "u8"}
EXTENSION_S = 60.0
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
        settings=settings, engine_id=EngineId(name), rank=Rank(0), of_ranks=1, factors=FACTORS, fingerprint="f"
    )


def worker_process(
    pipe: Connection, settings: Settings, shape: tuple[int, int, int], seed: int, engine: bytes, port: int
) -> None:
    """A producer's worker, until the pipe closes. With an ``engine`` id its endpoint lives in this process, too."""
    half = make_half(settings, "producer")
    caches = make_caches(*shape, seed)  # kept: it is what is registered
    half.register(layout_of(caches), [BLOCK_SIZE])
    half.take_orders(Orders(leases_live=1))
    endpoint = start_endpoint(Incarnation(engine), half.rank_info(), EXTENSION_S, port) if engine else None
    pipe.send((half.rank_info(), endpoint.port if endpoint else 0))
    try:
        while True:
            item = pipe.recv()
            assert endpoint is not None
            endpoint.grant(item)
            pipe.send(None)
    except EOFError:
        if endpoint is not None:
            endpoint.close()
        half.shutdown()


def start_endpoint(incarnation: Incarnation, info: RankInfo, extension_s: float, port: int = 0) -> Endpoint:
    endpoint = Endpoint(incarnation, LeaseTiming(60.0, extension_s, 600.0, 0.0, 600.0, 1000), "127.0.0.1", port)
    endpoint.start()
    endpoint.set_ranks([info], FACTORS, "f", True)
    return endpoint


class Producer:
    """One producer engine; ``caches`` is what its worker's memory holds. ``together``: its two halves share a fate.
    ``method`` is how its process is started (``forkserver`` is quick from the second on), ``port`` that of an endpoint
    in that process.
    """

    def __init__(
        self,
        settings: Settings,
        shape: tuple[int, int, int],
        seed: int,
        together: bool,
        extension_s: float,
        method: str = "spawn",
        port: int = 0,
    ) -> None:
        self.incarnation = Incarnation(os.urandom(16))
        context = multiprocessing.get_context(method)
        if method == "forkserver":
            context.set_forkserver_preload([__name__])
        self.pipe, theirs = context.Pipe()
        arguments = (theirs, settings, shape, seed, self.incarnation if together else b"", port)
        self.process = context.Process(target=worker_process, args=arguments, daemon=True)
        self.process.start()
        theirs.close()
        self.caches = make_caches(*shape, seed)
        assert self.pipe.poll(60), "the worker did not come up"
        info, port = self.pipe.recv()
        self.endpoint = None if together else start_endpoint(self.incarnation, info, extension_s)
        if self.endpoint is not None:
            port = self.endpoint.port
        self.key = PeerKey(EngineId("producer"), self.incarnation, "127.0.0.1", port)
        self.channel = Channel(PeerTiming(10.0, 2.5))

    def order(self, load: str, blocks: dict[int, int]) -> LoadOrder:
        """Read the producer's blocks (values) into ours (keys), under a new lease that the reader has acquired."""
        lease, reader, tokens = LeaseId(f"lease-of-{load}"), reader_id(CHANNEL, LoadId(load)), BLOCK_SIZE * len(blocks)
        prompt = list(range(tokens))
        item = GrantItem(lease, TOKEN, prompt, tokens, None, None, [], [list(blocks.values())])
        if self.endpoint is not None:
            self.endpoint.grant(item)
        else:
            self.pipe.send(item)
            self.pipe.recv()
        digest = prompt_digest(prompt, tokens, lora=None, cache_salt=None, mm_hashes=[])
        granted = self._ask(
            lambda seq, to: Acquire(
                seq=seq, to=to, lease=lease, token=TOKEN, reader=reader, channel=CHANNEL, digest=digest
            )
        )
        assert isinstance(granted, Granted), granted
        return LoadOrder(
            load=LoadId(load),
            lease=lease,
            token=TOKEN,
            reader=reader,
            peer=self.key,
            start_token=0,
            end_token=granted.num_tokens,
            local_blocks=(list(blocks),),
            remote_blocks=granted.blocks,
        )

    def signal_worker(self, which: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, which)
        if which is signal.SIGSTOP:
            os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)

    def close(self) -> None:
        self.channel.close()
        if self.endpoint is not None:
            self.endpoint.close()
        if self.process.is_alive():
            self.process.kill()
        self.process.join()
        self.pipe.close()

    def _ask(self, factory: RequestFactory) -> AnyReply:
        """What the endpoint answers; this is the part of a consumer's scheduler half."""
        self.channel.peer(self.key).call("ask", factory, time.monotonic(), WAIT_S)
        while True:
            self.channel.poll(WAIT_S)
            for _, event in self.channel.take_events():
                match event:
                    case Answered(call="ask", reply=reply):
                        return reply
                    case Unanswered(cause=cause):
                        raise AssertionError(cause)


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


Make = Callable[..., tuple[Consumer, Producer]]


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes a consumer and a producer whose caches have ``(layers, blocks, page_bytes)``."""
    parts: list[Consumer | Producer] = []

    def pair(
        shape: tuple[int, int, int] = (3, 64, 4096),
        *,
        together: bool = False,
        extension_s: float = EXTENSION_S,
        **extra: Any,
    ) -> tuple[Consumer, Producer]:
        settings = Settings(num_threads=0, **extra)
        producer = Producer(settings, shape, 7, together, extension_s)
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
