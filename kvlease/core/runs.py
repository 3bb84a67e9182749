"""Block ids as runs: ``[7, 8, 9, 3]`` is ``[(7, 3), (3, 1)]``.

An allocator hands out mostly consecutive blocks, so runs are what travels: a million-token prompt is often one pair.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvlease.core.messages import BlockRuns

Ids = npt.NDArray[np.int64]


def block_runs(block_ids: Sequence[int]) -> BlockRuns:
    """``block_ids`` as maximal ``(first block, how many)`` runs, in the same order; :func:`expand_runs` undoes it."""
    ids = np.asarray(block_ids, dtype=np.int64)
    if ids.size == 0:
        return []
    starts = np.concatenate(([0], np.flatnonzero(np.diff(ids) != 1) + 1))
    lengths = np.diff(starts, append=ids.size)
    return list(zip(ids[starts].tolist(), lengths.tolist(), strict=True))


def expand_runs(runs: BlockRuns, first: int, last: int, limit: int) -> Ids:
    """The ``[first, last)``-th of the blocks that ``runs`` stand for, in order.

    A peer makes up ``runs``: all are checked, and however many blocks they claim, only those asked for are made.

    Raises:
        ValueError: what are no pairs of integers, an empty run, a block that is not in ``[0, limit)``, or fewer than
            ``last`` blocks in all.
    """
    firsts, lengths = _table(runs)
    if firsts.size and (firsts.min() < 0 or lengths.min() < 1 or firsts.max() >= limit or lengths.max() > limit):
        raise ValueError(f"a block run lies outside its {limit} blocks")
    if firsts.size and int((firsts + lengths).max()) > limit:
        raise ValueError(f"a block run ends behind its {limit} blocks")
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if ends.size else 0
    if total < last:
        raise ValueError(f"{last} blocks are needed, the runs have {total}")
    begin, end = np.searchsorted(ends, (first, last - 1), side="right") if first < last else (0, -1)
    needed = slice(int(begin), int(end) + 1)
    from_block = firsts[needed] - (ends[needed] - lengths[needed])
    counts = np.minimum(ends[needed], last) - np.maximum(ends[needed] - lengths[needed], first)
    blocks: Ids = np.repeat(from_block, counts)
    blocks += np.arange(first, last, dtype=np.int64)
    return blocks


def _table(runs: BlockRuns) -> tuple[Ids, Ids]:
    if not runs:
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    try:
        table = np.asarray(runs, dtype=np.int64)
    except (OverflowError, ValueError, TypeError) as error:
        raise ValueError("block runs that are no pairs of integers") from error
    if table.ndim != 2 or table.shape[1] != 2:
        raise ValueError("block runs that are no pairs of integers")
    return table[:, 0], table[:, 1]
