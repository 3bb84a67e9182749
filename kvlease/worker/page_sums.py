"""Checksums of the pages of one engine rank, a piece at a time, so that whoever computes them can do several in turn.

CRC-32 of the standard library: about 2 GB/s on one core, without the interpreter lock. It sees every change of up to
32 neighbouring bits for certain. It is no protection against forgery: nobody who can write to the pages needs any.

Pages in host memory that do not lie in a row are first copied, into pieces that stay in the processor's cache. Pages on
a GPU are gathered there into larger pieces, which are copied to the host on a stream of their own, beside the engine's.
"""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Callable, Generator, Sequence
from typing import Any, Final

import numpy as np
import torch

from kvlease.core.runs import Ids
from kvlease.worker.regions import Layout, Region

HOST_PIECE_BYTES: Final = 1 << 20
DEVICE_PIECE_BYTES: Final = 16 << 20

ReadPages = Callable[[Ids], Any]
"""The bytes of these pages of one region, one after the other, as a buffer."""


class PageSums:
    """See the module. It reads memory by address: the KV caches must outlive it. Belongs to one thread."""

    def __init__(self, layout: Layout) -> None:
        self._regions = layout.regions
        is_host = layout.memory == "DRAM"
        self._piece_bytes = HOST_PIECE_BYTES if is_host else DEVICE_PIECE_BYTES
        self._read = [(_host_pages if is_host else _device_pages)(region) for region in layout.regions]

    def sums(self, blocks: Sequence[Ids]) -> Generator[None, None, list[int]]:
        """One checksum for each region, over its pages of ``blocks`` (by KV group), in order. Yields between pieces.

        Raises:
            ValueError: a KV group without a list, or a block outside its region. Nothing was read then.
        """
        for at, region in enumerate(self._regions):
            if not region.group < len(blocks):
                raise ValueError(f"region {at} is of KV group {region.group}, there are blocks of {len(blocks)}")
            ids = blocks[region.group]
            if len(ids) and not 0 <= ids.min() <= ids.max() < region.num_pages:
                raise ValueError(f"blocks of KV group {region.group} lie outside its {region.num_pages} pages")
        return (yield from self._sums(blocks))

    def _sums(self, blocks: Sequence[Ids]) -> Generator[None, None, list[int]]:
        found = []
        for region, read in zip(self._regions, self._read, strict=True):
            ids, checksum = blocks[region.group], 0
            step = max(1, self._piece_bytes // region.len_bytes)
            for start in range(0, len(ids), step):
                checksum = zlib.crc32(read(ids[start : start + step]), checksum)
                yield
            found.append(checksum)
        return found


def _host_pages(region: Region) -> ReadPages:
    span = region.stride_bytes * (region.num_pages - 1) + region.len_bytes
    memory = np.ctypeslib.as_array((ctypes.c_uint8 * span).from_address(region.base))
    pages = np.lib.stride_tricks.as_strided(
        memory, (region.num_pages, region.len_bytes), (region.stride_bytes, 1), writeable=False
    )
    is_dense = region.stride_bytes == region.len_bytes

    def read(ids: Ids) -> Any:
        first, last = int(ids[0]), int(ids[-1])
        if is_dense and last - first == len(ids) - 1 and bool((np.diff(ids) == 1).all()):
            return pages[first : last + 1]  # as it lies, without a copy
        return pages[ids]

    return read


class _DeviceMemory:
    """Lets torch see memory that it may have allocated itself, by address."""

    def __init__(self, region: Region) -> None:
        self.__cuda_array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "data": (region.base, False),
            "shape": (region.num_pages, region.len_bytes),
            "strides": (region.stride_bytes, 1),
        }


def _device_pages(region: Region) -> ReadPages:
    device = torch.device("cuda", region.device_id)
    pages: torch.Tensor = torch.as_tensor(_DeviceMemory(region), device=device)
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def read(ids: Ids) -> Any:
        with torch.cuda.stream(stream):
            return pages.index_select(0, torch.from_numpy(ids).to(device)).cpu().numpy()

    return read
