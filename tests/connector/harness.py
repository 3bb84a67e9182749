"""vLLM's real ``Scheduler`` with the real connector, endpoint and leaser; only the model and the workers are scripted.

A :class:`Site` is one engine without its workers: each :meth:`Site.step` schedules, lets the scripted worker see the
orders, and feeds its reports back, as vLLM's core loop does.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", DO_NOT_TRACK="1", VLLM_CPU_KVCACHE_SPACE="1")

import torch
from transformers import LlamaConfig
from vllm.config import KVTransferConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from kvlease.connector.connector import KVLeaseConnector
from kvlease.connector.metadata import KVLeaseMetadata, KVLeaseWorkerReport
from kvlease.connector.metrics import METRICS
from kvlease.core.ids import PeerKey
from kvlease.core.orders import LoadOrder, Orders, Reports

BLOCK_SIZE = 16
PATIENCE_S = 20.0
_hash = sha256
init_none_hash(_hash)


class ScriptedWorker:
    """Stands where the workers stand: sees every order, and reports what the test tells it to."""

    def __init__(self) -> None:
        self.loads: dict[str, LoadOrder] = {}
        self.aborts: list[str] = []
        self.ended: list[str] = []
        self.reports = Reports()
        self.gives_back = True
        self.leases_live = 0
        self.may_rest = False
        self.greeted: list[PeerKey] = []

    def take(self, orders: Orders) -> None:
        for order in orders.loads:
            assert order.doomed or order.load not in self.loads, "one load was ordered twice"
            self.loads[order.load] = order
            if order.doomed is not None:
                self.reports.received.add(order.load)
                self.reports.failed[order.load] = order.doomed
        self.aborts += orders.aborts
        self.ended += orders.ended
        self.leases_live = orders.leases_live
        self.may_rest = orders.may_rest
        self.greeted += orders.greet
        if self.gives_back:
            self.reports.sent.update(orders.ended)

    def output(self) -> KVConnectorOutput:
        reports, self.reports = self.reports, Reports()
        return KVConnectorOutput(
            finished_sending=set(reports.sent),
            finished_recving=set(reports.received),
            failed_recving=set(reports.failed),
            kv_connector_worker_meta=KVLeaseWorkerReport(
                failed=dict(reports.failed),
                unsettled=dict.fromkeys(reports.unsettled, 1),
                settled=dict.fromkeys(reports.settled, 1),
                reported={*reports.sent, *reports.received},
            ),
        )


class Site:
    """One engine: vLLM's scheduler, our connector, a scripted worker."""

    def __init__(
        self,
        model: Path,
        role: str,
        *,
        policy: str = "recompute",
        num_blocks: int = 64,
        engine: dict[str, Any] | None = None,
        **knobs: Any,
    ) -> None:
        self.config = engine_config(model, role, policy, knobs, engine)
        kv_cache = kv_cache_config(num_blocks)
        self.config.cache_config.num_gpu_blocks = num_blocks
        self.scheduler = Scheduler(
            self.config, kv_cache, StructuredOutputManager(self.config), block_size=BLOCK_SIZE, log_stats=True
        )
        self.connector = self.ours(self.scheduler.connector)
        self.worker = ScriptedWorker()
        self.finished: dict[str, Any] = {}
        self.handoffs: dict[str, dict[str, Any] | None] = {}
        self.stats: dict[str, float] = {}
        self._hasher = get_request_block_hasher(BLOCK_SIZE, _hash)

    def ours(self, connector: Any) -> KVLeaseConnector:
        """Our connector in vLLM's scheduler."""
        assert isinstance(connector, KVLeaseConnector)
        return connector

    def orders_in(self, metadata: Any) -> Orders:
        """Our orders in one step's metadata."""
        assert isinstance(metadata, KVLeaseMetadata)
        return metadata.orders

    def workers_output(self) -> KVConnectorOutput:
        """What all workers reported in one step."""
        return self.worker.output()

    @property
    def pool(self) -> Any:
        return self.scheduler.kv_cache_manager.block_pool

    @property
    def blocks_free(self) -> int:
        return int(self.pool.get_num_free_blocks())

    def submit(
        self,
        name: str,
        tokens: Sequence[int],
        params: Any = None,
        *,
        max_tokens: int = 1,
        prompt_logprobs: int | None = None,
        **more: Any,
    ) -> Request:
        sampling = SamplingParams(
            max_tokens=max_tokens, prompt_logprobs=prompt_logprobs, extra_args={"kv_transfer_params": params}
        )
        sampling.update_from_generation_config({}, 1)
        request = Request(
            request_id=name, prompt_token_ids=list(tokens), sampling_params=sampling, pooling_params=None,
            block_hasher=self._hasher, **more,
        )  # fmt: skip
        self.scheduler.add_request(request)
        return request

    def step(self) -> Any:
        """One turn of the core loop; every request whose prompt is computed samples token 7."""
        scheduled = self.scheduler.schedule()
        self.finish_step(scheduled)
        return scheduled

    def finish_step(self, scheduled: Any) -> None:
        """What the workers answer to ``scheduled``, and what the scheduler makes of it."""
        self.worker.take(self.orders_in(scheduled.kv_connector_metadata))
        req_ids = list(scheduled.num_scheduled_tokens)
        output = ModelRunnerOutput(
            req_ids=req_ids,
            req_id_to_index={name: index for index, name in enumerate(req_ids)},
            sampled_token_ids=[self._sample(name) for name in req_ids],
            kv_connector_output=self.workers_output(),
        )
        outputs = self.scheduler.update_from_output(scheduled, output)
        for batch in outputs.values():
            if batch.scheduler_stats is not None:
                self.count(batch.scheduler_stats.kv_connector_stats or {})
            for one in batch.outputs:
                if one.finish_reason is not None:
                    self.finished[one.request_id] = one.finish_reason
                    self.handoffs[one.request_id] = one.kv_transfer_params

    def until(self, done: Callable[[], bool]) -> None:
        """Step until ``done``; the connector's threads need a moment, so time is the limit and not a count."""
        give_up = time.monotonic() + PATIENCE_S
        while not done():
            assert time.monotonic() < give_up, "the awaited state was not reached"
            self.step()
            time.sleep(0.001)  # as long as an engine's step at least; the connector's threads share this interpreter

    def prefill(self, name: str, tokens: Sequence[int], **more: Any) -> dict[str, Any]:
        """Serve one producer request and return its handoff."""
        self.submit(name, tokens, {"do_remote_decode": True, "do_remote_prefill": False}, **more)
        self.until(lambda: name in self.finished)
        handoff = self.handoffs[name]
        assert handoff is not None
        return handoff

    def abort(self, name: str) -> None:
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def close(self) -> None:
        self.connector.shutdown()

    def count(self, samples: dict[str, Any]) -> None:
        """One step's numbers."""
        for key, value in samples.items():
            is_gauge = METRICS[key.partition("|")[0]].is_gauge
            self.stats[key] = value if is_gauge else self.stats.get(key, 0) + value

    def _sample(self, name: str) -> list[int]:
        # num_computed_tokens was already advanced by schedule()
        request = self.scheduler.requests.get(name)
        return [7] if request is not None and request.num_computed_tokens >= request.num_tokens else []


