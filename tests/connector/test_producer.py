"""What a producer lends when a request ends, under vLLM's real scheduler."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("vllm")

import numpy as np
from vllm.v1.engine import FinishReason

from kvlease.config import Settings
from kvlease.connector.metadata import KVLeaseHandshake
from kvlease.connector.producer import ProducerHalf
from kvlease.core.digest import prompt_digest
from kvlease.core.ids import EngineId, Incarnation
from kvlease.core.messages import Acquire, Checksum, RankInfo
from kvlease.net.endpoint import GrantItem
from kvlease.net.lifeline import Lifeline
from kvlease.worker.hasher import Hasher
from kvlease.worker.regions import Layout, Region
from tests.connector.harness import BLOCK_SIZE, prompt
from tests.net.test_endpoint import Client

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


class RecordingEndpoint:
    is_alive = True
    port = 1

    def __init__(self) -> None:
        self.items: list[GrantItem] = []

    def grant(self, item: GrantItem) -> None:
        self.items.append(item)


def test_blocks_that_a_step_in_flight_may_write_to_are_lent_as_not_settled(make_site: MakeSite) -> None:
    site, endpoint = make_site("kv_producer"), RecordingEndpoint()
    request = site.submit("p", prompt(40))
    site.until(lambda: "p" in site.finished)
    request.kv_transfer_params = ASK
    us = Incarnation(b"i" * 16)
    half = ProducerHalf(Settings(), endpoint, EngineId("e"), us, "127.0.0.1", 1, [BLOCK_SIZE])  # type: ignore[arg-type]
    for in_flight in (0, 1):
        request.num_in_flight_tokens, request.num_computed_tokens = in_flight, 40 + in_flight
        assert half.grant(request, ([5, 6, 7],)) is not None
    assert [item.is_settled for item in endpoint.items] == [True, False]


def test_a_worker_that_computes_checksums_is_asked_for_those_of_the_lent_blocks(make_site: MakeSite) -> None:
    pages = np.random.default_rng(1).integers(0, 256, (64, 128), dtype=np.uint8)
    hasher = Hasher(Layout([Region(pages.ctypes.data, 128, 128, 64, 0, 0)], "DRAM", []))
    hasher.start()
    lifeline, producer, tokens = Lifeline(), make_site("kv_producer", kv_checksum="full"), prompt(40)
    info = RankInfo(0, b"", [], checksum="crc32")
    handshake = KVLeaseHandshake(info, {}, lifeline.address, hasher.address)
    producer.connector.set_xfer_handshake_metadata({0: handshake})
    handoff = producer.prefill("p", tokens)
    us = Incarnation(bytes.fromhex(handoff["kvlease"]["incarnation"]))
    claim = {
        "lease": handoff["remote_request_id"],
        "token": bytes.fromhex(handoff["kvlease"]["token"]),
        "reader": "c/1",
    }
    client = Client(handoff["remote_port"])
    client.ask(Acquire, to=us, channel="c", digest=prompt_digest(tokens, 40, None, None, []), **claim)
    answer = client.ask(Checksum, to=us, rank=0, positions=[[(0, 3)]], **claim)
    assert answer.sums == [zlib.crc32(pages[handoff["remote_block_ids"][0]].tobytes())]
    client.close()
    assert lifeline.sever()
    assert hasher.shutdown()
