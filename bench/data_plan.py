"""What planning costs, with addresses only: a million tokens need no memory of that size."""

from __future__ import annotations

import time
import tracemalloc
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Final

from bench.data_pair import Blocks, contiguous, nine_in_ten, scattered
from bench.output import Table
from bench.timing import Spread, repeat, timed
from kvlease.config import Settings
from kvlease.core.plan import Chunk, Limits, Pages, Plan, plan
from kvlease.core.runs import block_runs

REGIONS, BLOCKS, BLOCK_TOKENS, PAGE_BYTES = 99, 16_384, 64, 8192
POOL = 20_000
TOKENS: Final = (1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20)
MIXED_MS, SCATTERED_MS, MEMORY_MIB = 5.0, 40.0, 64.0

PAGES: Final = Pages((0,) * REGIONS, (POOL,) * REGIONS, (PAGE_BYTES,) * REGIONS)


def plan_maker(blocks: Blocks) -> Callable[[], Plan]:
    """Makes the plan of a load of ``blocks``, with the default limits."""
    settings = Settings()
    limits = Limits(settings.chunk_bytes, settings.chunk_descriptors)
    ours, theirs = [list(blocks)], [block_runs(list(blocks.values()))]
    return partial(plan, PAGES, PAGES, [BLOCK_TOKENS], ours, theirs, 0, BLOCK_TOKENS * len(blocks), limits)


def patterns(count: int) -> dict[str, Blocks]:
    """The three ways in which ``count`` of ``POOL`` blocks lie."""
    return {
        "contiguous": contiguous(count),
        "nine in ten follow": nine_in_ten(count, POOL),
        "scattered": scattered(count, POOL),
    }


def planning(rounds: int) -> Iterator[Table]:
    """99 regions x 16,384 blocks, 1.6 M pages: first the plan, then all of its chunks."""
    bound = f"core time < {MIXED_MS} ms mostly contiguous, < {SCATTERED_MS} ms scattered; < {MEMORY_MIB} MiB"
    columns = ["blocks", "plan and chunks ms", "first chunk ms", "chunks", "MiB at most"]
    table = Table("Plan of a million tokens", columns, bound, is_met=True)
    for name, blocks in patterns(BLOCKS).items():
        make = plan_maker(blocks)
        whole, first = core_ms(partial(_all_chunks, make), rounds), core_ms(partial(_first_chunk, make), rounds)
        peak_mib = _peak_mib(partial(_all_chunks, make))
        table.add(name, whole, first, sum(1 for _ in make()), peak_mib)
        bound_ms = SCATTERED_MS if name == "scattered" else MIXED_MS
        table.is_met = table.is_met and whole.median < bound_ms and peak_mib < MEMORY_MIB
    yield table


def lengths(rounds: int) -> Iterator[Table]:
    """The same by the length of the prompt."""
    table = Table("Plan of 99 regions by length, core ms", ["tokens", "blocks", *patterns(1)])
    for num_tokens in TOKENS:
        count = num_tokens // BLOCK_TOKENS
        makers = [plan_maker(blocks) for blocks in patterns(count).values()]
        cells = [core_ms(partial(_all_chunks, make), rounds) for make in makers]
        table.add(f"{num_tokens >> 10}k", count, *cells)
    yield table


def core_ms(action: Callable[[], object], rounds: int) -> Spread:
    """Milliseconds of this thread's core time."""
    return repeat(timed(action, time.thread_time), rounds).scaled(1e3)


def _all_chunks(make: Callable[[], Plan]) -> None:
    deque(make(), 0)


def _first_chunk(make: Callable[[], Plan]) -> Chunk:
    return next(make())


def _peak_mib(action: Callable[[], object]) -> float:
    tracemalloc.start()
    try:
        action()
        return tracemalloc.get_traced_memory()[1] / (1 << 20)
    finally:
        tracemalloc.stop()
