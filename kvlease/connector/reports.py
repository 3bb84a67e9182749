"""What the worker halves report beside vLLM's own sets of finished ids, and which of those ids are ours to judge."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvlease.core.ids import LoadId
from kvlease.core.loads import FailureCause

if TYPE_CHECKING:
    from vllm.v1.outputs import KVConnectorOutput

    from kvlease.connector.producer import ProducerHalf

logger = logging.getLogger("kvlease.scheduler")


@dataclass
class WorkerReport:
    """Worker halves to scheduler half, with each step: why loads failed, and whose blocks may still be written to.

    ``unsettled`` and ``settled`` count ranks. ``reported`` are the ids that a rank reported as sent or received: beside
    another connector (``MultiConnector``) the step's output has ids of others, too, and those are not ours to judge.
    """

    failed: dict[LoadId, FailureCause] = field(default_factory=dict)
    unsettled: dict[LoadId, int] = field(default_factory=dict)
    settled: dict[LoadId, int] = field(default_factory=dict)
    reported: set[str] = field(default_factory=set)

    def aggregate(self, other: Any) -> Any:
        """Join another rank's report; the first cause stands."""
        if isinstance(other, WorkerReport):
            self.failed = {**other.failed, **self.failed}
            self.reported |= other.reported
            for mine, theirs in ((self.unsettled, other.unsettled), (self.settled, other.settled)):
                for load, ranks in theirs.items():
                    mine[load] = mine.get(load, 0) + ranks
        return self


def reported_by_us(output: KVConnectorOutput) -> set[str]:
    """Which of the ids in ``output`` come from our own workers; an id is reported when its last rank reports it."""
    report: object = output.kv_connector_worker_meta
    return report.reported if isinstance(report, WorkerReport) else set()


def keep_sent(sent: set[str], ours: set[str], producer: ProducerHalf | None) -> None:
    """Drop from ``sent``, in place, what is ``ours`` and no ended lease on its way back: vLLM asserts on that."""
    stale = (sent & ours) - (producer.returning if producer else set())
    if stale:
        logger.error("dropped %d stale reports of sent requests: %s", len(stale), sorted(stale)[:8])
        sent -= stale
    if producer is not None:
        producer.have_returned(sent)
