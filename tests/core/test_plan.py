"""Blocks become page indices: paired by token position, checked, in order, in bounded chunks."""

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlease.core.plan import Chunk, Limits, Pages, PlanError, check_pair, load_bytes, plan

WIDE = Limits(chunk_bytes=1 << 40, chunk_descriptors=1 << 30)
ONE = Pages(groups=(0,), num_pages=(100,), len_bytes=(8,))
TWO = Pages(groups=(0, 0), num_pages=(100, 100), len_bytes=(8, 8))


def pairs(chunks: list[Chunk]) -> list[tuple[int, int]]:
    return [(int(a), int(b)) for chunk in chunks for a, b in zip(chunk.local, chunk.remote, strict=True)]


def simple(local_blocks, runs, start, end, *, pages=ONE, block_size=4, limits=WIDE, null_block=None):
    return list(plan(pages, pages, [block_size], [local_blocks], [runs], start, end, limits, null_block))


def test_blocks_of_the_whole_range_are_paired_in_token_order():
    assert pairs(simple([7, 3, 9], [(20, 2), (50, 1)], 0, 12)) == [(7, 20), (3, 21), (9, 50)]


def test_a_range_that_starts_late_skips_blocks_on_both_sides_by_position():
    assert pairs(simple([7, 3, 9], [(20, 2), (50, 1)], 4, 12)) == [(3, 21), (9, 50)]


def test_a_range_inside_blocks_reads_whole_blocks():
    assert pairs(simple([7, 3, 9], [(20, 3)], 5, 10)) == [(3, 21), (9, 22)]


def test_more_blocks_than_needed_on_either_side_do_not_shift_the_pairs():
    assert pairs(simple([7, 3, 9, 11, 12], [(20, 50)], 0, 8)) == [(7, 20), (3, 21)]


def test_an_empty_range_reads_nothing():
    assert simple([], [], 0, 0) == []
    assert simple([7], [], 3, 3) == []


def test_regions_follow_each_other_each_with_its_own_offset_on_each_side():
    local = Pages(groups=(0, 0), num_pages=(10, 20), len_bytes=(8, 16))
    remote = Pages(groups=(0, 0), num_pages=(100, 50), len_bytes=(8, 16))
    chunks = list(plan(local, remote, [4], [[1, 2]], [[(30, 2)]], 0, 8, WIDE))
    assert pairs(chunks) == [(1, 30), (2, 31), (11, 130), (12, 131)]
    assert [chunk.len_bytes for chunk in chunks] == [16, 32]


def test_groups_have_their_own_blocks_and_block_sizes():
    pages = Pages(groups=(0, 1), num_pages=(10, 10), len_bytes=(8, 8))
    chunks = list(plan(pages, pages, [4, 8], [[1, 2, 3], [4, 5]], [[(6, 3)], [(1, 2)]], 0, 12, WIDE))
    assert pairs(chunks) == [(1, 6), (2, 7), (3, 8), (14, 11), (15, 12)]


def test_a_group_without_regions_needs_no_blocks():
    assert pairs(plan(ONE, ONE, [4, 4], [[1], []], [[(2, 1)], []], 0, 4, WIDE)) == [(1, 2)]


def test_blocks_that_a_sliding_window_has_left_are_left_out():
    assert pairs(simple([0, 0, 9], [(0, 1), (21, 2)], 0, 12, null_block=0)) == [(9, 22)]


def test_a_block_that_only_the_producer_has_left_is_refused():
    with pytest.raises(PlanError, match="no longer holds"):
        simple([5, 6], [(0, 1), (21, 1)], 0, 8, null_block=0)


def test_a_chunk_holds_at_most_so_many_descriptors_of_scattered_blocks():
    chunks = simple([9, 7, 5, 3, 1], [(50, 5)], 0, 20, limits=Limits(1 << 30, 2))
    assert [len(chunk) for chunk in chunks] == [2, 2, 1]
    assert pairs(chunks) == [(9, 50), (7, 51), (5, 52), (3, 53), (1, 54)]


