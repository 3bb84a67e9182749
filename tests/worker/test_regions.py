"""Every layout of vLLM's KV caches becomes regions whose pages hold what the tensor holds, or is refused in words."""

from __future__ import annotations

import ctypes

import pytest
import torch

from kvlease.core.messages import RankInfo
from kvlease.worker.regions import (
    LayerSpec,
    Region,
    RegionError,
    find_regions,
    from_wire,
    memory_ranges,
    natural_key,
    pages_of,
    strided_rows,
    to_wire,
)

BLOCKS = 6
ITEM = 2


def cache(*shape: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """A tensor of ``shape`` filled with distinct numbers, laid out in memory in the ``order`` of its dimensions."""
    order = order or tuple(range(len(shape)))
    raw = torch.arange(torch.Size(shape).numel(), dtype=torch.int16).reshape([shape[dim] for dim in order])
    return raw.permute([order.index(dim) for dim in range(len(shape))])


def one(tensor: torch.Tensor, page_bytes: int, blocks: int = BLOCKS) -> list[Region]:
    return find_regions({"layer": tensor}, {"layer": LayerSpec(0, blocks, page_bytes)}).regions


def page(region: Region, block: int) -> list[int]:
    """The numbers in one page, read from memory."""
    raw = ctypes.string_at(region.base + block * region.stride_bytes, region.len_bytes)
    return sorted(torch.frombuffer(bytearray(raw), dtype=torch.int16).tolist())


def holdings(regions: list[Region], block: int) -> list[int]:
    return sorted(number for region in regions for number in page(region, block))


def numbers(tensor: torch.Tensor) -> list[int]:
    return sorted(tensor.flatten().tolist())


class TestLayouts:
    @pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (0, 3, 1, 2)])
    def test_blocks_first_in_any_order_within_the_page_is_one_region(self, order) -> None:
        tensor = cache(BLOCKS, 3, 4, 5, order=order)
        (region,) = one(tensor, 3 * 4 * 5 * ITEM)
        assert (region.num_pages, region.len_bytes, region.stride_bytes) == (BLOCKS, 120, 120)
        assert all(page(region, block) == numbers(tensor[block]) for block in range(BLOCKS))

    def test_k_and_v_first_are_two_regions(self) -> None:
        tensor = cache(2, BLOCKS, 4, 5)
        regions = one(tensor, 2 * 4 * 5 * ITEM)
        assert len(regions) == 2
        assert all(holdings(regions, block) == numbers(tensor[:, block]) for block in range(BLOCKS))
        assert page(regions[1], 3) == numbers(tensor[1, 3])

    def test_k_and_v_inside_the_block_are_one_region(self) -> None:
        tensor = cache(BLOCKS, 2, 4, 5)
        (region,) = one(tensor, 2 * 4 * 5 * ITEM)
        assert page(region, 5) == numbers(tensor[5])

    def test_k_and_v_first_in_name_but_inside_the_block_in_memory_are_one_region(self) -> None:
        tensor = cache(2, BLOCKS, 4, 5, order=(1, 0, 2, 3))
        (region,) = one(tensor, 2 * 4 * 5 * ITEM)
        assert page(region, 5) == numbers(tensor[:, 5])

    def test_planes_that_are_outermost_in_memory_only_are_regions_of_their_own(self) -> None:
        tensor = cache(BLOCKS, 3, 4, order=(1, 0, 2))
        regions = one(tensor, 3 * 4 * ITEM)
        assert len(regions) == 3
        assert all(holdings(regions, block) == numbers(tensor[block]) for block in range(BLOCKS))

    def test_kernel_blocks_are_joined_to_blocks(self) -> None:
        tensor = cache(BLOCKS * 4, 5)
        (region,) = one(tensor, 4 * 5 * ITEM)
        assert region.num_pages == BLOCKS
        assert page(region, 2) == numbers(tensor[8:12])

    def test_kernel_blocks_behind_k_and_v_are_joined_to_blocks(self) -> None:
        tensor = cache(2, BLOCKS * 4, 5)
        regions = one(tensor, 2 * 4 * 5 * ITEM)
        assert len(regions) == 2
        assert holdings(regions, 2) == numbers(tensor[:, 8:12])

    def test_other_layers_between_two_pages_are_stepped_over(self) -> None:
        packed = cache(BLOCKS, 3, 4, 5)
        caches = {f"layers.{i}": packed[:, i] for i in range(3)}
        layout = find_regions(caches, dict.fromkeys(caches, LayerSpec(0, BLOCKS, 4 * 5 * ITEM)))
        assert [region.stride_bytes for region in layout.regions] == [3 * 4 * 5 * ITEM] * 3
        assert page(layout.regions[1], 4) == numbers(packed[4, 1])
        assert len(layout.ranges) == 1

    def test_dimensions_of_one_do_not_matter(self) -> None:
        tensor = cache(BLOCKS, 1, 4, 5)
        assert page(one(tensor, 4 * 5 * ITEM)[0], 1) == numbers(tensor[1])

    def test_an_offset_into_the_storage_counts(self) -> None:
        tensor = cache(BLOCKS + 1, 5)[1:]
        assert page(one(tensor, 5 * ITEM)[0], 0) == numbers(tensor[0])


