"""The three envelopes in which vLLM carries our data between its scheduler process and its workers.

They cross vLLM's own local channel, never the network between engines.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvlease.connector.reports import WorkerReport
from kvlease.core.messages import RankInfo
from kvlease.core.orders import Orders
from kvlease.net.hashing import HasherAddress
from kvlease.net.lifeline import LifelineAddress


@dataclass
class KVLeaseMetadata(KVConnectorMetadata):
    """Scheduler half to worker halves, with each step."""

    orders: Orders = field(default_factory=Orders)


@dataclass
class KVLeaseHandshake(KVConnectorHandshakeMetadata):
    """Worker half to scheduler half, once at start-up: what the endpoint tells peers about this rank."""

    info: RankInfo
    factors: dict[str, str]
    lifeline: LifelineAddress
    hasher: HasherAddress | None = None


@dataclass
class KVLeaseWorkerReport(WorkerReport, KVConnectorWorkerMetadata):
    """Worker halves to scheduler half, with each step."""
