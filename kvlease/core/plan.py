"""From regions, blocks and a token range to the page indices that a transfer reads: pure numpy, no addresses.

Both sides number their pages alike: region after region, page after page, so the index of a page is its region's
offset plus its block id. Blocks are paired by **absolute token position**: block ``i`` of a group, here and there,
holds the tokens ``[i * block_size, (i + 1) * block_size)``. Counting from an end would pair the wrong pages as soon
as one side cached more.

Everything remote is untrusted: an id outside its region, a list that is too short or a number that does not fit is a
:class:`PlanError`, never a read of somebody else's page.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from kvlease.core.messages import BlockRuns

PAGES_MAX = 1 << 31
"""Indices are 32 bit in NIXL, so one side may have this many pages over all regions."""

Ids = NDArray[np.int64]
Indices = NDArray[np.int32]


class PlanError(ValueError):
    """The two sides' blocks or regions cannot be paired; the text says what is wrong with which."""


@dataclass(frozen=True)
class Pages:
    """One side's pages: for each region its KV group, page count and page length, in the order both sides share."""

    groups: tuple[int, ...]
    num_pages: tuple[int, ...]
    len_bytes: tuple[int, ...]

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Each region's first page index."""
        return tuple(int(end) - pages for end, pages in zip(np.cumsum(self.num_pages), self.num_pages, strict=True))

    def in_group(self, group: int) -> list[int]:
        """The regions of one KV group, in order."""
        return [region for region, owner in enumerate(self.groups) if owner == group]

    def block_limit(self, group: int) -> int:
        """The first block id that some region of the group does not have."""
        return min(self.num_pages[region] for region in self.in_group(group))


@dataclass(frozen=True)
class Limits:
    """How large one chunk may be. A page larger than ``chunk_bytes`` is a chunk of its own."""

    chunk_bytes: int
    chunk_descriptors: int


@dataclass(frozen=True)
class Chunk:
    """One transfer: page ``remote[i]`` there is read into page ``local[i]`` here."""

    local: Indices
    remote: Indices
    len_bytes: int

    def __len__(self) -> int:
        return len(self.local)

    def __repr__(self) -> str:
        return f"<Chunk pages={len(self)} bytes={self.len_bytes}>"


