"""A consumer rank here and a producer rank in another process, over real NIXL, without an engine.

Both run kvlease's own worker half on KV caches made up here, and the producer a real endpoint. For the two-process
tests, the measurements and the GPU check; it needs torch and nixl, and no vLLM.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, SpawnContext
from typing import Literal

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
from kvlease.net.hashing import HasherAddress
from kvlease.worker.agent import Agent, NixlAgent
from kvlease.worker.regions import LayerSpec, Layout, find_regions
from kvlease.worker.worker import WorkerHalf

FACTORS = {"kv": "u8"}
EXTENSION_S = 60.0
BLOCK_SIZE = 16
CHANNEL = ChannelId("consumer")
TOKEN = LeaseToken(b"t" * 16)
WAIT_S = 20.0
START_S = 180.0

Caches = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Shape:
    """The KV caches of one rank: all layers in one allocation, each with a K and a V plane, as engines have them.

    ``page_bytes`` is what one block holds of one layer, K and V together, so a page of a plane is half of it; a
    multiple of 16.
    """

    layers: int
    blocks: int
    page_bytes: int
    device: str = "cpu"

    @property
    def len_bytes(self) -> int:
        """All of it."""
        return self.layers * self.blocks * self.page_bytes

    @property
    def block_bytes(self) -> int:
        """One block of all layers."""
        return self.layers * self.page_bytes


def make_caches(shape: Shape, seed: int | None) -> Caches:
    """Random bytes that only depend on ``seed``, whatever the device; without one, zeros."""
    size = (shape.layers, 2, shape.blocks, shape.page_bytes // 2)
    if seed is None:
        raw = torch.zeros(size, dtype=torch.uint8, device=shape.device)
    else:
        generator = torch.Generator().manual_seed(seed)
        raw = torch.empty(size, dtype=torch.uint8, device=shape.device)
        for layer in raw:  # one at a time: random numbers are made on the host, eight bytes at once
            words = torch.empty(layer.numel() // 8, dtype=torch.int64).random_(generator=generator)
            layer.copy_(words.view(torch.uint8).view(layer.shape))
    if raw.is_cuda:
        torch.cuda.synchronize()  # NIXL does not wait for torch
    return {f"layers.{layer}": raw[layer] for layer in range(shape.layers)}


def layout_of(caches: Mapping[str, torch.Tensor]) -> Layout:
    """The layout of :func:`make_caches`."""
    specs = {
        name: LayerSpec(group=0, num_pages=cache.shape[1], page_bytes=2 * cache.shape[2])
        for name, cache in caches.items()
    }
    return find_regions(caches, specs)


def make_half(
    settings: Settings,
    name: str,
    rank: int = 0,
    of_ranks: int = 1,
    make_agent: Callable[[Settings], Agent] = NixlAgent,
) -> WorkerHalf:
    """One rank's worker half."""
    return WorkerHalf(
        settings=settings,
        engine_id=EngineId(name),
        rank=Rank(rank),
        of_ranks=of_ranks,
        factors=FACTORS,
        fingerprint="f",
        make_agent=make_agent,
    )


def start_endpoint(
    incarnation: Incarnation,
    ranks: list[RankInfo],
    extension_s: float = EXTENSION_S,
    port: int = 0,
    hashers: Sequence[HasherAddress | None] = (),
) -> Endpoint:
    """A producer's endpoint, on a free port unless one is named. ``hashers``: each rank's, where checksums are on."""
    endpoint = Endpoint(incarnation, LeaseTiming(60.0, extension_s, 600.0, 0.0, 600.0, 1000), "127.0.0.1", port)
    endpoint.start()
    endpoint.ask_hashers([hasher for hasher in hashers if hasher is not None])
    endpoint.set_ranks(ranks, FACTORS, "f", True)
    return endpoint


def _worker_process(pipe: Connection, settings: Settings, shape: Shape, seed: int, engine: bytes, port: int) -> None:
    """A producer's worker, until the pipe closes. With an ``engine`` id its endpoint lives in this process, too."""
    half = make_half(settings, "producer")
    caches = make_caches(shape, seed)  # kept: it is what is registered
    half.register(layout_of(caches), [BLOCK_SIZE])
    half.take_orders(Orders(leases_live=1))
    info, hasher = half.rank_info(), half.hasher_address()
    endpoint = start_endpoint(Incarnation(engine), [info], port=port, hashers=[hasher]) if engine else None
    pipe.send((info, hasher, endpoint.port if endpoint else 0))
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


