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
from kvlease.core.runs import Ids, expand_runs

PAGES_MAX = 1 << 31
"""Indices are 32 bit in NIXL, so one side may have this many pages over all regions."""

Indices = NDArray[np.int32]


class PlanError(ValueError):
    """The two sides' blocks or regions cannot be paired; the text says what is wrong with which."""


@dataclass(frozen=True)
class Pages:
    """One side's pages: for each region its KV group, page count and page length, in the order both sides share.

    ``with_gaps`` are the regions in which something lies between one page and the next.
    """

    groups: tuple[int, ...]
    num_pages: tuple[int, ...]
    len_bytes: tuple[int, ...]
    with_gaps: frozenset[int] = frozenset()

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
    """How large one chunk may be. A page larger than ``chunk_bytes`` is a chunk of its own.

    Pages that are contiguous on both sides count as one descriptor, which is what NIXL makes of them.
    """

    chunk_bytes: int
    chunk_descriptors: int


@dataclass(eq=False, slots=True)
class Chunk:
    """One transfer: page ``remote[i]`` there is read into page ``local[i]`` here. Not to be changed."""

    local: Indices
    remote: Indices
    len_bytes: int

    def __len__(self) -> int:
        return len(self.local)

    def __repr__(self) -> str:
        return f"<Chunk pages={len(self)} bytes={self.len_bytes}>"


class Plan:
    """The chunks of one load, each made when it is taken: a plan for a million tokens holds no million indices.

    Pages go region by region, and in token order within one, so what is contiguous on both sides stays neighbours,
    which NIXL merges into one descriptor. A chunk is some whole regions, or a part of one: regions whose pages all fit
    go together, larger ones are all cut at the same places. It has pages of one length.
    """

    def __init__(self, local: Pages, remote: Pages, pairs: Mapping[int, Pairs], limits: Limits) -> None:
        self.pages_left = sum(len(pairs[group].local) for group in local.groups)
        self._regions = len(local.groups)
        self._chunks = _chunks(local, remote, pairs, limits)

    def __repr__(self) -> str:
        return f"<Plan pages_left={self.pages_left} regions={self._regions}>"

    def __iter__(self) -> Iterator[Chunk]:
        return self

    def __next__(self) -> Chunk:
        """The next chunk.

        Raises:
            StopIteration: there is none, as ``pages_left`` says.
        """
        chunk = next(self._chunks)
        self.pages_left -= len(chunk.local)
        return chunk


class Pairs:
    """The blocks of one KV group that are read: block ``remote[i]`` there into block ``local[i]`` here."""

    def __init__(self, local: Ids, remote: Ids) -> None:
        self.local, self.remote = local.astype(np.int32), remote.astype(np.int32)
        breaks = np.flatnonzero((np.diff(self.local) != 1) | (np.diff(self.remote) != 1)) + 1
        self._runs = np.concatenate(([0], breaks)) if len(local) else breaks

    def __len__(self) -> int:
        return len(self.local)

    @property
    def num_runs(self) -> int:
        """How many stretches are contiguous on both sides: as many descriptors are read for each region."""
        return len(self._runs)

    def cuts(self, pages_max: int, runs_max: int) -> list[tuple[int, int]]:
        """Consecutive ``(start, stop)`` of at most so many pages and runs each, every one as long as it may be."""
        cuts: list[tuple[int, int]] = []
        start = 0
        while start < len(self):
            run = int(np.searchsorted(self._runs, start, side="right")) - 1
            stop = self._runs[run + runs_max] if run + runs_max < self.num_runs else len(self)
            stop = min(int(stop), start + pages_max)
            cuts.append((start, stop))
            start = stop
        return cuts


def _chunks(local: Pages, remote: Pages, pairs: Mapping[int, Pairs], limits: Limits) -> Iterator[Chunk]:
    ours, theirs = np.array(local.offsets, dtype=np.int32), np.array(remote.offsets, dtype=np.int32)
    for (group, page_bytes, has_gaps), regions in _by_kind(local, local.with_gaps | remote.with_gaps).items():
        pages_max = max(1, limits.chunk_bytes // page_bytes)
        if has_gaps:
            pages_max = min(pages_max, limits.chunk_descriptors)
        if len(pairs[group]):
            cut = _cut_regions(pairs[group], ours[regions], theirs[regions], pages_max, limits.chunk_descriptors)
            yield from (Chunk(here, there, len(here) * page_bytes) for here, there in cut)


def _by_kind(pages: Pages, with_gaps: frozenset[int]) -> dict[tuple[int, int, bool], list[int]]:
    """The regions of each KV group and page length, without and with gaps, in order."""
    found: dict[tuple[int, int, bool], list[int]] = {}
    for region, (group, page_bytes) in enumerate(zip(pages.groups, pages.len_bytes, strict=True)):
        found.setdefault((group, page_bytes, region in with_gaps), []).append(region)
    return found


def _cut_regions(
    pair: Pairs, ours: Indices, theirs: Indices, pages_max: int, runs_max: int
) -> Iterator[tuple[Indices, Indices]]:
    """The chunks of regions that are alike; ``ours`` and ``theirs`` are the indices of their first pages."""
    together = min(pages_max // len(pair), runs_max // pair.num_runs)
    if together > 0:
        for at in range(0, len(ours), together):
            part = slice(at, at + together)
            yield _spread(ours[part], pair.local), _spread(theirs[part], pair.remote)
        return
    cuts = pair.cuts(pages_max, runs_max)
    for our_first, their_first in zip(ours, theirs, strict=True):
        local, remote = pair.local + our_first, pair.remote + their_first
        for start, stop in cuts:
            yield local[start:stop], remote[start:stop]


def _spread(first_pages: Indices, blocks: Indices) -> Indices:
    """The pages of ``blocks`` in regions that begin at ``first_pages``, region by region."""
    return (first_pages[:, np.newaxis] + blocks).reshape(-1)


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
    pairs: dict[int, Pairs] = {}
    for group in sorted(set(local.groups)):
        if not group < min(len(block_sizes), len(local_blocks), len(remote_blocks)):
            raise PlanError(f"KV group {group} has regions, but no block list on one side")
        size = block_sizes[group]
        first, last = start_token // size, -(-end_token // size)
        if start_token == end_token:
            last = first
        ours = _cut(local_blocks[group], first, last, group)
        try:
            theirs = expand_runs(remote_blocks[group], first, last, remote.block_limit(group))
        except ValueError as error:
            raise PlanError(f"KV group {group}: of the producer's blocks: {error}") from error
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


def _checked(ours: Ids, theirs: Ids, limit: int, null_block: int | None, group: int) -> Pairs:
    """The pairs worth reading, after the checks that are left."""
    if null_block is not None:
        kept = ours != null_block
        ours, theirs = ours[kept], theirs[kept]
        if (theirs == null_block).any():
            raise PlanError(f"KV group {group}: the producer no longer holds a block that is needed")
    if len(ours) and (ours.min() < 0 or ours.max() >= limit):
        raise PlanError(f"KV group {group}: a block of ours lies outside our {limit} blocks")
    return Pairs(ours, theirs)