class Plan:
    """The chunks of one load, each made when it is taken: a plan for a million tokens holds no million indices.

    Pages go region by region and in token order within one, so runs that are contiguous on both sides stay neighbours
    and NIXL merges each into one descriptor.
    """

    def __init__(self, local: Pages, remote: Pages, pairs: Mapping[int, tuple[Ids, Ids]], limits: Limits) -> None:
        self.pages_left = sum(len(pairs[group][0]) for group in local.groups)
        self._local, self._remote = local, remote
        self._pairs = {
            group: (ours.astype(np.int32), theirs.astype(np.int32)) for group, (ours, theirs) in pairs.items()
        }
        self._limits = limits
        self._region = 0
        self._at = 0

    def __repr__(self) -> str:
        return f"<Plan pages_left={self.pages_left} region={self._region}/{len(self._local.groups)}>"

    def __iter__(self) -> Iterator[Chunk]:
        return self

    def __next__(self) -> Chunk:
        """The next chunk.

        Raises:
            StopIteration: there is none, as ``pages_left`` says.
        """
        if not self.pages_left:
            raise StopIteration
        ours: list[Indices] = []
        theirs: list[Indices] = []
        room_pages, room_bytes, len_bytes = self._limits.chunk_descriptors, self._limits.chunk_bytes, 0
        while self._region < len(self._local.groups):
            local, remote = self._pairs[self._local.groups[self._region]]
            page_bytes = self._local.len_bytes[self._region]
            left = len(local) - self._at
            take = max(0, min(left, room_pages, room_bytes // page_bytes))
            if take == 0 and left and not ours:
                take = 1
            if take:
                stop = self._at + take
                ours.append(local[self._at : stop] + np.int32(self._local.offsets[self._region]))
                theirs.append(remote[self._at : stop] + np.int32(self._remote.offsets[self._region]))
                self._at = stop
                room_pages -= take
                room_bytes -= take * page_bytes
                len_bytes += take * page_bytes
            if take < left:
                break
            self._region, self._at = self._region + 1, 0
        chunk = Chunk(np.concatenate(ours), np.concatenate(theirs), len_bytes)
        self.pages_left -= len(chunk)
        return chunk


def check_pair(local: Pages, remote: Pages) -> None:
    """Refuse two sides whose regions do not correspond one to one.

    Raises:
        PlanError: another number of regions, or a region with another group or page length.
    """
    if len(local.groups) != len(remote.groups):
        raise PlanError(f"we have {len(local.groups)} regions, the producer has {len(remote.groups)}")
    for name, ours, theirs in (
        ("KV group", local.groups, remote.groups),
        ("page length", local.len_bytes, remote.len_bytes),
    ):
        if ours != theirs:
            at = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b)
            raise PlanError(f"region {at} has {name} {ours[at]} here and {theirs[at]} at the producer")
    for whose, pages in (("we have", local), ("the producer has", remote)):
        if sum(pages.num_pages) >= PAGES_MAX:
            raise PlanError(f"{whose} {sum(pages.num_pages)} pages; fewer than {PAGES_MAX} can be addressed")


def load_bytes(local: Pages, block_sizes: Sequence[int], start_token: int, end_token: int) -> int:
    """How many bytes the pages of ``[start_token, end_token)`` have, over all regions."""
    return sum(
        _block_count(block_sizes[group], start_token, end_token) * len_bytes
        for group, len_bytes in zip(local.groups, local.len_bytes, strict=True)
    )


def plan(
    local: Pages,
    remote: Pages,
    block_sizes: Sequence[int],
    local_blocks: Sequence[Sequence[int]],
    remote_blocks: Sequence[BlockRuns],
    start_token: int,
    end_token: int,
    limits: Limits,
    null_block: int | None = None,
) -> Plan:
    """Which pages to read for the tokens ``[start_token, end_token)``; everything is checked before it returns.

    ``block_sizes`` are tokens per block, ``local_blocks`` block ids and ``remote_blocks`` runs of block ids, each by
    KV group and in token order from token 0. Blocks ``start // size`` to ``ceil(end / size) - 1`` are read whole.
    Blocks whose local id is ``null_block`` hold nothing (a sliding window has left them) and are left out.

    Raises:
        PlanError: the regions do not correspond, a side has too few blocks, or an id is outside its region.
    """
    if not 0 <= start_token <= end_token:
        raise PlanError(f"[{start_token}, {end_token}) is no range of tokens")
    check_pair(local, remote)
    pairs: dict[int, tuple[Ids, Ids]] = {}
    for group in sorted(set(local.groups)):
        if not group < min(len(block_sizes), len(local_blocks), len(remote_blocks)):
            raise PlanError(f"KV group {group} has regions, but no block list on one side")
        size = block_sizes[group]
        first, last = start_token // size, -(-end_token // size)
        if start_token == end_token:
            last = first
        ours = _cut(local_blocks[group], first, last, group)
        theirs = _expand(remote_blocks[group], first, last, remote.block_limit(group), group)
        pairs[group] = _checked(ours, theirs, local.block_limit(group), null_block, group)
    return Plan(local, remote, pairs, limits)


def _block_count(block_size: int, start_token: int, end_token: int) -> int:
    if start_token >= end_token:
        return 0
    return -(-end_token // block_size) - start_token // block_size


def _cut(blocks: Sequence[int], first: int, last: int, group: int) -> Ids:
    """Our own blocks of the range."""
    if len(blocks) < last:
        raise PlanError(f"KV group {group}: {last} blocks are needed here, there are {len(blocks)}")
    return np.asarray(blocks[first:last], dtype=np.int64)


def _expand(runs: BlockRuns, first: int, last: int, limit: int, group: int) -> Ids:
    """The producer's blocks of the range, from its runs. Runs are checked before anything of their length is made."""
    if first == last:
        return np.empty(0, dtype=np.int64)
    try:
        table = np.asarray(runs, dtype=np.int64).reshape(-1, 2)
    except (OverflowError, ValueError, TypeError) as error:
        raise PlanError(f"KV group {group}: the producer's block runs are no pairs of numbers") from error
    starts, counts = table[:, 0], table[:, 1]
    if len(table) and (starts.min() < 0 or counts.min() < 1 or counts.max() > limit or starts.max() >= limit):
        raise PlanError(f"KV group {group}: a block run of the producer lies outside its {limit} blocks")
    if len(table) and (starts + counts).max() > limit:
        raise PlanError(f"KV group {group}: a block run of the producer ends behind its {limit} blocks")
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(table) else 0
    if total < last:
        raise PlanError(f"KV group {group}: {last} blocks are needed from the producer, it granted {total}")
    position = np.arange(first, last, dtype=np.int64)
    run = np.searchsorted(ends, position, side="right")
    blocks: Ids = starts[run] + position - (ends[run] - counts[run])
    return blocks


def _checked(ours: Ids, theirs: Ids, limit: int, null_block: int | None, group: int) -> tuple[Ids, Ids]:
    """The pairs worth reading, after the checks that are left."""
    if null_block is not None:
        kept = ours != null_block
        ours, theirs = ours[kept], theirs[kept]
        if (theirs == null_block).any():
            raise PlanError(f"KV group {group}: the producer no longer holds a block that is needed")
    if len(ours) and (ours.min() < 0 or ours.max() >= limit):
        raise PlanError(f"KV group {group}: a block of ours lies outside our {limit} blocks")
    return ours, theirs