class Producer:
    """One producer engine: its worker is a process of its own, its endpoint a thread here or, ``together``, there.

    ``method`` is how the process is started (``forkserver`` is quick from the second on), ``port`` that of an endpoint
    in that process.
    """

    def __init__(
        self,
        settings: Settings,
        shape: Shape,
        *,
        seed: int = 7,
        together: bool = False,
        extension_s: float = EXTENSION_S,
        method: Literal["spawn", "forkserver"] = "spawn",
        port: int = 0,
    ) -> None:
        self.incarnation = Incarnation(os.urandom(16))
        self._host_shape, self._seed = replace(shape, device="cpu"), seed
        context: SpawnContext | ForkServerContext = multiprocessing.get_context("spawn")
        if method == "forkserver":
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload([__name__])
        self.pipe, theirs = context.Pipe()
        arguments = (theirs, settings, shape, seed, self.incarnation if together else b"", port)
        self.process = context.Process(target=_worker_process, args=arguments, daemon=True)
        self.process.start()
        theirs.close()
        assert self.pipe.poll(START_S), "the worker did not come up"
        self.info, hasher, port = self.pipe.recv()
        self.endpoint = None
        if not together:
            self.endpoint = start_endpoint(self.incarnation, [self.info], extension_s, hashers=[hasher])
        if self.endpoint is not None:
            port = self.endpoint.port
        self.key = PeerKey(EngineId("producer"), self.incarnation, "127.0.0.1", port)
        self.channel = Channel(PeerTiming(10.0, 2.5))

    @cached_property
    def caches(self) -> Caches:
        """What the worker's memory holds, in host memory."""
        return make_caches(self._host_shape, self._seed)

    def order(self, load: str, blocks: Mapping[int, int]) -> LoadOrder:
        """Read the producer's blocks (values) into ours (keys), under a new lease that the reader has acquired."""
        lease, tokens = LeaseId(f"lease-of-{load}"), BLOCK_SIZE * len(blocks)
        prompt = list(range(tokens))
        self._grant(GrantItem(lease, TOKEN, prompt, tokens, None, None, [], [list(blocks.values())]))
        granted = acquire(self.channel, self.key, lease, LoadId(load), prompt)
        return make_order(self.key, lease, LoadId(load), granted, list(blocks))

    def signal_worker(self, which: signal.Signals) -> None:
        """Stop, go on or end; a stop is waited for."""
        assert self.process.pid is not None
        os.kill(self.process.pid, which)
        if which is signal.SIGSTOP:
            os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)

    def close(self) -> None:
        """End the process, without asking it."""
        self.channel.close()
        if self.endpoint is not None:
            self.endpoint.close()
        if self.process.is_alive():
            self.process.kill()
        self.process.join()
        self.pipe.close()

    def _grant(self, item: GrantItem) -> None:
        if self.endpoint is not None:
            self.endpoint.grant(item)
        else:
            self.pipe.send(item)
            self.pipe.recv()


def acquire(channel: Channel, key: PeerKey, lease: LeaseId, load: LoadId, prompt: list[int]) -> Granted:
    """The part of a consumer's scheduler half: claim the lease of ``prompt`` for ``load``."""
    digest = prompt_digest(prompt, len(prompt), lora=None, cache_salt=None, mm_hashes=[])
    reader = reader_id(CHANNEL, load)
    granted = _ask(
        channel,
        key,
        lambda seq, to: Acquire(
            seq=seq, to=to, lease=lease, token=TOKEN, reader=reader, channel=CHANNEL, digest=digest
        ),
    )
    assert isinstance(granted, Granted), granted
    return granted


def make_order(key: PeerKey, lease: LeaseId, load: LoadId, granted: Granted, local_blocks: list[int]) -> LoadOrder:
    """What the scheduler half tells the worker half after :func:`acquire`."""
    return LoadOrder(
        load=load,
        lease=lease,
        token=TOKEN,
        reader=reader_id(CHANNEL, load),
        peer=key,
        start_token=0,
        end_token=granted.num_tokens,
        local_blocks=(local_blocks,),
        remote_blocks=granted.blocks,
    )


def _ask(channel: Channel, key: PeerKey, factory: RequestFactory) -> AnyReply:
    channel.peer(key).call("ask", factory, time.monotonic(), WAIT_S)
    while True:
        channel.poll(WAIT_S)
        for _, event in channel.take_events():
            match event:
                case Answered(call="ask", reply=reply):
                    return reply
                case Unanswered(cause=cause):
                    raise AssertionError(cause)


class Consumer:
    """One consumer rank: the real worker half, in this process."""

    def __init__(self, settings: Settings, shape: Shape, make_agent: Callable[[Settings], Agent] = NixlAgent) -> None:
        self.caches = make_caches(shape, None)
        self.half = make_half(settings, "consumer", make_agent=make_agent)
        self.layout = layout_of(self.caches)
        self.half.register(self.layout, [BLOCK_SIZE])
        self.reports = Reports()

    def take(self, *loads: LoadOrder, aborts: tuple[str, ...] = ()) -> None:
        """Give orders."""
        self.half.take_orders(Orders(loads=list(loads), aborts=[LoadId(load) for load in aborts]))

    def wait(self, until: Callable[[], bool], timeout_s: float = WAIT_S, step_s: float = 0.0005) -> None:
        """Take reports, as an engine does at every step, until ``until`` says so."""
        ends_at = time.monotonic() + timeout_s
        while True:
            self._add(self.half.take_reports())
            if until():
                return
            assert time.monotonic() < ends_at, f"waited {timeout_s} s; {self.reports} {self.half.take_stats()}"
            time.sleep(step_s)

    def wait_for(self, *loads: str, timeout_s: float = WAIT_S, step_s: float = 0.0005) -> None:
        """Until each of them was reported."""
        self.wait(lambda: self.reports.received >= set(loads), timeout_s, step_s)

    def holds(self, producer: Producer, blocks: Mapping[int, int]) -> bool:
        """Whether our blocks (keys) are, byte for byte, the producer's (values)."""
        ours, theirs = torch.tensor(list(blocks)), torch.tensor(list(blocks.values()))
        return all(
            torch.equal(cache[:, ours.to(cache.device)].cpu(), producer.caches[name][:, theirs])
            for name, cache in self.caches.items()
        )

    def _add(self, more: Reports) -> None:
        assert not (more.received & self.reports.received), "reported twice"
        self.reports.received |= more.received
        self.reports.failed.update(more.failed)
        self.reports.unsettled |= more.unsettled
        self.reports.settled |= more.settled
