"""A consumer and a producer process to measure with, and the same reads by a bare NIXL loop between the same two."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from devtools.pair import BLOCK_SIZE, Consumer, Producer, Shape
from kvlease.config import Settings
from kvlease.core.orders import LoadOrder
from kvlease.core.plan import Chunk, Limits, plan
from kvlease.worker.agent import NixlAgent, ReadState
from kvlease.worker.regions import from_wire, pages_of, strided_rows

BIG = Shape(layers=64, blocks=2064, page_bytes=16 << 10)
"""2 GiB in 2,048 blocks, and some to spare: 128 regions of 8 KiB pages, 32k tokens of a 70B model on one of 8 ranks."""

HALF_GIB = Shape(layers=16, blocks=2064, page_bytes=16 << 10)
"""A quarter of it, block for block."""

RUN = 10
"""Blocks in a run where nine blocks in ten follow their neighbour."""

WAIT_S = 300.0
LOOK_S = 0.0005

Blocks = Mapping[int, int]
"""Producer's blocks (values) to be read into ours (keys); never block 0, which in vLLM holds nothing."""


def contiguous(count: int, first: int = 1) -> Blocks:
    """``count`` blocks in one run on both sides."""
    return {first + i: 3 + first + i for i in range(count)}


def nine_in_ten(count: int, of: int, seed: int = 1) -> Blocks:
    """``count`` of ``of`` blocks in runs of ten, which are shuffled on both sides."""
    ours, theirs = (_runs(count, of, seed + side) for side in (0, 1))
    return dict(zip(ours.tolist(), theirs.tolist(), strict=True))


def scattered(count: int, of: int, seed: int = 1) -> Blocks:
    """``count`` of ``of`` blocks, no two neighbours by intent."""
    ours, theirs = (np.random.default_rng(seed + side).permutation(of - 1)[:count] + 1 for side in (0, 1))
    return dict(zip(ours.tolist(), theirs.tolist(), strict=True))


def _runs(count: int, of: int, seed: int) -> NDArray[np.int64]:
    starts = np.random.default_rng(seed).permutation((of - 1) // RUN) * RUN + 1
    blocks: NDArray[np.int64] = (starts[:, None] + np.arange(RUN)).reshape(-1)[:count]
    return blocks


class DataPair:
    """Made by :func:`data_pair`."""

    def __init__(self, settings: Settings, shape: Shape, producer: Producer) -> None:
        self.settings, self.shape, self.producer = settings, shape, producer
        self.consumer = Consumer(settings, shape)
        self._names = (f"load-{number}" for number in itertools.count())
        self._bare: Bare | None = None

    @property
    def bare(self) -> Bare:
        """The loop to compare with; its agent is made when it is first used."""
        if self._bare is None:
            self._bare = Bare(self)
        return self._bare

    def order(self, blocks: Blocks) -> LoadOrder:
        """A load under a new lease."""
        return self.producer.order(next(self._names), blocks)

    def pull_s(self, blocks: Blocks) -> float:
        """Seconds from order to report of one load, on a lease that is held already."""
        return self.pull_all_s([self.order(blocks)])

    def pull_all_s(self, orders: list[LoadOrder]) -> float:
        """Seconds from the orders to the last report."""
        began = time.perf_counter()
        self.consumer.take(*orders)
        self.wait_for(*orders)
        return time.perf_counter() - began

    def wait_for(self, *orders: LoadOrder) -> None:
        """Until all are reported, and received well."""
        self.consumer.wait_for(*(order.load for order in orders), timeout_s=WAIT_S, step_s=LOOK_S)
        failed = {order.load: self.consumer.reports.failed.get(order.load) for order in orders}
        assert not any(failed.values()), failed

    def chunks(self, blocks: Blocks) -> list[Chunk]:
        """What the worker half would post for these blocks."""
        ours, theirs = pages_of(self.consumer.layout.regions), pages_of(from_wire(self.producer.info))
        limits = Limits(self.settings.chunk_bytes, self.settings.chunk_descriptors)
        runs = [(block, 1) for block in blocks.values()]
        return list(plan(ours, theirs, [BLOCK_SIZE], [list(blocks)], [runs], 0, BLOCK_SIZE * len(blocks), limits))


class Bare:
    """NIXL and nothing else, between the same memory of the same two processes, with kvlease's own settings."""

    def __init__(self, pair: DataPair) -> None:
        layout, info = pair.consumer.layout, pair.producer.info
        self.agent = NixlAgent(pair.settings)
        self.agent.register(layout.ranges, layout.memory)
        self.peer = self.agent.add_peer(info.agent_metadata)
        self.local = self.agent.prepare(None, strided_rows(layout.regions), layout.memory)
        self.remote = self.agent.prepare(self.peer, strided_rows(from_wire(info)), info.memory)

    def read_s(self, chunks: list[Chunk]) -> float:
        """Seconds to read them one after the other: make, post, ask until done, release."""
        began = time.perf_counter()
        for chunk in chunks:
            self._finish(self.agent.post(self.local, chunk.local, self.remote, chunk.remote))
        return time.perf_counter() - began

    def close(self) -> None:
        """Give everything back."""
        for prepared in (self.local, self.remote):
            self.agent.discard(prepared)
        self.agent.remove_peer(self.peer)
        self.agent.close()

    def _finish(self, read: Any) -> None:
        while (state := self.agent.state(read)) is ReadState.BUSY:
            pass
        assert state is ReadState.DONE, self.agent.error(read)
        self.agent.release(read)


@contextmanager
def data_pair(shape: Shape = BIG, **settings: Any) -> Iterator[DataPair]:
    """Two processes with KV caches of ``shape``; the producer's worker and endpoint are the other one."""
    chosen = Settings(**{"num_threads": 0, **settings})
    producer = Producer(chosen, shape, together=True)
    pair: DataPair | None = None
    try:
        pair = DataPair(chosen, shape, producer)
        yield pair
    finally:
        if pair is not None:
            if pair._bare is not None:
                pair._bare.close()
            pair.consumer.half.shutdown()
        producer.close()
