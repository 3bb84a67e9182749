"""Block ids as runs: ``[7, 8, 9, 3]`` is ``[(7, 3), (3, 1)]``.

An allocator hands out mostly consecutive blocks, so runs are what travels: a million-token prompt is often one pair.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from kvlease.core.messages import BlockRuns

BLOCKS_MAX: Final = 1 << 24
"""How many blocks one group of one request may have: what bounds the memory a peer's runs can ask for."""


def block_runs(block_ids: Sequence[int]) -> BlockRuns:
    """``block_ids`` as maximal ``(first block, how many)`` runs, in the same order; :func:`expand_runs` undoes it."""
    ids = np.asarray(block_ids, dtype=np.int64)
    if ids.size == 0:
        return []
    starts = np.concatenate(([0], np.flatnonzero(np.diff(ids) != 1) + 1))
    lengths = np.diff(starts, append=ids.size)
    return list(zip(ids[starts].tolist(), lengths.tolist(), strict=True))


def expand_runs(runs: BlockRuns, max_blocks: int = BLOCKS_MAX) -> npt.NDArray[np.int64]:
    """The block ids that ``runs`` stand for, in order.

    Raises:
        ValueError: a block below 0 or from 2**31 on, an empty run, or more than ``max_blocks`` in all.
    """
    if not runs:
        return np.empty(0, dtype=np.int64)
    try:
        firsts, lengths = np.asarray(runs, dtype=np.int64).reshape(-1, 2).T
    except (OverflowError, TypeError) as error:
        raise ValueError(f"block runs that are no pairs of integers: {error}") from error
    if firsts.min() < 0 or firsts.max() >= 1 << 31 or lengths.min() < 1 or lengths.max() > max_blocks:
        raise ValueError("block runs outside the range of block numbers")
    total = int(lengths.sum())
    if total > max_blocks:
        raise ValueError(f"block runs of {total} blocks; at most {max_blocks} are accepted")
    positions = np.cumsum(lengths) - lengths
    blocks: npt.NDArray[np.int64] = np.arange(total, dtype=np.int64) + np.repeat(firsts - positions, lengths)
    return blocks
