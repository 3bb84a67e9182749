"""From KV cache tensors to regions: where each page of each layer lies in memory, checked before a byte moves.

A page is what one block holds of one layer (or of its K or V plane). A region is an array of pages with a constant
stride. vLLM's layouts differ in where the block dimension is, in whether K and V are planes of their own, in whether
the kernel cuts a block into smaller ones and in what lies between two pages of a layer; all of that follows from
shapes and strides. What does not add up to the layer's own page size is refused in words.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import torch

from kvlease.core.messages import RankInfo
from kvlease.core.plan import Pages

SUPPORTED = (
    "supported are (blocks, ...), (2, blocks, ...) and both with each block cut into kernel blocks, "
    "every page dense, no padding"
)


class RegionError(ValueError):
    """A KV cache that kvlease cannot transfer; the text names the layer, its shape, and what is supported."""


@dataclass(frozen=True)
class Region:
    """Block ``i`` is the ``len_bytes`` from address ``base + i * stride_bytes`` on, for ``i < num_pages``."""

    base: int
    stride_bytes: int
    len_bytes: int
    num_pages: int
    group: int
    device_id: int


@dataclass(frozen=True)
class MemoryRange:
    """One stretch of memory to register with NIXL."""

    base: int
    len_bytes: int
    device_id: int


@dataclass(frozen=True)
class LayerSpec:
    """What the engine says of one layer: its KV-cache group, and its pages as the scheduler counts them.

    The tensor's own kernel blocks may be smaller than a page.
    """

    group: int
    num_pages: int
    page_bytes: int


@dataclass(frozen=True)
class Layout:
    """Where all KV of one engine rank lies: its regions, the kind of memory in NIXL's words, and what to register."""

    regions: list[Region]
    memory: str
    ranges: list[MemoryRange]


def find_regions(kv_caches: Mapping[str, torch.Tensor], layers: Mapping[str, LayerSpec]) -> Layout:
    """The layout of an engine rank; regions in the order that both sides share: by layer name, numbers as numbers.

    Layers of one group that share their memory give one region, and a layer without a spec must share a specified
    one's. Layers of different groups may overlay each other (a block belongs to one group at a time): a region for
    each group.

    Raises:
        RegionError: a layer whose pages are not what its spec says, that is missing, or on a device NIXL does not know.
    """
    if not layers:
        raise RegionError("there are no KV cache layers to transfer")
    if missing := sorted(set(layers) - set(kv_caches)):
        raise RegionError(f"layers {missing} have a KV cache group and no KV cache")
    found: dict[tuple[int, int], Region] = {}
    for name in sorted(layers, key=natural_key):
        layer = _Layer(name, kv_caches[name], layers[name])
        if not isinstance(layer.tensor, torch.Tensor):
            raise RegionError(
                f"KV cache of layer {name!r} is a {type(layer.tensor).__name__}, not one tensor; {SUPPORTED}"
            )
        for region in _layer_regions(layer):
            known = found.setdefault((region.group, region.base), region)
            if known != region:
                raise RegionError(f"{layer} shares memory with another layer that has another layout")
    specified = [kv_caches[name] for name in layers]
    _check_shared([(name, kv_caches[name]) for name in kv_caches if name not in layers], specified)
    return Layout(list(found.values()), memory_type(specified), memory_ranges(specified))


def memory_type(tensors: Sequence[torch.Tensor]) -> str:
    """``DRAM`` or ``VRAM``.

    Raises:
        RegionError: tensors on several kinds of device, or on one that NIXL does not know.
    """
    kinds = {tensor.device.type for tensor in tensors}
    if kinds == {"cpu"}:
        return "DRAM"
    if kinds == {"cuda"}:
        return "VRAM"
    raise RegionError(f"KV caches lie on {sorted(kinds)}; supported is all on cpu or all on cuda")


def memory_ranges(tensors: Sequence[torch.Tensor]) -> list[MemoryRange]:
    """The storages under ``tensors``, each once, by address."""
    found: dict[int, MemoryRange] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        found[storage.data_ptr()] = MemoryRange(storage.data_ptr(), storage.nbytes(), _device_id(tensor))
    return [found[base] for base in sorted(found)]


def pages_of(regions: Sequence[Region]) -> Pages:
    """What the planner needs of ``regions``."""
    return Pages(
        tuple(region.group for region in regions),
        tuple(region.num_pages for region in regions),
        tuple(region.len_bytes for region in regions),
        frozenset(at for at, region in enumerate(regions) if region.stride_bytes > region.len_bytes),
    )


def to_wire(region: Region) -> tuple[int, int, int, int, int, int]:
    """A region as :class:`~kvlease.core.messages.RankInfo` carries it."""
    return (region.base, region.stride_bytes, region.len_bytes, region.num_pages, region.group, region.device_id)


