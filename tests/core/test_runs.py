"""Block runs: as short as they can be, and nothing is lost."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlease.core.runs import block_runs, expand_runs


def test_consecutive_blocks_are_one_run() -> None:
    assert block_runs([7, 8, 9, 3]) == [(7, 3), (3, 1)]
    assert block_runs(range(16_384)) == [(0, 16_384)]
    assert block_runs([]) == []


def test_repeated_and_descending_blocks_stay_in_order() -> None:
    assert block_runs([5, 5, 4, 3]) == [(5, 1), (5, 1), (4, 1), (3, 1)]


def test_runs_are_plain_integers_that_msgpack_takes() -> None:
    assert all(type(number) is int for run in block_runs([1, 2, 9]) for number in run)


@given(st.lists(st.integers(0, 40) | st.integers(0, (1 << 31) - 1), max_size=200))
def test_expanding_gives_back_what_was_run_together(blocks: list[int]) -> None:
    runs = block_runs(blocks)
    assert expand_runs(runs, 0, len(blocks), 1 << 31).tolist() == blocks
    assert sum(length for _, length in runs) == len(blocks)
    assert all(first + length != after for (first, length), (after, _) in pairwise(runs))


@given(st.lists(st.tuples(st.integers(0, 90), st.integers(1, 10)), max_size=20), st.data())
def test_a_part_is_that_part_of_the_whole(runs: list[tuple[int, int]], data: st.DataObject) -> None:
    whole = [block for first, count in runs for block in range(first, first + count)]
    first = data.draw(st.integers(0, len(whole)))
    last = data.draw(st.integers(first, len(whole)))
    assert expand_runs(runs, first, last, 100).tolist() == whole[first:last]


def test_only_what_is_asked_for_is_made() -> None:
    claimed = [(0, (1 << 31) - 1)] * 1000
    assert expand_runs(claimed, 5, 8, 1 << 31).tolist() == [5, 6, 7]


def test_fewer_blocks_than_needed_raise_value_error() -> None:
    with pytest.raises(ValueError, match="4 blocks are needed, the runs have 3"):
        expand_runs([(7, 3)], 0, 4, 100)
    with pytest.raises(ValueError, match="1 blocks are needed, the runs have 0"):
        expand_runs([], 0, 1, 100)


@pytest.mark.parametrize(
    "runs",
    [
        [(-1, 2)],
        [(0, 0)],
        [(0, -5), (3, 9)],
        [(100, 1)],
        [(99, 2)],
        [(0, 1 << 62)],
        [(1 << 62, 1)],
        [(1 << 70, 1)],
        [(1, 2, 3)],
        [(1, 2, 3), (4, 5, 6)],
        [(1, 2), (3,)],
        [1, 2],
        [("a", 1)],
        [None],
    ],
)
def test_runs_that_a_peer_made_up_raise_value_error(runs: Any) -> None:
    with pytest.raises(ValueError, match="block run"):
        expand_runs(runs, 0, 1, 100)
