"""Checksums of pages are those of their bytes in a row, however the pages lie."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
import pytest

from kvlease.worker.page_sums import HOST_PIECE_BYTES, PageSums
from kvlease.worker.regions import Layout, Region

PAGE = 96
RNG = np.random.default_rng(5)


def plane(pages: int, stride: int, group: int = 0, page: int = PAGE) -> tuple[np.ndarray, Region]:
    memory = RNG.integers(0, 256, (pages, stride), dtype=np.uint8)
    return memory, Region(memory.ctypes.data, stride, page, pages, group, 0)


def sums(regions: list[Region], *blocks: Sequence[int]) -> tuple[list[int], int]:
    """And in how many pieces they were made."""
    steps, pieces = PageSums(Layout(regions, "DRAM", [])).sums([np.array(ids, dtype=np.int64) for ids in blocks]), 0
    while True:
        try:
            next(steps)
            pieces += 1
        except StopIteration as end:
            return end.value, pieces


@pytest.mark.parametrize("stride", [PAGE, 3 * PAGE, PAGE + 5], ids=["dense", "gaps", "odd"])
@pytest.mark.parametrize("blocks", [[0, 1, 2], [7, 3, 4, 0], [9]], ids=str)
def test_are_of_the_pages_in_the_order_that_is_asked(stride: int, blocks: list[int]) -> None:
    memory, region = plane(10, stride)
    assert sums([region], blocks)[0] == [zlib.crc32(memory[blocks, :PAGE].tobytes())]


def test_are_one_for_each_region_by_its_group() -> None:
    a, of_a = plane(10, PAGE, group=0)
    b, of_b = plane(6, PAGE, group=1)
    expected = [zlib.crc32(a[[1, 2]].tobytes()), zlib.crc32(b[[5]].tobytes())]
    assert sums([of_a, of_b], [1, 2], [5])[0] == expected


def test_are_the_same_in_however_many_pieces() -> None:
    memory, region = plane(50, HOST_PIECE_BYTES // 4, page=HOST_PIECE_BYTES // 4)
    blocks = RNG.permutation(50)[:18].tolist()
    found, pieces = sums([region], blocks)
    assert found == [zlib.crc32(memory[blocks].tobytes())]
    assert pieces == 5


def test_a_page_larger_than_a_piece_is_one() -> None:
    memory, region = plane(3, 2 * HOST_PIECE_BYTES, page=2 * HOST_PIECE_BYTES)
    assert sums([region], [2, 0]) == ([zlib.crc32(memory[[2, 0]].tobytes())], 2)


def test_of_no_pages_are_zero() -> None:
    assert sums([plane(4, PAGE)[1]], []) == ([0], 0)


def test_any_flipped_bit_changes_them() -> None:
    memory, region = plane(10, PAGE)
    before = sums([region], range(10))[0]
    for at in RNG.integers(0, memory.size, 200):
        memory.flat[at] ^= 1 << int(RNG.integers(8))
        assert sums([region], range(10))[0] != before
        before = sums([region], range(10))[0]


@pytest.mark.parametrize("blocks", [[[10]], [[-1]], [[3, 1 << 40]], []], ids=str)
def test_blocks_that_are_not_there_are_refused(blocks: list[list[int]]) -> None:
    with pytest.raises(ValueError, match="KV group"):
        sums([plane(10, PAGE)[1]], *blocks)
