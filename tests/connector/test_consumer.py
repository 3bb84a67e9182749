"""What a consumer does with loads that fail, on one rank or all, and with requests that a load cannot serve."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("vllm")

from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from kvlease.connector import consumer as consumer_module
from kvlease.core.loads import FailureCause
from kvlease.net.leaser import Leaser
from tests.connector.harness import PATIENCE_S, ScriptedWorker, Site, prompt

if TYPE_CHECKING:
    MakeSite = Callable[..., "Site"]


@pytest.mark.parametrize("num_logprobs", [0, 5])
def test_a_prompt_that_is_to_be_reported_on_is_computed_here_and_its_lease_given_back(
    make_site: MakeSite, num_logprobs: int
) -> None:
    """Log-probabilities of the prompt exist only where it is computed."""
    producer, consumer = make_site("kv_producer"), make_site("kv_consumer")
    tokens = prompt(40)
    free = producer.blocks_free
    consumer.submit("d", tokens, producer.prefill("p", tokens), prompt_logprobs=num_logprobs)
    consumer.until(lambda: "d" in consumer.finished)
    assert consumer.worker.loads == {}
    producer.until(lambda: producer.blocks_free == free)


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_nothing_unproven_is_found_in_the_prefix_cache(make_site: MakeSite, policy: str) -> None:
    producer, consumer = make_site("kv_producer"), make_site("kv_consumer", policy=policy)
    tokens = prompt(40)
    consumer.submit("d", tokens, producer.prefill("p", tokens))
    consumer.until(lambda: "d" in consumer.worker.loads)
    consumer.submit("meanwhile", [*tokens[:32], 1])
    assert consumer.step().num_scheduled_tokens == {"meanwhile": 33}
    consumer.scheduler.reset_prefix_cache(reset_running_requests=False)  # refused while the load holds blocks
    consumer.worker.reports.received.add("d")
    consumer.worker.reports.failed["d"] = FailureCause.GONE_EXPIRED
    if policy == "recompute":
        consumer.step()
        assert consumer.step().num_scheduled_tokens == {"d": 40 - 32}, "32 were computed here, by `meanwhile`"
    consumer.until(lambda: "d" in consumer.finished)
    other = prompt(40, seed=2)
    consumer.submit("e", other, producer.prefill("q", other))
    consumer.until(lambda: "e" in consumer.worker.loads)
    consumer.abort("e")
    consumer.worker.reports.received.add("e")
    consumer.worker.reports.failed["e"] = FailureCause.ABORTED
    consumer.step()
    consumer.submit("after", other)
    assert consumer.step().num_scheduled_tokens == {"after": 40}


# The time of a round trip


def test_a_claim_that_is_answered_soon_has_its_pull_ordered_in_the_step_it_arrived_for(
    make_site: MakeSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consumer_module, "CLAIM_WAIT_S", PATIENCE_S)
    producer, consumer = make_site("kv_producer"), make_site("kv_consumer")
    tokens = [prompt(40, seed=seed) for seed in (1, 2, 3)]
    for index, handoff in enumerate([producer.prefill(f"p{index}", one) for index, one in enumerate(tokens)]):
        consumer.submit(f"d{index}", tokens[index], handoff)
    consumer.step()
    assert list(consumer.worker.loads) == ["d0", "d1", "d2"]


def test_a_producer_that_does_not_answer_in_time_is_not_waited_for_again_and_others_are(
    make_site: MakeSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    real = Leaser.wait

    def wait(self: Leaser, timeout_s: float) -> bool:
        waits.append(timeout_s)
        return real(self, timeout_s)

    monkeypatch.setattr(Leaser, "wait", wait)
    producer, consumer = make_site("kv_producer"), make_site("kv_consumer")
    tokens = prompt(40)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silenced = {**producer.prefill("p-silent", tokens), "remote_port": silent.getsockname()[1]}
        for name in ("first", "second"):
            monkeypatch.setattr(consumer_module, "CLAIM_WAIT_S", 1.0)
            consumer.submit(name, tokens, silenced)
            consumer.step()
            assert len(waits) == 1
            monkeypatch.setattr(consumer_module, "CLAIM_WAIT_S", PATIENCE_S)
            good = f"good {name}"
            consumer.submit(good, tokens, producer.prefill(good, tokens))
            consumer.step()
            assert good in consumer.worker.loads
            waits = waits[:1]
        consumer.abort("first")
        consumer.abort("second")


class TwoRanks(Site):
    """One engine with two workers; vLLM's own aggregator joins what they report."""

    def __init__(self, model: Path, role: str, **more: Any) -> None:
        super().__init__(model, role, **more)
        self.ranks = [self.worker, ScriptedWorker()]
        self._aggregator = KVOutputAggregator(2)

    def workers_output(self) -> KVConnectorOutput:
        outputs = [
            ModelRunnerOutput(req_ids=[], req_id_to_index={}, kv_connector_output=worker.output())
            for worker in self.ranks
        ]
        joined = self._aggregator.aggregate(outputs)
        assert joined is not None
        assert joined.kv_connector_output is not None
        return joined.kv_connector_output


@pytest.mark.parametrize("first", [0, 1], ids=["the good rank first", "the bad rank first"])
def test_what_one_of_two_ranks_could_not_read_has_failed_once_and_on_both(
    make_site: MakeSite, tiny_model: Path, first: int
) -> None:
    producer, consumer = make_site("kv_producer"), TwoRanks(tiny_model, "kv_consumer")
    tokens = prompt(40)
    free = consumer.blocks_free
    consumer.submit("d", tokens, producer.prefill("p", tokens))
    consumer.until(lambda: "d" in consumer.worker.loads)
    for rank in (first, 1 - first):
        assert consumer.blocks_free == free - 3
        assert "d" not in consumer.finished
        reports = consumer.ranks[rank].reports
        reports.received.add("d")
        if rank == 1:
            reports.failed["d"] = FailureCause.TRANSFER
        consumer.step()
    consumer.until(lambda: "d" in consumer.finished and consumer.blocks_free == free)
    assert {key: count for key, count in consumer.stats.items() if key.startswith("loads|")} == {
        "loads|failed|transfer": 1
    }
    consumer.close()
