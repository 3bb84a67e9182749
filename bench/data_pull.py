"""How fast a pull is, against a bare NIXL loop over the same descriptors, and how that depends on the chunks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial

from bench.data_pair import HALF_GIB, RUN, Blocks, contiguous, data_pair, nine_in_ten, scattered
from bench.output import Table
from bench.timing import Clocked, alternate_both, repeat, thread_clock, timed

NUM_BLOCKS = 2048
SHARE_MIN = 0.9
TRANSFER_THREAD = "kvlease-transfer"

_MIB = 1 << 20
_CHUNKS = ((1, 1024), (4, 1024), (8, 1024), (16, 512), (16, 1024), (16, 2048), (16, 8192), (64, 8192), (256, 32768))


def patterns(count: int = NUM_BLOCKS, of: int = HALF_GIB.blocks) -> dict[str, Blocks]:
    """The three ways in which blocks lie."""
    return {
        "contiguous": contiguous(count),
        f"runs of {RUN}": nine_in_ten(count, of),
        "scattered": scattered(count, of),
    }


def pull(rounds: int) -> Iterator[Table]:
    """A pull through the worker half, order to committed report, beside NIXL alone.

    On a machine that others use, the thread's own time on a core says more than the clock on the wall: where posting
    copies, as between two processes of one host, it is what a pull takes on a machine of its own.
    """
    bound = f"share of NIXL's own speed at least {SHARE_MIN}, by core time"
    columns = ["blocks", "pull ms", "NIXL alone ms", "share", "pull core ms", "NIXL core ms", "core share"]
    table = Table("Pull of 512 MiB", columns, bound)
    shares = []
    with data_pair(HALF_GIB) as pair:
        for name, blocks in patterns().items():
            ours = Clocked(partial(pair.pull_s, blocks), thread_clock(TRANSFER_THREAD))
            bare = Clocked(partial(pair.bare.read_s, pair.chunks(blocks)), time.thread_time)
            wall, core = alternate_both(ours, bare, rounds, warm_up=2)
            shares.append(1 / core.ratio.median)
            cells = [found.scaled(1e3) for found in (wall.a, wall.b, core.a, core.b)]
            table.add(name, *cells[:2], 1 / wall.ratio.median, *cells[2:], shares[-1])
    table.is_met = min(shares) >= SHARE_MIN
    yield table


def chunks(rounds: int) -> Iterator[Table]:
    """The same pull with other limits of a chunk: where small chunks begin to cost, and what large ones block."""
    table = Table("Pull of 512 MiB by size of chunk, core ms", ["MiB, descriptors", *patterns(), "one scattered chunk"])
    for mib, descriptors in _CHUNKS:
        with data_pair(HALF_GIB, chunk_bytes=mib * _MIB, chunk_descriptors=descriptors) as pair:
            one = max(pair.chunks(patterns()["scattered"]), key=len)
            cells = [
                repeat(timed(partial(pair.pull_s, blocks), thread_clock(TRANSFER_THREAD)), rounds, warm_up=2)
                for blocks in patterns().values()
            ]
            cells.append(repeat(timed(partial(pair.bare.read_s, [one]), time.thread_time), rounds, warm_up=2))
        table.add(f"{mib}, {descriptors}", *(cell.scaled(1e3) for cell in cells))
    yield table
