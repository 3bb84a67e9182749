"""Loads and leases under vLLM's real scheduler: what is claimed, reported, freed, and what never happens twice."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("vllm")

from vllm.lora.request import LoRARequest
from vllm.v1.engine import FinishReason
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from kvlease.connector import scheduler as scheduler_module
from kvlease.connector.metadata import KVLeaseWorkerReport
from kvlease.core.loads import FailureCause
from kvlease.core.runs import block_runs
from tests.connector.harness import BLOCK_SIZE, PATIENCE_S, prompt

if TYPE_CHECKING:
    from tests.connector.harness import Site

MakeSite = Callable[..., "Site"]
LENGTHS = [1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 2 * BLOCK_SIZE, 200]


def outcomes(site: Site) -> dict[str, int]:
    return {key: count for key, count in site.stats.items() if key.startswith("loads|")}


def load(site: Site, name: str, tokens: list[int], handoff: dict[str, Any], **more: Any) -> None:
    """Submit a consumer request and bring it to the point where its pull was ordered."""
    site.submit(name, tokens, handoff, **more)
    site.until(lambda: name in site.worker.loads)


@pytest.mark.parametrize("length", LENGTHS)
def test_a_handoff_becomes_one_load_of_the_whole_prompt(make_site: MakeSite, length: int) -> None:
    producer, consumer = make_site("kv_producer"), make_site("kv_consumer")
    tokens = prompt(length)
    free = consumer.blocks_free
    load(consumer, "d", tokens, producer.prefill("p", tokens))
    order = consumer.worker.loads["d"]
    blocks = -(-length // BLOCK_SIZE)
    assert (order.start_token, order.end_token, order.doomed) == (0, length, None)
    assert len(order.local_blocks[0]) == blocks
    assert sum(count for _, count in order.remote_blocks[0]) == blocks
    consumer.worker.reports.received.add(order.load)
    consumer.until(lambda: "d" in consumer.finished)
    assert outcomes(consumer) == {"loads|done|": 1}
    assert consumer.blocks_free == free


def test_a_step_is_drawn_out_only_when_nothing_but_loads_and_leases_needs_it(make_site: MakeSite) -> None:
    producer, consumer = make_site("kv_producer"), make_site("kv_consumer")
    handoffs = [producer.prefill(name, prompt(40)) for name in "pq"]
    producer.step()
    assert producer.worker.may_rest  # it has leases out, and nothing to run
    producer.submit("another", prompt(40))
    producer.step()
    assert not producer.worker.may_rest  # a model ran
    consumer.submit("d", prompt(40), handoffs[0])
    consumer.step()
    assert consumer.worker.may_rest is ("d" in consumer.worker.loads)  # not before its claim is granted
    consumer.until(lambda: "d" in consumer.worker.loads)
    consumer.step()
    assert consumer.worker.may_rest  # its pull is under way
    consumer.submit("e", prompt(40), handoffs[1])
    consumer.step()
    assert consumer.worker.may_rest is ("e" in consumer.worker.loads)  # another one's claim is
    consumer.until(lambda: "e" in consumer.worker.loads)
    consumer.worker.reports.received.update(order.load for order in consumer.worker.loads.values())
    consumer.until(lambda: consumer.finished.keys() == {"d", "e"})
    consumer.step()
    assert not consumer.worker.may_rest  # nothing is
    producer.connector.reset_cache()
    producer.until(lambda: len(producer.worker.ended) == 2)
    assert not producer.worker.may_rest  # ended leases are not kept waiting


def test_workers_greet_the_producer_while_the_request_still_waits_for_blocks(make_site: MakeSite) -> None:
    producer, consumer = make_site("kv_producer"), make_site("kv_consumer", num_blocks=4)
    handoff = producer.prefill("p", prompt(200))
    for name in ("d", "e"):
        consumer.submit(name, prompt(200), handoff)
    consumer.step()
    (peer,) = consumer.worker.greeted
    assert (peer.engine_id, peer.host, peer.port) == (
        handoff["remote_engine_id"], handoff["remote_host"], handoff["remote_port"],
    )  # fmt: skip
    assert consumer.worker.loads == {}
    consumer.step()
    assert consumer.worker.greeted == [peer]


@pytest.mark.parametrize("handoff", [{"do_remote_prefill": True}, None, {"do_remote_decode": True}])
def test_nobody_is_greeted_for_what_is_no_handoff(make_site: MakeSite, handoff: dict[str, Any] | None) -> None:
    consumer = make_site("kv_consumer")
    consumer.submit("d", prompt(40), handoff)
    consumer.until(lambda: "d" in consumer.finished)
    assert consumer.worker.greeted == []


def test_leased_blocks_stay_until_every_worker_said_they_are_sent(make_site: MakeSite) -> None:
    producer = make_site("kv_producer", lease_duration_s=0.3, lease_extension_s=0.3, heartbeat_interval_s=0.1)
    free = producer.blocks_free
    producer.worker.gives_back = False
    producer.prefill("p", prompt(40))
    assert producer.blocks_free == free - 3
    producer.until(lambda: producer.worker.ended == ["p"])
    assert producer.scheduler.connector.has_pending_block_frees()
    assert producer.blocks_free == free - 3
    producer.worker.reports.sent.add("p")
    producer.step()
    assert producer.blocks_free == free
    assert not producer.scheduler.connector.has_pending_block_frees()
    assert not producer.scheduler.has_requests()


def test_only_a_request_that_ran_to_its_end_is_leased(make_site: MakeSite) -> None:
    producer = make_site("kv_producer")
    free = producer.blocks_free
    producer.submit("aborted", prompt(40), {"do_remote_decode": True}, max_tokens=8)
    producer.step()
    producer.abort("aborted")
    producer.submit("plain", prompt(40), None)
    producer.submit("null", prompt(40), {"do_remote_decode": None})
    producer.until(lambda: {"plain", "null"} <= producer.finished.keys())
    assert producer.handoffs == {"plain": None, "null": None}
    producer.step()
    assert producer.blocks_free == free


def test_what_is_computed_here_already_is_not_pulled_again(make_site: MakeSite) -> None:
    producer, consumer = make_site("kv_producer"), make_site("kv_consumer")
    tokens = prompt(50)
    consumer.submit("warm", tokens[:32])
    consumer.until(lambda: "warm" in consumer.finished)
    load(consumer, "d", tokens, producer.prefill("p", tokens))
    order = consumer.worker.loads["d"]
    assert (order.start_token, order.end_token) == (32, 50)
    assert len(order.local_blocks[0]) == 4


def test_a_full_prefix_hit_releases_the_lease_at_once(make_site: MakeSite) -> None:
    producer, consumer = make_site("kv_producer"), make_site("kv_consumer")
    tokens = prompt(3 * BLOCK_SIZE)
    longer = [*tokens, 1, 2]
    consumer.submit("warm", longer)
    consumer.until(lambda: "warm" in consumer.finished)
    free = producer.blocks_free
    consumer.submit("d", longer, producer.prefill("p", tokens))
    consumer.until(lambda: "d" in consumer.finished)
    producer.until(lambda: producer.blocks_free == free)
    assert consumer.worker.loads == {}
    assert outcomes(consumer) == {"loads|prefix_hit|": 1}


def test_a_longer_prompt_than_was_prefilled_is_continued_here(make_site: MakeSite) -> None:
    producer, consumer = make_site("kv_producer"), make_site("kv_consumer")
    tokens = prompt(40)
    load(consumer, "d", [*tokens, 5, 6, 7], producer.prefill("p", tokens))
    assert consumer.worker.loads["d"].end_token == 40


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_a_failed_load_follows_the_policy_and_is_never_asked_for_again(make_site: MakeSite, policy: str) -> None:
    producer, consumer = make_site("kv_producer"), make_site("kv_consumer", policy=policy)
    tokens = prompt(100)
    free = consumer.blocks_free
    load(consumer, "d", tokens, producer.prefill("p", tokens))
    reports = consumer.worker.reports
    reports.received.add("d")
    reports.failed["d"] = FailureCause.TRANSFER
    consumer.until(lambda: "d" in consumer.finished)
    assert consumer.finished["d"] == (FinishReason.LENGTH if policy == "recompute" else FinishReason.ERROR)
    assert list(consumer.worker.loads) == ["d"]
    assert outcomes(consumer) == {"loads|failed|transfer": 1}
    assert consumer.blocks_free == free
    assert not consumer.scheduler.has_unfinished_requests()


SPOILT: list[tuple[str, Callable[[dict[str, Any]], Any], str]] = [
    ("no proof", lambda params: params.pop("kvlease"), "no_proof"),
    ("forged token", lambda params: params["kvlease"].update(token="00" * 16), "gone_bad_token"),
    ("other incarnation", lambda params: params["kvlease"].update(incarnation="00" * 16), "peer_restarted"),
    ("no host", lambda params: params.pop("remote_host"), "bad_handoff"),
    ("port of the wrong type", lambda params: params.update(remote_port="x"), "bad_handoff"),
    ("unknown request", lambda params: params.update(remote_request_id="q"), "gone_unknown"),
    ("too many tokens", lambda params: params.update(remote_num_tokens=5000), "gone_mismatch"),
    ("fewer tokens", lambda params: params.update(remote_num_tokens=5), "gone_mismatch"),
]


@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize(("spoil", "cause"), [row[1:] for row in SPOILT], ids=[row[0] for row in SPOILT])
def test_a_spoilt_handoff_follows_the_policy(
    make_site: MakeSite, policy: str, spoil: Callable[[dict[str, Any]], Any], cause: str
) -> None:
    producer, consumer = make_site("kv_producer"), make_site("kv_consumer", policy=policy)
    tokens = prompt(40)
    handoff = producer.prefill("p", tokens)
    spoilt = copy.deepcopy(handoff)
    spoil(spoilt)
    free = consumer.blocks_free
    consumer.submit("d", tokens, spoilt)
    consumer.until(lambda: "d" in consumer.finished)
    assert consumer.finished["d"] == (FinishReason.LENGTH if policy == "recompute" else FinishReason.ERROR)
    assert outcomes(consumer)[f"loads|failed|{cause}"] == 1
    assert consumer.blocks_free == free
    assert all(order.doomed for order in consumer.worker.loads.values())
    load(consumer, "good", tokens, handoff)


def test_another_prompt_of_equal_length_gets_nothing(make_site: MakeSite) -> None:
    producer, consumer = make_site("kv_producer"), make_site("kv_consumer", policy="fail")
    handoff = producer.prefill("p", prompt(40, seed=1))
    for name, tokens, more in [
        ("prompt", prompt(40, seed=2), {}),
        ("salt", prompt(40, seed=1), {"cache_salt": "tenant-b"}),
        ("adapter", prompt(40, seed=1), {"lora_request": LoRARequest("adapter", 1, "/nowhere")}),
    ]:
        consumer.submit(name, tokens, handoff, **more)
        consumer.until(lambda name=name: name in consumer.finished)
        assert consumer.finished[name] is FinishReason.ERROR
    assert outcomes(consumer) == {"loads|failed|gone_mismatch": 3}
    load(consumer, "right", prompt(40, seed=1), handoff)


def test_a_load_under_the_producer_role_is_refused_and_nothing_breaks(make_site: MakeSite) -> None:
    producer, other = make_site("kv_producer"), make_site("kv_producer")
    tokens = prompt(40)
    other.submit("d", tokens, producer.prefill("p", tokens))
    other.until(lambda: "d" in other.finished)
    assert outcomes(other) == {"loads|failed|wrong_role": 1}


def test_a_consumer_grants_nothing(make_site: MakeSite) -> None:
    consumer = make_site("kv_consumer")
    consumer.submit("p", prompt(40), {"do_remote_decode": True})
    consumer.until(lambda: "p" in consumer.finished)
    assert consumer.handoffs["p"] is None


def test_an_engine_handed_its_own_lease_serves_from_its_own_cache(make_site: MakeSite) -> None:
    both = make_site("kv_both")
    tokens = prompt(40)
    free = both.blocks_free
    both.submit("d", tokens, both.prefill("p", tokens))
    both.until(lambda: "d" in both.finished and both.blocks_free == free)
    assert both.worker.loads == {}


# Aborts, at every stage; vLLM asserts on each id it is told


def test_an_abort_while_the_claim_is_under_way(make_site: MakeSite) -> None:
    producer, consumer = make_site("kv_producer"), make_site("kv_consumer")
    tokens = prompt(40)
    free = producer.blocks_free
    handoff = producer.prefill("p", tokens)
    consumer.submit("d", tokens, handoff)
    consumer.abort("d")
    producer.until(lambda: producer.blocks_free == free)
    consumer.step()
    assert consumer.worker.loads == {}
    assert outcomes(consumer) == {"loads|aborted|": 1}


def test_an_answer_to_an_aborted_request_is_none_to_the_next_one_of_its_id(make_site: MakeSite) -> None:
    producer, consumer = make_site("kv_producer"), make_site("kv_consumer")
    first, second = prompt(40, seed=1), prompt(40, seed=2)
    handoffs = producer.prefill("p1", first), producer.prefill("p2", second)
    consumer.submit("d", first, handoffs[0])
    answered = time.monotonic() + PATIENCE_S
    while "channel_events|received" not in getattr(consumer.connector.get_kv_connector_stats(), "data", {}):
        assert time.monotonic() < answered
    consumer.abort("d")
    load(consumer, "d", second, handoffs[1])
    order = consumer.worker.loads["d"]
    assert order.lease == "p2"
    assert order.remote_blocks == [block_runs(blocks) for blocks in handoffs[1]["remote_block_ids"]]


def test_numbers_may_be_late_while_a_load_keeps_vllm_stepping_but_are_told_in_the_last_step(
    make_site: MakeSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer, consumer = make_site("kv_producer"), make_site("kv_consumer")
    load(consumer, "d", prompt(40), producer.prefill("p", prompt(40)))
    consumer.until(lambda: consumer.stats.get("loads_in_flight") == 1)
    monkeypatch.setattr(scheduler_module, "STATS_PERIOD_S", 1000.0)
    consumer.submit("plain", prompt(40, seed=2), {"do_remote_prefill": True, "remote_port": "no port"})
    for _ in range(10):
        consumer.step()
    assert not any(key.startswith("refused_input|") for key in consumer.stats)
    consumer.worker.reports.received.add("d")
    consumer.step()
    assert consumer.stats["loads_in_flight"] == 0
    assert any(key.startswith("refused_input|") for key in consumer.stats)


def test_an_abort_while_the_pull_is_running_keeps_the_blocks_until_the_workers_report(make_site: MakeSite) -> None:
    producer, consumer = make_site("kv_producer"), make_site("kv_consumer")
    tokens = prompt(40)
    free, producer_free = consumer.blocks_free, producer.blocks_free
    load(consumer, "d", tokens, producer.prefill("p", tokens))
    consumer.abort("d")
    consumer.step()
    assert consumer.worker.aborts == ["d"]
    assert consumer.blocks_free == free - 3
    consumer.worker.reports.received.add("d")
    consumer.worker.reports.failed["d"] = FailureCause.ABORTED
    consumer.step()
    assert consumer.blocks_free == free
    assert outcomes(consumer) == {"loads|aborted|": 1}
    producer.until(lambda: producer.blocks_free == producer_free)


def test_late_and_repeated_reports_are_dropped_before_the_scheduler_sees_them(
    make_site: MakeSite, caplog: pytest.LogCaptureFixture
) -> None:
    producer, consumer = make_site("kv_producer"), make_site("kv_consumer")
    tokens = prompt(40)
    load(consumer, "d", tokens, producer.prefill("p", tokens))
    for _ in range(3):
        consumer.worker.reports.received.add("d")
        consumer.step()
    consumer.worker.reports.received.add("never")
    consumer.worker.reports.sent.add("never")
    with caplog.at_level(logging.ERROR, logger="kvlease"):
        consumer.step()
    producer.worker.reports.sent.update({"p", "never"})  # `p` is still leased
    producer.step()
    consumer.until(lambda: "d" in consumer.finished)


def test_reports_of_another_connector_are_left_alone(make_site: MakeSite) -> None:
    both = make_site("kv_both")
    output = KVConnectorOutput(finished_sending={"theirs", "ours"}, finished_recving={"theirs", "ours"})
    output.kv_connector_worker_meta = KVLeaseWorkerReport().aggregate(KVLeaseWorkerReport(reported={"ours"}))
    both.connector.update_connector_output(output)
    assert (output.finished_sending, output.finished_recving) == ({"theirs"}, {"theirs"})
    output.kv_connector_worker_meta = None
    both.connector.update_connector_output(output)
    assert (output.finished_sending, output.finished_recving) == ({"theirs"}, {"theirs"})


def test_blocks_with_a_read_still_posted_are_held_back_after_the_report(make_site: MakeSite) -> None:
    producer, consumer = make_site("kv_producer"), make_site("kv_consumer")
    tokens = prompt(40)
    free = consumer.blocks_free
    load(consumer, "d", tokens, producer.prefill("p", tokens))
    consumer.abort("d")
    reports = consumer.worker.reports
    reports.received.add("d")
    reports.failed["d"] = FailureCause.ABORTED
    reports.unsettled.add("d")
    consumer.step()
    assert consumer.blocks_free == free - 3
    assert consumer.stats["quarantined_blocks"] == 3
    assert consumer.scheduler.has_requests(), "the engine must keep stepping, or the end of the reads is never seen"
    consumer.worker.reports.settled.add("d")
    consumer.step()
    assert consumer.blocks_free == free
    assert not consumer.scheduler.has_requests()


def test_quarantine_survives_the_recompute_of_its_request(make_site: MakeSite) -> None:
    producer, consumer = make_site("kv_producer"), make_site("kv_consumer")
    tokens = prompt(40)
    free = consumer.blocks_free
    load(consumer, "d", tokens, producer.prefill("p", tokens))
    held = set(consumer.worker.loads["d"].local_blocks[0])
    reports = consumer.worker.reports
    reports.received.add("d")
    reports.failed["d"] = FailureCause.PEER_DEAD
    reports.unsettled.add("d")
    consumer.until(lambda: "d" in consumer.finished)
    assert consumer.blocks_free == free - 3
    consumer.submit("next", prompt(40, seed=9), max_tokens=8)
    consumer.step()
    (used,) = consumer.scheduler.kv_cache_manager.get_block_ids("next")
    assert len(used) == 3
    assert held.isdisjoint(used)
    consumer.abort("next")
    consumer.worker.reports.settled.add("d")
    consumer.until(lambda: consumer.blocks_free == free)


def test_a_second_load_of_the_same_request_id_is_quarantined_beside_the_first(make_site: MakeSite) -> None:
    producer, consumer = make_site("kv_producer"), make_site("kv_consumer")
    free = consumer.blocks_free
    for turn in (1, 2):
        tokens = prompt(40, seed=turn)
        load(consumer, "d", tokens, producer.prefill(f"p{turn}", tokens))
        consumer.abort("d")
        consumer.worker.reports.received.add("d")
        consumer.worker.reports.failed["d"] = FailureCause.ABORTED
        consumer.worker.reports.unsettled.add("d")
        consumer.step()
        consumer.worker.loads.clear()
        assert consumer.blocks_free == free - 3 * turn
    consumer.worker.reports.settled.add("d")
    consumer.step()
    assert consumer.blocks_free == free - 6, "which of the two has ended cannot be told"
    consumer.worker.reports.settled.add("d")
    consumer.step()
    assert consumer.blocks_free == free


# Life cycle


def test_a_reset_revokes_leases_and_fails_loads(make_site: MakeSite) -> None:
    producer, consumer = make_site("kv_producer"), make_site("kv_consumer")
    tokens = prompt(40)
    free = producer.blocks_free
    load(consumer, "d", tokens, producer.prefill("p", tokens))
    producer.prefill("p2", prompt(40, seed=3))
    assert producer.scheduler.reset_connector_cache()
    producer.until(lambda: sorted(producer.worker.ended) == ["p", "p2"])
    producer.until(lambda: producer.blocks_free == free)
    assert producer.scheduler.reset_prefix_cache(reset_connector=True)
    assert consumer.scheduler.reset_connector_cache()
    consumer.step()
    assert consumer.worker.aborts == ["d"]
    consumer.worker.reports.received.add("d")
    consumer.worker.reports.failed["d"] = FailureCause.ABORTED
    consumer.until(lambda: "d" in consumer.finished)
    assert outcomes(consumer) == {"loads|failed|reset": 1}


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_a_load_that_was_read_before_a_reset_and_told_after_it_is_not_used(make_site: MakeSite, policy: str) -> None:
    producer, consumer = make_site("kv_producer"), make_site("kv_consumer", policy=policy)
    tokens = prompt(40)
    free = consumer.blocks_free
    load(consumer, "d", tokens, producer.prefill("p", tokens))
    consumer.worker.reports.received.add("d")  # on its way while the cache is reset
    assert consumer.scheduler.reset_connector_cache()
    consumer.step()
    assert "d" not in consumer.finished
    consumer.until(lambda: "d" in consumer.finished)
    assert consumer.finished["d"] is (FinishReason.LENGTH if policy == "recompute" else FinishReason.ERROR)
    assert outcomes(consumer) == {"loads|failed|reset": 1}
    assert consumer.blocks_free == free


def test_a_handoff_from_before_a_reset_is_worth_nothing(make_site: MakeSite) -> None:
    """New weights, say: what was computed with the old ones must not be read any more."""
    producer, consumer = make_site("kv_producer"), make_site("kv_consumer")
    tokens = prompt(40)
    free = producer.blocks_free
    handoff = producer.prefill("p", tokens)
    assert not producer.scheduler.reset_prefix_cache(reset_connector=True), "vLLM cannot while blocks are lent"
    producer.until(lambda: producer.blocks_free == free)
    assert producer.scheduler.reset_prefix_cache(reset_connector=True)
    consumer.submit("d", tokens, handoff)
    consumer.until(lambda: "d" in consumer.finished)
    assert outcomes(consumer) == {"loads|failed|gone_revoked": 1}


def test_a_request_that_vllm_rejected_gives_its_lease_back(make_site: MakeSite) -> None:
    producer, consumer = make_site("kv_producer"), make_site("kv_consumer")
    free = producer.blocks_free
    handoff = producer.prefill("p", prompt(40))
    consumer.submit("rejected", [0], handoff, abort_immediately=True)
    consumer.abort("rejected")
    producer.until(lambda: producer.blocks_free == free)
    assert consumer.worker.loads == {}


def test_the_clean_up_of_a_request_with_a_bad_handoff_is_not_counted_again(make_site: MakeSite) -> None:
    consumer = make_site("kv_consumer", policy="fail")
    consumer.submit("clean-up", [0], {"do_remote_prefill": True, "remote_port": "none"}, abort_immediately=True)
    consumer.abort("clean-up")
    consumer.step()
    assert not {key for key in consumer.stats if key.startswith(("loads|", "refused_input|"))}


def test_three_samples_of_one_prompt_share_one_lease(make_site: MakeSite) -> None:
    producer, consumer = make_site("kv_producer"), make_site("kv_consumer")
    tokens = prompt(40)
    free = producer.blocks_free
    handoff = producer.prefill("p", tokens)
    for name in ("0_d", "1_d", "2_d"):
        consumer.submit(name, tokens, handoff)
    consumer.until(lambda: len(consumer.worker.loads) == 3)
    for name in ("0_d", "1_d", "2_d"):
        consumer.worker.reports.received.add(name)
    consumer.until(lambda: len(consumer.finished) == 3)
    assert producer.blocks_free == free - 3, "the workers' commits end the lease, and none was sent"


def test_a_preempted_request_computes_again_and_claims_nothing(make_site: MakeSite) -> None:
    producer, consumer = make_site("kv_producer"), make_site("kv_consumer")
    tokens = prompt(40)
    load(consumer, "d", tokens, producer.prefill("p", tokens), max_tokens=8)
    consumer.worker.reports.received.add("d")
    consumer.until(lambda: any(request.request_id == "d" for request in consumer.scheduler.running))
    consumer.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert consumer.scheduler.requests["d"].status is RequestStatus.PREEMPTED
    consumer.until(lambda: "d" in consumer.finished)
    assert list(consumer.worker.loads) == ["d"]


def test_null_and_empty_params_are_served_as_by_plain_vllm(make_site: MakeSite) -> None:
    consumer = make_site("kv_consumer")
    for index, params in enumerate([None, {}, {"do_remote_prefill": False}, {"do_remote_prefill": None}]):
        consumer.submit(f"r{index}", prompt(20, seed=index), params)
    consumer.until(lambda: len(consumer.finished) == 4)
    assert outcomes(consumer) == {}