def from_wire(info: RankInfo) -> list[Region]:
    """The regions another engine says it has.

    Raises:
        RegionError: numbers that cannot be a region, or a kind of memory NIXL does not know.
    """
    if info.memory not in {"DRAM", "VRAM"}:
        raise RegionError(f"the peer's memory is {info.memory!r}, neither DRAM nor VRAM")
    regions = [Region(*numbers) for numbers in info.regions]
    if not regions:
        raise RegionError("the peer has no regions")
    for at, region in enumerate(regions):
        if not _is_possible(region):
            raise RegionError(f"the peer's region {at} is impossible: {to_wire(region)}")
    return regions


def strided_rows(regions: Sequence[Region]) -> list[tuple[int, int, int, int, int]]:
    """Rows ``(address, length, device, stride, count)``, one for each region: NIXL's strided form. Bytes."""
    return [(r.base, r.len_bytes, r.device_id, r.stride_bytes, r.num_pages) for r in regions]


def natural_key(name: str) -> list[tuple[int, int, str]]:
    """Sorts ``layers.2`` before ``layers.10``."""
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in re.split(r"(\d+)", name)]


def _is_possible(region: Region) -> bool:
    return (
        region.base >= 0
        and 0 < region.len_bytes <= region.stride_bytes
        and 0 < region.num_pages < 1 << 31
        and region.base + region.stride_bytes * region.num_pages < 1 << 63
        and 0 <= region.group < 1 << 31
        and 0 <= region.device_id < 1 << 31
    )


def _device_id(tensor: torch.Tensor) -> int:
    return max(tensor.get_device(), 0)


@dataclass(frozen=True)
class _Layer:
    name: str
    tensor: torch.Tensor
    spec: LayerSpec

    def __str__(self) -> str:
        return (
            f"KV cache of layer {self.name!r}, shape {tuple(self.tensor.shape)}, strides {tuple(self.tensor.stride())} "
            f"of {self.tensor.element_size()} bytes,"
        )


@dataclass(frozen=True)
class _Dim:
    size: int
    stride: int  # bytes


def _layer_regions(layer: _Layer) -> Iterator[Region]:
    block, others = _split_block_dim(layer)
    page, planes = _dense_part(others, layer.tensor.element_size())
    len_bytes = layer.tensor.element_size()
    for dim in page:
        len_bytes *= dim.size
    if block.stride < len_bytes or any(dim.stride < block.stride * block.size for dim in planes):
        raise RegionError(f"{layer} has pages that are not dense; {SUPPORTED}")
    starts = [sum(steps) for steps in product(*([dim.stride * i for i in range(dim.size)] for dim in planes))]
    if len_bytes * len(starts) != layer.spec.page_bytes:
        raise RegionError(
            f"{layer} holds {len_bytes * len(starts)} bytes in a block, its page size is "
            f"{layer.spec.page_bytes}; {SUPPORTED}"
        )
    for start in starts:
        yield Region(
            base=layer.tensor.data_ptr() + start,
            stride_bytes=block.stride,
            len_bytes=len_bytes,
            num_pages=layer.spec.num_pages,
            group=layer.spec.group,
            device_id=_device_id(layer.tensor),
        )


def _split_block_dim(layer: _Layer) -> tuple[_Dim, list[_Dim]]:
    """The dimension that counts blocks, and all others; kernel blocks inside a block are a dimension of their own."""
    tensor = layer.tensor
    item = tensor.element_size()
    dims = [_Dim(size, stride * item) for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    fits = [at for at, dim in enumerate(dims[:2]) if dim.size and dim.size % layer.spec.num_pages == 0]
    if fits and fits[0] == 1 and dims[0].size != 2:
        fits = []
    if fits == [0, 1] and dims[0].size == 2 and layer.spec.num_pages > 1:
        raise RegionError(f"{layer} can be read as (2, blocks, ...) and as (blocks, ...): unclear")
    if not fits:
        raise RegionError(f"{layer} has no dimension of {layer.spec.num_pages} blocks; {SUPPORTED}")
    at = fits[0]
    ratio = dims[at].size // layer.spec.num_pages
    block = _Dim(layer.spec.num_pages, dims[at].stride * ratio)
    return block, [*dims[:at], _Dim(ratio, dims[at].stride), *dims[at + 1 :]]


def _dense_part(dims: list[_Dim], item_bytes: int) -> tuple[list[_Dim], list[_Dim]]:
    """Those of ``dims`` that lie without gaps from the item on, and the rest."""
    page: list[_Dim] = []
    ordered = sorted((dim for dim in dims if dim.size > 1), key=lambda dim: dim.stride)
    expected = item_bytes
    while ordered and ordered[0].stride == expected:
        expected *= ordered[0].size
        page.append(ordered.pop(0))
    return page, ordered


def _check_shared(others: Sequence[tuple[str, torch.Tensor]], specified: Sequence[torch.Tensor]) -> None:
    """Layers that no group names must be views of specified ones, or their KV would be left behind."""
    known = {_identity(tensor) for tensor in specified}
    for name, tensor in others:
        if not isinstance(tensor, torch.Tensor) or _identity(tensor) not in known:
            raise RegionError(f"layer {name!r} has a KV cache of its own and no KV cache group")


def _identity(tensor: torch.Tensor) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    return tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride())
