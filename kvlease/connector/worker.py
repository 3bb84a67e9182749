"""The worker half as vLLM sees it: vLLM's side of :mod:`kvlease.worker`, which itself imports no vLLM.

It turns vLLM's configuration and KV-cache tensors into the plain data that :class:`kvlease.worker.worker.WorkerHalf`
works with, and its reports into vLLM's classes.
"""

from __future__ import annotations

import hashlib
import json
import logging
from typing import TYPE_CHECKING, Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

from kvlease.config import Settings
from kvlease.connector.metadata import KVLeaseHandshake, KVLeaseWorkerReport
from kvlease.connector.stats import KVLeaseStats, StatsDelta
from kvlease.core.compat import fingerprint
from kvlease.core.ids import EngineId, Rank
from kvlease.core.messages import PROTOCOL_VERSION
from kvlease.core.orders import Orders, Reports
from kvlease.net.lifeline import Lifeline
from kvlease.worker.regions import LayerSpec, Region, find_regions
from kvlease.worker.worker import WorkerHalf

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("kvlease.worker")

_VOLATILE_MODEL_KEYS: Final = frozenset(
    {"_name_or_path", "transformers_version", "torch_dtype", "dtype", "architectures", "use_cache", "output_attentions"}
)
"""Keys of a model's configuration that change without changing what its KV holds."""


class WorkerFacade:
    """What one vLLM worker process does about KV transfers."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, settings: Settings) -> None:
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._settings = settings
        self._half: WorkerHalf | None = None
        self._lifeline: Lifeline | None = None
        self._factors: dict[str, str] = {}
        self._stats = StatsDelta()
        self._reports = Reports()
        self._may_rest = False

    def register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Register the KV cache with NIXL and start the transfer thread."""
        group = self._kv_cache_config.kv_cache_groups[0]
        spec = group.kv_cache_spec
        layers = {
            name: LayerSpec(group=0, num_pages=self._kv_cache_config.num_blocks, page_bytes=spec.page_size_bytes)
            for name in group.layer_names
        }
        layout = find_regions(kv_caches, layers)
        self._factors = compat_factors(self._vllm_config, spec, kv_caches, layout.regions)
        self._half = WorkerHalf(
            settings=self._settings,
            engine_id=EngineId(self._vllm_config.kv_transfer_config.engine_id),
            rank=Rank(get_tensor_model_parallel_rank()),
            of_ranks=self._vllm_config.parallel_config.tensor_parallel_size,
            factors=self._factors,
            fingerprint=fingerprint(self._factors),
        )
        self._half.register(layout, block_sizes=[spec.block_size])
        self._lifeline = Lifeline()

    def handshake(self) -> KVLeaseHandshake | None:
        """What the endpoint tells peers about this rank; None before :meth:`register`."""
        if self._half is None or self._lifeline is None:
            return None
        return KVLeaseHandshake(
            self._half.rank_info(), self._factors, self._lifeline.address, self._half.hasher_address()
        )

    def take_orders(self, orders: Orders) -> None:
        """Queue this step's orders for the transfer thread."""
        if self._half is not None:
            self._half.take_orders(orders)
        self._may_rest = orders.may_rest

    def take_results(self) -> KVConnectorTransferResults:
        """This rank's reports since the last step; what belongs beside them waits for :meth:`take_report`."""
        if self._may_rest and self._half is not None:
            self._half.rest()
        self._may_rest = False
        self._reports = self._half.take_reports() if self._half is not None else Reports()
        return KVConnectorTransferResults(
            finished_sending=set(self._reports.sent),
            finished_recving=set(self._reports.received),
            failed_recving=set(self._reports.failed),
        )

    def take_report(self) -> KVLeaseWorkerReport | None:
        """What belongs beside the results just taken: causes, and blocks still being written to. None beside none."""
        reports, self._reports = self._reports, Reports()
        if not (reports.received or reports.sent or reports.settled):
            return None
        return KVLeaseWorkerReport(
            failed=reports.failed,
            unsettled=dict.fromkeys(reports.unsettled, 1),
            settled=dict.fromkeys(reports.settled, 1),
            reported={*reports.received, *reports.sent},
        )

    def take_stats(self) -> KVLeaseStats | None:
        """What was counted since the last step."""
        return self._stats.take(self._half.take_stats()) if self._half is not None else None

    def shutdown(self) -> None:
        """First make the endpoint stop vouching for our pages, then unregister them."""
        if self._lifeline is not None:
            if not self._lifeline.sever():
                logger.error(
                    "the endpoint did not let go of our pages in time; leases of this engine cannot be trusted"
                )
            self._lifeline = None
        if self._half is not None:
            self._half.shutdown()
            self._half = None


def compat_factors(
    vllm_config: Any, spec: Any, kv_caches: dict[str, torch.Tensor], regions: list[Region]
) -> dict[str, str]:
    """What must be equal on two engines that read each other's pages; see :mod:`kvlease.core.compat`.

    The model's path is left out on purpose: the same model under two paths is the same model.
    """
    model = vllm_config.model_config
    return {
        "protocol": str(PROTOCOL_VERSION),
        "architecture": ",".join(getattr(model, "architectures", None) or []),
        "model_config": _model_digest(model),
        "model_dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "kv_cache_dtype": str(spec.dtype),
        "block_size": str(spec.block_size),
        "tp_size": str(vllm_config.parallel_config.tensor_parallel_size),
        "num_regions": str(len(regions)),
        "page_bytes": ",".join(str(size) for size in sorted({region.len_bytes for region in regions})),
        "kv_layout": _page_layout(next(iter(kv_caches.values())), regions[0].num_pages),
    }


def _page_layout(kv_cache: torch.Tensor, num_pages: int) -> str:
    """How a page is laid out inside: its dimensions (the one that counts pages by its kernel blocks in a page), and
    their order in memory, outermost first.
    """
    pages_dim = next((at for at, size in enumerate(kv_cache.shape) if size % num_pages == 0), 0)
    sizes = [f"pages*{size // num_pages}" if at == pages_dim else str(size) for at, size in enumerate(kv_cache.shape)]
    strides: tuple[int, ...] = tuple(kv_cache.stride())
    order = sorted(range(kv_cache.ndim), key=lambda at: strides[at], reverse=True)
    return f"({', '.join(sizes)}) in order {order}"


def _model_digest(model: Any) -> str:
    """16 hex digits of the model's text configuration, without what does not change its KV."""
    config = {key: value for key, value in model.hf_text_config.to_dict().items() if key not in _VOLATILE_MODEL_KEYS}
    return hashlib.blake2b(json.dumps(config, sort_keys=True, default=str).encode(), digest_size=8).hexdigest()
