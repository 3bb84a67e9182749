"""What of a load is compared by checksum, and how two sides that each have one half of the knowledge name it.

The consumer knows which blocks it reads, the producer which blocks the lease holds. So the consumer names *positions*:
the block at position ``i`` of a KV group holds the tokens ``[i * block_size, (i + 1) * block_size)``, here and there.
For each region it is one checksum over the pages at those positions, in order, as if they lay in one piece; how pages
lie in memory, and how many are looked at together, does not change it.

A block is compared whole, whichever of its tokens the load is about: it was read whole. One that the producer's engine
may still write to, behind the last token of the lease, would differ although all is well. That can only be the last one
of a lease that is not *settled*; it is left out, and the consumer is told.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Final, Literal

import numpy as np

from kvlease.core.messages import BlockRuns, ProtocolError
from kvlease.core.orders import LoadOrder
from kvlease.core.plan import Pages
from kvlease.core.runs import Ids, block_runs, expand_runs

ALGORITHM: Final = "crc32"
"""What both sides compute; a producer that can, says so at the handshake."""

SAMPLE_BLOCKS: Final = 8
"""How many blocks of each KV group ``sampled`` compares, at most."""

Extent = Literal["sampled", "full"]


def positions_to_check(
    order: LoadOrder, block_sizes: Sequence[int], null_block: int | None, extent: Extent, seed: bytes
) -> list[Ids]:
    """For each KV group the positions, ascending, of the blocks to compare of those that ``order`` reads.

    All of them, or for ``sampled`` one out of each of :data:`SAMPLE_BLOCKS` equal stretches: equal seeds choose alike.
    """
    found = []
    for group, (size, blocks) in enumerate(zip(block_sizes, order.local_blocks, strict=True)):
        is_empty = order.start_token >= order.end_token
        first, last = (0, 0) if is_empty else (order.start_token // size, -(-order.end_token // size))
        positions = np.arange(first, last, dtype=np.int64)
        if null_block is not None:
            positions = positions[np.asarray(blocks[first:last], dtype=np.int64) != null_block]
        found.append(positions if extent == "full" else _sample(positions, seed + bytes([group % 256])))
    return found


def check_bytes(pages: Pages, positions: Sequence[Ids]) -> int:
    """How many bytes the pages at ``positions`` have, over all regions."""
    return sum(len(positions[group]) * size for group, size in zip(pages.groups, pages.len_bytes, strict=True))


def without_last(positions: Sequence[Ids], remote_blocks: Sequence[BlockRuns]) -> list[Ids]:
    """``positions`` without that of the last block of the lease in each KV group; ``remote_blocks`` are the lease's."""
    counts = [sum(length for _, length in runs) for runs in remote_blocks]
    return [group[group < count - 1] for group, count in zip(positions, counts, strict=True)]


def blocks_at(positions: Sequence[Ids], blocks: Sequence[Sequence[int]]) -> list[Ids]:
    """The block ids at ``positions``, for each KV group."""
    return [np.asarray(ids, dtype=np.int64)[at] for at, ids in zip(positions, blocks, strict=True)]


def leased_blocks_at(positions: Sequence[BlockRuns], leased: Sequence[BlockRuns], is_settled: bool) -> list[BlockRuns]:
    """The producer's blocks at the ``positions`` that a consumer names, without those that are not settled.

    Raises:
        ProtocolError: ``bad_positions``: other KV groups than the lease has, positions that it does not have, or more.
    """
    if len(positions) != len(leased):
        raise ProtocolError("bad_positions", f"positions of {len(positions)} KV groups; the lease has {len(leased)}")
    return [_leased_at(asked, runs, is_settled) for asked, runs in zip(positions, leased, strict=True)]


def differing_regions(ours: Sequence[int], theirs: Sequence[int]) -> list[int]:
    """The regions whose checksums differ; a region that only one side has differs."""
    count = max(len(ours), len(theirs))
    return [at for at in range(count) if ours[at : at + 1] != theirs[at : at + 1]]


def _leased_at(asked: BlockRuns, leased: BlockRuns, is_settled: bool) -> BlockRuns:
    count = sum(length for _, length in leased)
    wanted = sum(length for _, length in asked)
    if wanted > count:
        raise ProtocolError("bad_positions", f"{wanted} positions in a lease of {count} blocks")
    try:
        positions = expand_runs(asked, 0, wanted, count)
    except ValueError as error:
        raise ProtocolError("bad_positions", str(error)) from error
    if not is_settled:
        positions = positions[positions < count - 1]
    blocks = expand_runs(leased, 0, count, 1 << 53)
    return block_runs(blocks[positions].tolist())


def _sample(positions: Ids, seed: bytes) -> Ids:
    if len(positions) <= SAMPLE_BLOCKS:
        return positions
    edges = np.arange(SAMPLE_BLOCKS + 1, dtype=np.int64) * len(positions) // SAMPLE_BLOCKS
    digest = hashlib.blake2b(seed, digest_size=4 * SAMPLE_BLOCKS).digest()
    draws = np.frombuffer(digest, dtype="<u4").astype(np.int64)
    chosen: Ids = positions[edges[:-1] + draws % np.diff(edges)]
    return chosen
