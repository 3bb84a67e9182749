"""What is compared: the positions a consumer names, the producer's blocks at them, and the regions that differ."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlease.core.checksums import (
    SAMPLE_BLOCKS,
    blocks_at,
    check_bytes,
    differing_regions,
    leased_blocks_at,
    positions_to_check,
    without_last,
)
from kvlease.core.ids import LeaseId, LeaseToken, LoadId, ReaderId
from kvlease.core.messages import ProtocolError
from kvlease.core.orders import LoadOrder
from kvlease.core.plan import Pages
from kvlease.core.runs import block_runs, expand_runs

NULL = 0


def order(start: int, end: int, *groups: list[int]) -> LoadOrder:
    return LoadOrder(
        load=LoadId("load"),
        lease=LeaseId("lease"),
        token=LeaseToken(b"t" * 16),
        reader=ReaderId("channel/load"),
        peer=None,
        start_token=start,
        end_token=end,
        local_blocks=groups,
        remote_blocks=[],
    )


def positions(extent: Any, load: LoadOrder, seed: bytes = b"seed", sizes: tuple[int, ...] = (16,)) -> list[list[int]]:
    return [group.tolist() for group in positions_to_check(load, sizes, NULL, extent, seed)]


class TestTheConsumer:
    def test_full_compares_every_block_that_is_read_whole_or_in_part(self) -> None:
        assert positions("full", order(0, 48, [7, 8, 9])) == [[0, 1, 2]]
        assert positions("full", order(17, 33, [7, 8, 9])) == [[1, 2]]

    def test_a_load_without_tokens_compares_nothing(self) -> None:
        assert positions("full", order(20, 20, [7, 8])) == [[]]

    def test_a_block_that_holds_nothing_is_left_out(self) -> None:
        assert positions("full", order(0, 64, [NULL, NULL, 5, 6])) == [[2, 3]]

    def test_without_a_null_block_every_id_counts(self) -> None:
        (group,) = positions_to_check(order(0, 32, [0, 1]), [16], None, "full", b"")
        assert group.tolist() == [0, 1]

    def test_groups_are_counted_by_their_own_block_sizes(self) -> None:
        assert positions("full", order(0, 64, [1, 2, 3, 4], [9]), sizes=(16, 64)) == [[0, 1, 2, 3], [0]]

    def test_a_sample_of_few_blocks_is_all_of_them(self) -> None:
        assert positions("sampled", order(0, 16 * SAMPLE_BLOCKS, list(range(1, 9)))) == [list(range(SAMPLE_BLOCKS))]

    def test_equal_seeds_choose_alike_and_others_differently(self) -> None:
        load = order(0, 16 * 1000, list(range(1, 1001)))
        assert positions("sampled", load) == positions("sampled", load)
        assert len({str(positions("sampled", load, seed=bytes([i]))) for i in range(20)}) == 20

    @given(st.integers(SAMPLE_BLOCKS, 3000), st.binary(max_size=20))
    def test_a_sample_has_one_block_of_every_stretch(self, count: int, seed: bytes) -> None:
        (chosen,) = positions("sampled", order(0, 16 * count, list(range(1, count + 1))), seed)
        stretches = [range(i * count // SAMPLE_BLOCKS, (i + 1) * count // SAMPLE_BLOCKS) for i in range(SAMPLE_BLOCKS)]
        assert len(chosen) == SAMPLE_BLOCKS
        assert all(at in stretch for at, stretch in zip(chosen, stretches, strict=True))

    def test_its_own_blocks_are_those_at_the_positions(self) -> None:
        (ids,) = blocks_at([np.array([0, 2])], [[7, 8, 9]])
        assert ids.tolist() == [7, 9]

    def test_bytes_are_counted_over_all_regions(self) -> None:
        pages = Pages((0, 0, 1), (10, 10, 10), (64, 32, 1000))
        assert check_bytes(pages, [np.array([1, 2]), np.array([4])]) == 2 * 64 + 2 * 32 + 1000

    def test_the_last_block_of_the_lease_can_be_left_out(self) -> None:
        (kept,) = without_last([np.array([1, 3])], [[(40, 2), (7, 2)]])
        assert kept.tolist() == [1]
        (all_of_them,) = without_last([np.array([1, 2])], [[(40, 5)]])
        assert all_of_them.tolist() == [1, 2]


class TestTheProducer:
    LEASED = [[(10, 3), (50, 2)]]  # noqa: RUF012 - blocks 10, 11, 12, 50, 51

    def at(self, asked: Any, is_settled: bool = True) -> Any:
        return leased_blocks_at(asked, self.LEASED, is_settled)

    def test_finds_its_blocks_at_the_positions(self) -> None:
        assert self.at([[(0, 5)]]) == [[(10, 3), (50, 2)]]
        assert self.at([[(2, 2)]]) == [[(12, 1), (50, 1)]]
        assert self.at([[]]) == [[]]

    def test_leaves_out_the_last_block_while_it_may_be_written_to(self) -> None:
        assert self.at([[(0, 5)]], is_settled=False) == [[(10, 3), (50, 1)]]
        assert self.at([[(0, 2)]], is_settled=False) == [[(10, 2)]]

    @pytest.mark.parametrize(
        "asked",
        [[], [[], []], [[(0, 6)]], [[(4, 2)]], [[(5, 1)]], [[(0, 1 << 50)]], [[(0, 0)]], [[(0, 5), (0, 1)]]],
        ids=str,
    )
    def test_refuses_positions_that_the_lease_does_not_have(self, asked: Any) -> None:
        with pytest.raises(ProtocolError) as caught:
            self.at(asked)
        assert caught.value.reason == "bad_positions"


@given(st.data())
def test_both_sides_mean_the_same_blocks(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 40))
    theirs = data.draw(st.permutations(range(1, 100)))[:count]
    start = data.draw(st.integers(0, 16 * count - 1))
    is_settled = data.draw(st.booleans())
    load = order(start, data.draw(st.integers(start + 1, 16 * count)), list(range(1, count + 1)))
    asked = positions_to_check(load, [16], NULL, data.draw(st.sampled_from(["sampled", "full"])), b"seed")
    (found,) = leased_blocks_at([block_runs(asked[0].tolist())], [block_runs(theirs)], is_settled)
    if not is_settled:
        asked = without_last(asked, [block_runs(theirs)])
    assert expand_runs(found, 0, len(asked[0]), 1 << 31).tolist() == [theirs[at] for at in asked[0]]


def test_regions_differ_by_their_checksums_and_by_being_there() -> None:
    assert differing_regions([1, 2, 3], [1, 2, 3]) == []
    assert differing_regions([1, 2, 3], [1, 9, 3]) == [1]
    assert differing_regions([1, 2], [1, 2, 3]) == [2]
    assert differing_regions([1], []) == [0]