class TestRefusals:
    @pytest.mark.parametrize(
        ("tensor", "page_bytes", "what"),
        [
            (cache(BLOCKS, 4, 5)[:, :, :4], 4 * 4 * ITEM, "not dense"),
            (cache(BLOCKS, 8, 5)[:, ::2], 4 * 5 * ITEM, "not dense"),
            (cache(BLOCKS, 4, 5), 4 * 5 * ITEM + 2, "holds 40 bytes in a block, its page size is 42"),
            (cache(5, 5), 5 * ITEM, "no dimension of 6 blocks"),
            (cache(3, BLOCKS, 5), 15 * ITEM, "no dimension of 6 blocks"),
            (cache(BLOCKS, 5)[:1].expand(BLOCKS, 5), 5 * ITEM, "not dense"),
        ],
    )
    def test_what_does_not_add_up_is_refused_with_layer_shape_and_what_is_supported(
        self, tensor, page_bytes, what
    ) -> None:
        with pytest.raises(RegionError, match=what) as refused:
            one(tensor, page_bytes)
        assert "'layer'" in str(refused.value)
        assert str(tuple(tensor.shape)) in str(refused.value)
        assert "supported are" in str(refused.value)

    def test_two_blocks_behind_k_and_v_could_be_either(self) -> None:
        with pytest.raises(RegionError, match="unclear"):
            one(cache(2, 2, 5), 20, blocks=2)

    def test_a_list_of_states_is_refused(self) -> None:
        with pytest.raises(RegionError, match="is a list, not one tensor"):
            find_regions({"mamba": [cache(BLOCKS, 5)]}, {"mamba": LayerSpec(0, BLOCKS, 10)})

    def test_layers_without_caches_and_caches_without_layers_are_refused(self) -> None:
        spec = LayerSpec(0, BLOCKS, 5 * ITEM)
        with pytest.raises(RegionError, match=r"\['b'\] have a KV cache group and no KV cache"):
            find_regions({"a": cache(BLOCKS, 5)}, {"a": spec, "b": spec})
        with pytest.raises(RegionError, match="'b' has a KV cache of its own"):
            find_regions({"a": cache(BLOCKS, 5), "b": cache(BLOCKS, 5)}, {"a": spec})
        with pytest.raises(RegionError, match="no KV cache layers"):
            find_regions({}, {})

    def test_other_devices_are_refused(self) -> None:
        with pytest.raises(RegionError, match="meta"):
            find_regions({"a": torch.empty((6, 5), device="meta")}, {"a": LayerSpec(0, 6, 20)})

    def test_one_memory_with_two_layouts_is_refused(self) -> None:
        tensor = cache(BLOCKS, 4)
        layers = {"a": LayerSpec(0, BLOCKS, 8), "b": LayerSpec(0, BLOCKS // 2, 16)}
        with pytest.raises(RegionError, match="another layout"):
            find_regions({"a": tensor, "b": tensor}, layers)


class TestManyLayers:
    def test_come_in_the_order_of_their_numbers(self) -> None:
        names = ["m.layers.10.attn", "m.layers.2.attn", "m.layers.1.attn"]
        caches = {name: cache(BLOCKS, 5) for name in names}
        layout = find_regions(caches, dict.fromkeys(names, LayerSpec(0, BLOCKS, 10)))
        bases = [caches[name].data_ptr() for name in reversed(names)]
        assert [region.base for region in layout.regions] == bases

    def test_that_share_a_cache_are_one_region_whether_specified_or_not(self) -> None:
        tensor, spec = cache(BLOCKS, 5), LayerSpec(0, BLOCKS, 10)
        assert len(find_regions({"a": tensor, "b": tensor}, {"a": spec, "b": spec}).regions) == 1
        assert len(find_regions({"a": tensor, "b": tensor}, {"a": spec}).regions) == 1

    def test_of_two_groups_that_overlay_each_other_are_a_region_each(self) -> None:
        tensor = cache(BLOCKS, 5)
        layers = {"full": LayerSpec(0, BLOCKS, 10), "window": LayerSpec(1, BLOCKS, 10)}
        layout = find_regions({"full": tensor, "window": tensor}, layers)
        assert [region.group for region in layout.regions] == [0, 1]

    def test_of_one_allocation_are_registered_once(self) -> None:
        whole = cache(4, BLOCKS, 5)
        (found,) = memory_ranges(list(whole))
        assert (found.base, found.len_bytes) == (whole.data_ptr(), whole.numel() * ITEM)
        assert len(memory_ranges([cache(BLOCKS, 5), whole[0], whole[1]])) == 2


class TestWire:
    REGION = Region(4096, 100, 80, 6, 0, 0)

    def test_regions_cross_it_unchanged(self) -> None:
        assert from_wire(RankInfo(0, b"", [to_wire(self.REGION)])) == [self.REGION]
        assert strided_rows([self.REGION]) == [(4096, 80, 0, 100, 6)]
        assert pages_of([self.REGION]).num_pages == (6,)

    def test_the_planner_is_told_where_something_lies_between_pages(self) -> None:
        dense = Region(4096, 80, 80, 6, 0, 0)
        assert pages_of([dense, self.REGION, dense]).with_gaps == {1}

    @pytest.mark.parametrize(
        "numbers",
        [
            (-1, 100, 80, 6, 0, 0),
            (0, 60, 80, 6, 0, 0),
            (0, 100, 0, 6, 0, 0),
            (0, 100, 80, 0, 0, 0),
            (0, 100, 80, 1 << 40, 0, 0),
            (1 << 62, 1 << 62, 80, 6, 0, 0),
            (0, 100, 80, 6, -1, 0),
            (0, 100, 80, 6, 0, -1),
        ],
    )
    def test_impossible_regions_are_refused(self, numbers) -> None:
        with pytest.raises(RegionError, match="region 0 is impossible"):
            from_wire(RankInfo(0, b"", [numbers]))

    def test_no_regions_and_odd_memory_are_refused(self) -> None:
        with pytest.raises(RegionError, match="no regions"):
            from_wire(RankInfo(0, b"", []))
        with pytest.raises(RegionError, match="neither DRAM nor VRAM"):
            from_wire(RankInfo(0, b"", [to_wire(self.REGION)], memory="OBJ"))


def test_names_sort_with_their_numbers_as_numbers() -> None:
    names = ["l.10", "l.9", "l", "l.9.b", "10", "9", "l.9a"]
    assert sorted(names, key=natural_key) == ["9", "10", "l", "l.9", "l.9.b", "l.9a", "l.10"]
