"""``KVLeaseConnector``: the class that vLLM instantiates in its scheduler process and in each worker process.

Every hook is one line of delegation to the half that lives in the process, so that this file is a map of vLLM's hooks
and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)

from kvlease.config import parse_settings
from kvlease.connector.logs import join_vllm_logging
from kvlease.connector.metadata import KVLeaseHandshake, KVLeaseMetadata, KVLeaseWorkerReport
from kvlease.connector.scheduler import SchedulerHalf
from kvlease.connector.stats import KVLeasePromMetrics, KVLeaseStats
from kvlease.connector.support import check_supported, warn_of_logged_requests
from kvlease.connector.worker import WorkerFacade

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


class KVLeaseConnector(KVConnectorBase_V1, SupportsHMA):
    """Prefill/decode handoffs as leases, verified before they are used."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        join_vllm_logging()
        settings = parse_settings(vllm_config.kv_transfer_config.kv_connector_extra_config)
        check_supported(vllm_config, kv_cache_config)
        self._scheduler: SchedulerHalf | None = None
        self._worker: WorkerFacade | None = None
        if role is KVConnectorRole.SCHEDULER:
            warn_of_logged_requests(vllm_config)
            self._scheduler = SchedulerHalf(vllm_config, kv_cache_config, settings)
        else:
            self._worker = WorkerFacade(vllm_config, kv_cache_config, settings)

    # Both halves

    def get_kv_connector_stats(self) -> KVLeaseStats | None:
        """What was counted since numbers were last told; None where there is nothing new, or it is too soon."""
        if self._scheduler is not None:
            return self._scheduler.take_stats()
        return self._worker_half.take_stats()

    def shutdown(self) -> None:
        """Let go of everything: leases are revoked before memory is unregistered."""
        if self._scheduler is not None:
            self._scheduler.shutdown()
        if self._worker is not None:
            self._worker.shutdown()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVLeaseStats:
        """A batch of samples from its plain form."""
        return KVLeaseStats(data=dict(data or {}))

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVLeasePromMetrics:
        """The Prometheus families for ``/metrics``."""
        return KVLeasePromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # Worker half

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Register the KV cache with NIXL and start the transfer thread."""
        self._worker_half.register(kv_caches)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """What the endpoint tells peers about this rank."""
        return self._worker_half.handshake()

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Queue this step's orders for the transfer thread, before the model runs; what follows it comes too late."""
        super().bind_connector_metadata(connector_metadata)
        if isinstance(connector_metadata, KVLeaseMetadata):
            self._worker_half.take_orders(connector_metadata.orders)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Nothing to start: pulls began when the orders came."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: a load is complete before its request is scheduled."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing to save: consumers read from the KV cache itself."""

    def wait_for_save(self) -> None:
        """Nothing to wait for."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """This rank's reports since the last step."""
        return self._worker_half.take_results()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """The same reports for vLLM versions without :meth:`get_transfer_results`."""
        results = self._worker_half.take_results()
        return results.finished_sending, results.finished_recving

    def build_connector_worker_meta(self) -> KVLeaseWorkerReport | None:
        """Causes of failures and blocks still being written to, beside the reports of the same step."""
        return self._worker_half.take_report()

    # Scheduler half

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        """Every rank's handshake metadata, after start-up."""
        self._scheduler_half.introduce(
            {rank: info for rank, info in metadata.items() if isinstance(info, KVLeaseHandshake)}
        )

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        """The pool that a quarantine takes references on."""
        self._scheduler_half.bind_pool(gpu_block_pool)

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        """A load fills the blocks of every transferred group."""
        return tuple(self._kv_cache_config.transfer_group_ids)

    def on_new_request(self, request: Request) -> None:
        """A request arrived."""
        self._scheduler_half.admit(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens to load from outside."""
        return self._scheduler_half.match(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Blocks were allocated."""
        self._scheduler_half.dispatch(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """This step's orders to the workers."""
        return KVLeaseMetadata(self._scheduler_half.take_orders(scheduler_output.total_num_scheduled_tokens))

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """The workers' reports, before the scheduler acts on them."""
        self._scheduler_half.take_reports(connector_output)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """A request finished (single group)."""
        return self._scheduler_half.finish(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request finished: whether its blocks stay, and the handoff."""
        return self._scheduler_half.finish(request, block_ids)

    def has_pending_block_frees(self) -> bool:
        """Whether an ended lease's blocks are on their way back, so that preempting would be hasty."""
        return self._scheduler_half.is_returning

    def has_pending_push_work(self) -> bool:
        """Whether the engine must keep stepping for us although it has no requests: while blocks are quarantined."""
        return self._scheduler_half.is_quarantining

    def take_events(self) -> Iterable[Any]:
        """No KV cache events."""
        return ()

    def reset_cache(self) -> bool | None:
        """Revoke all leases and fail all loads."""
        return self._scheduler_half.reset()

    @property
    def supports_sleep_mode(self) -> bool:
        """Not yet: leased pages may not move."""
        return False

    @property
    def _scheduler_half(self) -> SchedulerHalf:
        assert self._scheduler is not None, "a scheduler-side hook was called on the worker-side connector"
        return self._scheduler

    @property
    def _worker_half(self) -> WorkerFacade:
        assert self._worker is not None, "a worker-side hook was called on the scheduler-side connector"
        return self._worker


NixlConnector = KVLeaseConnector
"""The same class under the name that Dynamo and parts of vLLM look for; no class of its own, because ``MultiConnector``
finds the class that reads our numbers by its name.
"""
