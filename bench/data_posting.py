"""What NIXL asks for a read before it is posted: by index into prepared pages, or as descriptors of our own making.

Addresses only: the memory is reserved, registered and never touched, so a million tokens need none. kvlease posts by
index. Descriptors that were merged beforehand would be the alternative; this is the measurement that decided.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.data_plan import BLOCK_TOKENS, BLOCKS, PAGE_BYTES, POOL, REGIONS, TOKENS, core_ms, patterns, plan_maker
from bench.output import Table
from kvlease.core.plan import Chunk, Indices
from kvlease.worker.agent import QUIET_ENV

_REGION_BYTES = POOL * PAGE_BYTES


def posting(rounds: int) -> Iterator[Table]:
    """All chunks of a million tokens, both ways."""
    columns = ["blocks", "pages", "descriptors", "by index ms", "us per page", "merged ms", "us per descriptor"]
    table = Table("Posting a million tokens, without the transfer, core ms", columns)
    with _pages() as pages:
        for name, blocks in patterns(BLOCKS).items():
            chunks = list(plan_maker(blocks)())
            by_index = core_ms(partial(_each, chunks, pages.by_index), rounds)
            merged = core_ms(partial(_each, chunks, pages.merged), rounds)
            num_pages, runs = sum(len(chunk) for chunk in chunks), sum(len(_runs(chunk)) for chunk in chunks)
            each = (by_index.median * 1e3 / num_pages, merged.median * 1e3 / runs)
            table.add(name, num_pages, runs, by_index, f"{each[0]:.4f}", merged, f"{each[1]:.4f}")
    yield table


def lengths(rounds: int) -> Iterator[Table]:
    """By index only, by the length of the prompt."""
    table = Table("Posting of 99 regions by length, without the transfer, core ms", ["tokens", "blocks", *patterns(1)])
    with _pages() as pages:
        for num_tokens in TOKENS:
            count = num_tokens // BLOCK_TOKENS
            plans = [list(plan_maker(blocks)()) for blocks in patterns(count).values()]
            cells = [core_ms(partial(_each, chunks, pages.by_index), rounds) for chunks in plans]
            table.add(f"{num_tokens >> 10}k", count, *cells)
    yield table


def _each(chunks: list[Chunk], make: Callable[[Chunk], Any]) -> None:
    for chunk in chunks:
        make(chunk).release()


def _runs(chunk: Chunk) -> NDArray[np.int64]:
    """Where the runs begin that are contiguous on both sides and within a region."""
    breaks = (np.diff(chunk.local) != 1) | (np.diff(chunk.remote) != 1) | (np.diff(chunk.local // POOL) != 0)
    return np.concatenate(([0], np.flatnonzero(breaks) + 1))


class _Pages:
    """Two agents of this process that have the same memory, and its pages as NIXL has them, as ours and as theirs."""

    def __init__(self, agent: Any, peer: str, base: int) -> None:
        self._agent, self._peer, self._base = agent, peer, base
        rows = _rows(base)
        self._local = agent.prep_xfer_dlist("NIXL_INIT_AGENT", rows, "DRAM")
        self._remote = agent.prep_xfer_dlist(peer, rows, "DRAM")

    def by_index(self, chunk: Chunk) -> Any:
        """As kvlease does it."""
        return self._agent.make_prepped_xfer("READ", self._local, chunk.local, self._remote, chunk.remote)

    def merged(self, chunk: Chunk) -> Any:
        """Descriptors of our own, merged where both sides are contiguous."""
        at = _runs(chunk)
        counts = np.diff(at, append=len(chunk))
        here = self._descriptors(chunk.local[at], counts)
        there = self._descriptors(chunk.remote[at], counts)
        return self._agent.initialize_xfer("READ", here, there, self._peer)

    def _descriptors(self, first_pages: Indices, counts: NDArray[np.int64]) -> Any:
        table = np.zeros((len(counts), 3), dtype=np.uint64)
        table[:, 0] = self._base + first_pages.astype(np.int64) * PAGE_BYTES
        table[:, 1] = counts * PAGE_BYTES
        return self._agent.get_xfer_descs(table, "DRAM")


@contextmanager
def _pages() -> Iterator[_Pages]:
    for name, value in QUIET_ENV.items():
        os.environ.setdefault(name, value)
    from nixl._api import nixl_agent, nixl_agent_config

    config = nixl_agent_config(enable_prog_thread=False, num_threads=0)
    agents = [nixl_agent(name, config) for name in ("here", "there")]
    memory = np.empty(REGIONS * _REGION_BYTES, dtype=np.uint8)
    for agent in agents:
        agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")
    peer = agents[0].add_remote_agent(agents[1].get_agent_metadata())
    yield _Pages(agents[0], peer if isinstance(peer, str) else peer.decode(), memory.ctypes.data)


def _rows(base: int) -> NDArray[np.uint64]:
    rows = [(base + region * _REGION_BYTES, PAGE_BYTES, 0, PAGE_BYTES, POOL) for region in range(REGIONS)]
    return np.array(rows, dtype=np.uint64)