def test_blocks_that_are_contiguous_on_both_sides_are_one_descriptor():
    local, runs = [0, 1, 2, 3, 4, 8, 9], [(50, 3), (60, 4)]
    chunks = simple(local, runs, 0, 28, limits=Limits(1 << 30, 1))
    assert pairs(chunks[:1]) == [(0, 50), (1, 51), (2, 52)]
    assert [len(chunk) for chunk in chunks] == [3, 2, 2]
    assert [len(chunk) for chunk in simple(local, runs, 0, 28, limits=Limits(1 << 30, 2))] == [5, 2]


@pytest.mark.parametrize("where", ["local", "remote"])
def test_pages_with_gaps_between_them_are_descriptors_of_their_own(where):
    apart = Pages((0, 0), (100, 100), (8, 8), with_gaps=frozenset({1}))
    local, remote = (apart, TWO) if where == "local" else (TWO, apart)
    chunks = list(plan(local, remote, [4], [[1, 2, 3]], [[(50, 3)]], 0, 12, Limits(1 << 30, 2)))
    assert [len(chunk) for chunk in chunks] == [3, 2, 1]
    assert pairs(chunks) == [(1, 50), (2, 51), (3, 52), (101, 150), (102, 151), (103, 152)]


def test_a_run_longer_than_a_chunk_is_cut():
    chunks = simple(list(range(10)), [(50, 10)], 0, 40, limits=Limits(chunk_bytes=32, chunk_descriptors=1))
    assert [len(chunk) for chunk in chunks] == [4, 4, 2]
    assert pairs(chunks) == [(i, 50 + i) for i in range(10)]


def test_regions_whose_pages_fit_share_a_chunk():
    chunks = simple([1, 2], [(50, 2)], 0, 8, pages=TWO, limits=Limits(chunk_bytes=32, chunk_descriptors=2))
    assert [chunk.len_bytes for chunk in chunks] == [32]
    assert pairs(chunks) == [(1, 50), (2, 51), (101, 150), (102, 151)]


def test_regions_that_do_not_fit_together_are_cut_one_by_one():
    chunks = simple([1, 2, 3], [(50, 3)], 0, 12, pages=TWO, limits=Limits(chunk_bytes=16, chunk_descriptors=99))
    assert [chunk.len_bytes for chunk in chunks] == [16, 8, 16, 8]
    assert pairs(chunks) == [(1, 50), (2, 51), (3, 52), (101, 150), (102, 151), (103, 152)]


def test_a_page_larger_than_a_chunk_is_a_chunk_of_its_own():
    chunks = simple([1, 2], [(50, 2)], 0, 8, limits=Limits(chunk_bytes=5, chunk_descriptors=99))
    assert [chunk.len_bytes for chunk in chunks] == [8, 8]


def test_indices_are_what_nixl_wants():
    (chunk,) = simple([1], [(2, 1)], 0, 4)
    assert chunk.local.dtype == np.int32
    assert chunk.remote.dtype == np.int32
    assert repr(chunk) == "<Chunk pages=1 bytes=8>"


def test_a_plan_says_how_much_is_left():
    found = plan(ONE, ONE, [4], [[1, 2, 3]], [[(5, 3)]], 0, 12, Limits(chunk_bytes=16, chunk_descriptors=9))
    assert found.pages_left == 3
    assert len(next(found)) == 2
    assert repr(found) == "<Plan pages_left=1 regions=1>"
    assert len(next(found)) == 1
    assert found.pages_left == 0
    assert next(found, None) is None


@pytest.mark.parametrize(
    "runs",
    [
        [(99, 2)],
        [(100, 1)],
        [(-1, 2)],
        [(5, 0), (6, 2)],
        [(5, -3), (6, 9)],
        [(0, 1 << 52)],
        [(1 << 52, 1)],
        [(1 << 70, 2)],
        [(1, 2, 3)],
        [("a", 2)],
    ],
)
def test_runs_that_leave_the_producers_blocks_are_refused(runs):
    with pytest.raises(PlanError):
        simple([1, 2], runs, 0, 8)


def test_a_run_beyond_a_smaller_region_of_the_group_is_refused():
    remote = Pages(groups=(0, 0), num_pages=(100, 60), len_bytes=(8, 8))
    with pytest.raises(PlanError, match="outside its 60 blocks"):
        plan(TWO, remote, [4], [[1]], [[(60, 1)]], 0, 4, WIDE)


