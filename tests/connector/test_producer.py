"""What a producer lends when a request ends, under vLLM's real scheduler."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("vllm")

from vllm.v1.engine import FinishReason

from tests.connector.harness import BLOCK_SIZE, prompt

if TYPE_CHECKING:
    from tests.connector.harness import Site

MakeSite = Callable[..., "Site"]
ASK = {"do_remote_decode": True, "do_remote_prefill": False}


def test_a_prompt_whose_first_token_ends_it_is_handed_over_like_any_other(make_site: MakeSite) -> None:
    """An end-of-sequence or stop token, rather than the limit of one token."""
    producer = make_site("kv_producer")
    tokens = prompt(40)
    request = producer.submit("p", tokens, ASK, max_tokens=8)
    request.sampling_params.stop_token_ids = [7]
    producer.until(lambda: "p" in producer.finished)
    assert producer.finished["p"] is FinishReason.STOP
    handoff = producer.handoffs["p"]
    assert handoff is not None
    assert handoff["remote_num_tokens"] == 40
    assert len(handoff["remote_block_ids"][0]) == 3


def test_a_prompt_that_is_prefilled_in_parts_is_handed_over_whole(make_site: MakeSite) -> None:
    producer = make_site("kv_producer", engine={"max_num_batched_tokens": 32, "enable_chunked_prefill": True})
    handoff = producer.prefill("p", prompt(200))
    assert handoff["remote_num_tokens"] == 200
    assert len(set(handoff["remote_block_ids"][0])) == -(-200 // BLOCK_SIZE)


def test_vllm_is_told_that_a_preempted_handoff_must_be_computed_again(make_site: MakeSite) -> None:
    """Else a request that is preempted in its last step finishes without the blocks it is to hand over."""
    for role in ("kv_producer", "kv_both"):
        assert make_site(role).scheduler.requires_kv_delivery


@pytest.mark.parametrize("blocks", [[], [5, 6]])
def test_blocks_that_do_not_hold_the_whole_prompt_are_not_lent(make_site: MakeSite, blocks: list[int]) -> None:
    producer = make_site("kv_producer")
    request = producer.submit("p", prompt(40))
    producer.until(lambda: "p" in producer.finished)
    request.kv_transfer_params = ASK
    assert producer.connector.request_finished_all_groups(request, (blocks,)) == (False, None)
    lent, _ = producer.connector.request_finished_all_groups(request, ([5, 6, 7],))
    assert lent


def test_no_lent_block_is_used_again_however_many_requests_come(make_site: MakeSite) -> None:
    producer = make_site("kv_producer", num_blocks=16)
    lent = set(producer.prefill("p", prompt(40))["remote_block_ids"][0])
    for turn in range(12):
        producer.submit(f"r{turn}", prompt(60, seed=turn + 2), max_tokens=4)
        producer.step()
        used = {
            block
            for request in producer.scheduler.running
            for block in producer.scheduler.kv_cache_manager.get_block_ids(request.request_id)[0]
        }
        assert used, "the rest of the pool serves others"
        assert lent.isdisjoint(used)
    producer.until(lambda: len(producer.finished) == 13)
    assert producer.blocks_free == 15 - len(lent)
