"""Full pools, full queues, steps under way, on vLLM's real scheduler: all goes on, and nothing is taken early."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("vllm")

from vllm.v1.engine import FinishReason

from tests.connector.harness import PATIENCE_S, prompt

if TYPE_CHECKING:
    from tests.connector.harness import Site

MakeSite = Callable[..., "Site"]
SHORT = {"heartbeat_interval_s": 0.1, "lease_extension_s": 0.3}
"""Scripted workers commit nothing: what was read is given back when its claim runs out."""


def test_loads_that_do_not_end_keep_nobody_else_from_running(make_site: MakeSite) -> None:
    producer = make_site("kv_producer")
    consumer = make_site("kv_consumer", engine={"max_num_seqs": 4})
    for index in range(6):
        tokens = prompt(40, seed=index)
        consumer.submit(f"d{index}", tokens, producer.prefill(f"p{index}", tokens))
    consumer.until(lambda: len(consumer.worker.loads) == 6)
    consumer.submit("plain", prompt(40, seed=9))
    consumer.until(lambda: "plain" in consumer.finished)
    consumer.until(lambda: consumer.stats.get("loads_in_flight") == 6)
    consumer.worker.reports.received.update(consumer.worker.loads)
    consumer.until(lambda: len(consumer.finished) == 7)
    assert consumer.stats["loads_in_flight"] == 0


def test_a_request_that_does_not_fit_keeps_no_finished_load_behind_it(make_site: MakeSite) -> None:
    """``first`` waits for an answer while ``second`` gets its blocks; then ``first`` needs more than is left."""
    producer = make_site("kv_producer")
    consumer = make_site("kv_consumer", num_blocks=16, acquire_timeout_s=0.5)
    big, small = prompt(220), prompt(40, seed=2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        handoff = producer.prefill("p-first", big)
        consumer.submit("first", big, {**handoff, "remote_port": silent.getsockname()[1]})
        consumer.submit("second", small, producer.prefill("p-second", small))
        consumer.until(lambda: "second" in consumer.worker.loads)
        consumer.until(lambda: consumer.stats.get("loads|failed|acquire_timeout") == 1)
        assert consumer.blocks_free == 12, "of which `first` needs 14"
        consumer.worker.reports.received.add("second")
        consumer.until(lambda: len(consumer.finished) == 2)
    assert list(consumer.finished) == ["second", "first"]


def test_twenty_requests_drain_through_pools_that_hold_a_few(make_site: MakeSite) -> None:
    producer = make_site("kv_producer", num_blocks=24, **SHORT)
    consumer = make_site("kv_consumer", num_blocks=24, engine={"max_model_len": 128}, **SHORT)
    free = producer.blocks_free, consumer.blocks_free
    prompts = {f"p{index}": prompt(40, seed=index) for index in range(20)}
    for name, tokens in prompts.items():
        producer.submit(name, tokens, {"do_remote_decode": True})
    reported: set[str] = set()
    give_up = time.monotonic() + PATIENCE_S
    while len(consumer.finished) < len(prompts) or (producer.blocks_free, consumer.blocks_free) != free:
        assert time.monotonic() < give_up, (producer.finished, consumer.finished)
        producer.step()
        for name, handoff in producer.handoffs.items():
            assert handoff is not None
            consumer.submit(name, prompts[name], handoff, max_tokens=60)
        producer.handoffs.clear()
        consumer.step()
        consumer.worker.reports.received.update(consumer.worker.loads.keys() - reported)
        reported.update(consumer.worker.loads)
        time.sleep(0.001)
    assert set(consumer.finished.values()) == {FinishReason.LENGTH}


def test_a_block_that_a_step_under_way_still_writes_goes_to_no_load(make_site: MakeSite) -> None:
    """With asynchronous scheduling a request can end while a step of it is under way: its blocks wait for that step."""
    producer = make_site("kv_producer")
    consumer = make_site("kv_consumer", num_blocks=40, engine={"async_scheduling": True})
    consumer.submit("writes", prompt(320), max_tokens=600)
    tokens = prompt(400, seed=2)
    consumer.submit("d", tokens, producer.prefill("p", tokens))
    consumer.until(lambda: consumer.stats.get("channel_events|received", 0) >= 1)
    step_under_way = consumer.scheduler.schedule()
    assert "writes" in step_under_way.num_scheduled_tokens
    consumer.abort("writes")
    next_step = consumer.scheduler.schedule()
    assert consumer.orders_in(next_step.kv_connector_metadata).loads == []
    consumer.finish_step(step_under_way)
    consumer.finish_step(next_step)
    consumer.until(lambda: "d" in consumer.worker.loads)