@pytest.mark.parametrize(("blocks", "runs"), [([1], [(2, 2)]), ([1, 2], [(2, 1)]), ([1, 2], [])])
def test_too_few_blocks_on_a_side_are_refused(blocks, runs):
    with pytest.raises(PlanError, match="2 blocks are needed"):
        simple(blocks, runs, 0, 8)


@pytest.mark.parametrize("blocks", [[100], [-1]])
def test_blocks_of_ours_outside_our_regions_are_refused(blocks):
    with pytest.raises(PlanError, match="a block of ours"):
        simple(blocks, [(2, 1)], 0, 4)


def test_a_group_without_a_block_list_is_refused():
    with pytest.raises(PlanError, match="group 0"):
        plan(ONE, ONE, [4], [], [[(1, 1)]], 0, 4, WIDE)


@pytest.mark.parametrize(("start", "end"), [(-1, 4), (8, 4)])
def test_a_range_that_is_none_is_refused(start, end):
    with pytest.raises(PlanError, match="no range"):
        simple([1, 2], [(2, 2)], start, end)


@pytest.mark.parametrize(
    ("remote", "what"),
    [
        (TWO, "1 regions, the producer has 2"),
        (Pages((1,), (100,), (8,)), "KV group 0 here and 1"),
        (Pages((0,), (100,), (16,)), "page length 8 here and 16"),
        (Pages((0,), (1 << 31,), (8,)), "can be addressed"),
    ],
)
def test_sides_that_do_not_correspond_are_refused(remote, what):
    with pytest.raises(PlanError, match=what):
        check_pair(ONE, remote)


def test_bytes_of_a_range_are_those_of_its_whole_blocks():
    assert load_bytes(TWO, [4], 5, 10) == 2 * 2 * 8
    assert load_bytes(TWO, [4], 5, 5) == 0


@given(st.data())
def test_every_needed_page_is_read_once_from_where_its_tokens_are(data):
    size = data.draw(st.integers(1, 7), "block size")
    regions = data.draw(st.integers(1, 4), "regions")
    pages = Pages((0,) * regions, (64,) * regions, tuple(data.draw(st.integers(1, 9)) for _ in range(regions)))
    local = data.draw(st.lists(st.integers(0, 63), max_size=40, unique=True), "local")
    remote = data.draw(st.lists(st.integers(0, 63), min_size=len(local), max_size=50, unique=True), "remote")
    end = data.draw(st.integers(0, len(local) * size), "end")
    start = data.draw(st.integers(0, end), "start")
    limits = Limits(data.draw(st.integers(1, 60)), data.draw(st.integers(1, 10)))
    chunks = list(plan(pages, pages, [size], [local], [[(block, 1) for block in remote]], start, end, limits))
    needed = sorted({token // size for token in range(start, end)})
    by_length = sorted(range(regions), key=lambda r: pages.len_bytes.index(pages.len_bytes[r]))
    assert pairs(chunks) == [(r * 64 + local[i], r * 64 + remote[i]) for r in by_length for i in needed]
    assert sum(chunk.len_bytes for chunk in chunks) == load_bytes(pages, [size], start, end)
    for chunk in chunks:
        assert 1 <= num_descriptors(chunk) <= limits.chunk_descriptors
        assert chunk.len_bytes <= limits.chunk_bytes or len(chunk) == 1


def num_descriptors(chunk: Chunk) -> int:
    return 1 + int(((np.diff(chunk.local) != 1) | (np.diff(chunk.remote) != 1)).sum())


def test_a_load_of_a_million_tokens_is_planned_fast():
    pages = Pages((0,) * 99, (20_000,) * 99, (8192,) * 99)
    blocks = np.random.default_rng(1).permutation(20_000)[:16_384].tolist()
    limits = Limits(chunk_bytes=16 << 20, chunk_descriptors=1024)
    best_s = float("inf")
    for _ in range(3):
        began = time.thread_time()
        chunks = list(plan(pages, pages, [64], [blocks], [[(b, 1) for b in blocks]], 0, 1 << 20, limits))
        best_s = min(best_s, time.thread_time() - began)
    assert sum(len(chunk) for chunk in chunks) == 99 * 16_384
    assert best_s < 0.5, "an order above what it takes on a slow machine"
