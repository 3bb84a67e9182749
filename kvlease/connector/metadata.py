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
from vllm.v1.outputs import KVConnectorOutput

from kvlease.core.ids import LoadId
from kvlease.core.loads import FailureCause
from kvlease.core.messages import RankInfo
from kvlease.core.orders import Orders
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


@dataclass
class KVLeaseWorkerReport(KVConnectorWorkerMetadata):
    """Worker halves to scheduler half, with each step: why loads failed, and whose blocks may still be written to.

    ``unsettled`` and ``settled`` count ranks. ``reported`` are the ids that a rank reported as sent or received: beside
    another connector (``MultiConnector``) the step's output has ids of others, too, and those are not ours to judge.
    """

    failed: dict[LoadId, FailureCause] = field(default_factory=dict)
    unsettled: dict[LoadId, int] = field(default_factory=dict)
    settled: dict[LoadId, int] = field(default_factory=dict)
    reported: set[str] = field(default_factory=set)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVLeaseWorkerReport:
        """Join another rank's report; the first cause stands."""
        if isinstance(other, KVLeaseWorkerReport):
            self.failed = {**other.failed, **self.failed}
            self.reported |= other.reported
            for mine, theirs in ((self.unsettled, other.unsettled), (self.settled, other.settled)):
                for load, ranks in theirs.items():
                    mine[load] = mine.get(load, 0) + ranks
        return self


def reported_by_us(output: KVConnectorOutput) -> set[str]:
    """Which of the ids in ``output`` come from our own workers; an id is reported when its last rank reports it."""
    report = output.kv_connector_worker_meta
    return report.reported if isinstance(report, KVLeaseWorkerReport) else set()
