"""What ``kv_checksum`` costs: computing the checksums, and what a load takes longer for them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial

import numpy as np

from bench.data_pair import Blocks, DataPair, contiguous, data_pair, scattered
from bench.output import Table
from bench.timing import repeat, spread
from devtools.pair import Shape, layout_of, make_caches
from kvlease.core.checksums import SAMPLE_BLOCKS
from kvlease.core.runs import Ids
from kvlease.worker.page_sums import PageSums

PROMPT = Shape(layers=30, blocks=40, page_bytes=96 << 10)
"""Blocks of 128 tokens of a model with 23 KB of KV for each: 32 of them are 4k tokens, 90 MB."""

NUM_BLOCKS = 32
SMALL_PAGES = Shape(layers=30, blocks=1288, page_bytes=3 << 10)
"""The same bytes in blocks of 4 tokens."""

EXTENTS = ("off", "sampled", "full")


def checksum(rounds: int) -> Iterator[Table]:
    """How fast checksums are computed, and loads of 90 MB without, with sampled and with full ones, in turn."""
    yield _hashing(rounds)
    yield _loads(rounds)


def _hashing(rounds: int) -> Table:
    table = Table("Checksums of pages in host memory, core time", ["pages", "blocks", "GB/s"])
    for shape, count in ((PROMPT, NUM_BLOCKS), (SMALL_PAGES, NUM_BLOCKS * 32)):
        caches = make_caches(shape, seed=1)
        sums = PageSums(layout_of(caches))
        for name, blocks in _patterns(shape, count).items():
            ids = np.array(list(blocks.values()), dtype=np.int64)
            rate = repeat(partial(_gb_per_s, sums, ids, count * shape.block_bytes), rounds)
            table.add(f"{shape.page_bytes >> 1:,} bytes", name, rate)
    return table


def _gb_per_s(sums: PageSums, ids: Ids, len_bytes: int) -> float:
    began = time.thread_time()
    for _ in sums.sums([ids]):
        pass
    return len_bytes / (time.thread_time() - began) / 1e9


def _patterns(shape: Shape, count: int) -> dict[str, Blocks]:
    return {"contiguous": contiguous(count), "scattered": scattered(count, shape.blocks)}


def _loads(rounds: int) -> Table:
    columns = ["kv_checksum", "blocks compared", "load ms", "added ms"]
    table = Table("Load of 90 MB with and without checksums", columns)
    compared = {"off": 0, "sampled": min(SAMPLE_BLOCKS, NUM_BLOCKS), "full": NUM_BLOCKS}
    blocks = contiguous(NUM_BLOCKS)
    with ExitStack() as stack:
        pairs = {extent: stack.enter_context(data_pair(PROMPT, kv_checksum=extent)) for extent in EXTENTS}
        found = _in_turn(pairs, blocks, rounds)
    for extent in EXTENTS:
        added = [one - off for one, off in zip(found[extent], found["off"], strict=True)]
        table.add(extent, compared[extent], spread(found[extent]), spread(added))
    return table


def _in_turn(pairs: dict[str, DataPair], blocks: Blocks, rounds: int) -> dict[str, Sequence[float]]:
    """Milliseconds of each; who goes first changes from round to round, and the first round does not count."""
    found: dict[str, list[float]] = {extent: [] for extent in pairs}
    for number in range(rounds + 1):
        first = number % len(EXTENTS)
        for extent in (*EXTENTS[first:], *EXTENTS[:first]):
            took_ms = pairs[extent].pull_s(blocks) * 1e3
            if number:
                found[extent].append(took_ms)
    return dict(found)
