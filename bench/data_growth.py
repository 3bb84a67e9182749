"""How the cost of pulls grows with the length of a prompt and with the number of loads at once."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Final

from bench import data_plan, data_posting
from bench.data_pair import HALF_GIB, DataPair, contiguous, data_pair, scattered
from bench.data_pull import TRANSFER_THREAD
from bench.output import Table
from bench.timing import Clocked, measured_by, thread_clock
from devtools.pair import BLOCK_SIZE

_TOKENS: Final = (1 << 10, 4 << 10, 16 << 10, 32 << 10)
_LOADS: Final = (1, 8, 64, 256, 512)
_BLOCKS_EACH: Final = 8


def tokens(rounds: int) -> Iterator[Table]:
    """By length of the prompt: planning and posting up to a million tokens, pulling as far as memory goes."""
    yield from data_plan.lengths(rounds)
    yield from data_posting.lengths(rounds)
    columns = ["tokens", "MiB", "contiguous ms", "core ms", "scattered ms", "scattered core ms"]
    table = Table("Pull by length of prompt, 16 KiB a token", columns)
    with data_pair(HALF_GIB) as pair:
        for num_tokens in _TOKENS:
            count = num_tokens // BLOCK_SIZE
            cells = []
            for blocks in (contiguous(count), scattered(count, pair.shape.blocks)):
                ours = Clocked(partial(pair.pull_s, blocks), thread_clock(TRANSFER_THREAD))
                cells += [found.scaled(1e3) for found in measured_by(ours, rounds)]
            table.add(f"{num_tokens >> 10}k", count * pair.shape.block_bytes >> 20, *cells)
    yield table


def loads(rounds: int) -> Iterator[Table]:
    """Many loads at once, from the first order to the last report."""
    columns = ["loads", "MiB in all", "all ms", "core ms", "core ms each"]
    table = Table("Loads at once, 2 MiB each", columns)
    with data_pair(HALF_GIB) as pair:
        for count in _LOADS:
            ours = Clocked(partial(_pull_all_s, pair, count), thread_clock(TRANSFER_THREAD))
            wall, core = (found.scaled(1e3) for found in measured_by(ours, rounds))
            mib = count * _BLOCKS_EACH * pair.shape.block_bytes >> 20
            table.add(count, mib, wall, core, core.median / count)
    yield table


def _pull_all_s(pair: DataPair, count: int) -> float:
    orders = [pair.order(contiguous(_BLOCKS_EACH, 1 + i * _BLOCKS_EACH % 2000)) for i in range(count)]
    return pair.pull_all_s(orders)