def prompt(length: int, seed: int = 1) -> list[int]:
    return [(seed * 7919 + index * 31) % 900 for index in range(length)]


@cache
def _tiny_model(folder: Path) -> str:
    LlamaConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        vocab_size=1000, max_position_embeddings=4096, architectures=["LlamaForCausalLM"],
    ).save_pretrained(folder)  # fmt: skip
    return str(folder)


def kv_cache_config(num_blocks: int) -> KVCacheConfig:
    spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=2, head_size=32, dtype=torch.bfloat16)
    return KVCacheConfig(
        num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer.0"], spec)]
    )


def engine_config(
    model: Path,
    role: str,
    policy: str = "recompute",
    knobs: dict[str, Any] | None = None,
    engine: dict[str, Any] | None = None,
) -> VllmConfig:
    arguments: dict[str, Any] = {
        "model": _tiny_model(model),
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "block_size": BLOCK_SIZE,
        "enforce_eager": True,
        "max_model_len": 1024,
        "max_num_seqs": 8,
        "async_scheduling": False,
        "enable_prefix_caching": True,
        "kv_transfer_config": KVTransferConfig(
            kv_connector="KVLeaseConnector",
            kv_connector_module_path="kvlease.connector",
            kv_role=role,
            kv_load_failure_policy=policy,
            kv_connector_extra_config={
                "host": "127.0.0.1",
                "port": 0,
                "acquire_timeout_s": PATIENCE_S / 2,
                **(knobs or {}),
            },
        ),
    }
    config = EngineArgs(**{**arguments, **(engine or {})}).create_engine_config()
    wants_async = (engine or {}).get("async_scheduling", False)  # which vLLM may turn off here
    config.scheduler_config.async_scheduling = wants_async
    return config
