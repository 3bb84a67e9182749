"""Counters and gauges on their way from both halves to vLLM's ``/metrics``.

vLLM carries a connector's numbers as one plain dict from each engine step to its logger process. Ours is flat:
``"name"`` or ``"name|label value"`` to a number. Counters are what was added since the last batch, gauges are the
latest value. Everything here is total: an unknown, empty or odd entry is skipped, because a metrics path that raises
takes an API server down.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

_PREFIX: Final = "vllm:kvlease_"


@dataclass(frozen=True)
class Metric:
    """One Prometheus family: ``labels`` are the names of the parts after the first ``|`` of its keys."""

    help: str
    labels: tuple[str, ...] = ()
    is_gauge: bool = False


METRICS: Final[dict[str, Metric]] = {
    "grants": Metric("Leases granted by this producer."),
    "acquires": Metric("Claims of a lease that this producer granted to a reader."),
    "renewals": Metric("Renew messages this producer honoured; each renews all that one consumer holds."),
    "commits": Metric("Commits answered Committed by this producer, one for each reader and rank."),
    "lease_ends": Metric("Leases that ended on this producer, by reason.", ("why",)),
    "refused_claims": Metric(
        "Claims and commits this producer answered Gone, and greetings it refused, by reason.", ("why",)
    ),
    "refused_input": Metric("Messages and handoffs refused as malformed, by reason.", ("reason",)),
    "endpoint_events": Metric("Other events at this producer's endpoint, by kind.", ("kind",)),
    "loads": Metric("Loads of this consumer by outcome and cause; once for each request.", ("outcome", "cause")),
    "pulls": Metric("Chunks of KV posted to NIXL by this consumer's workers, summed over ranks."),
    "bytes_pulled": Metric("Bytes of KV pulled by this consumer's workers, summed over ranks."),
    "descriptors_pulled": Metric("NIXL descriptors posted by this consumer's workers, summed over ranks."),
    "pull_seconds": Metric("Seconds from a load's first post to its last byte, summed over loads and ranks."),
    "channel_events": Metric("Resends, drops and other events of this consumer's channels, by kind.", ("kind",)),
    "leases_held": Metric("Leases this producer has out: their blocks are not free.", is_gauge=True),
    "oldest_lease_age_seconds": Metric("Age of the oldest lease this producer has out.", is_gauge=True),
    "tombstones": Metric("Ended leases this producer still remembers.", is_gauge=True),
    "endpoint_up": Metric("1 while this producer grants leases and answers for them.", is_gauge=True),
    "loads_in_flight": Metric("Loads of this consumer that are not yet reported.", is_gauge=True),
    "quarantined_blocks": Metric(
        "Blocks of this consumer held back because a posted read may still write to them.", is_gauge=True
    ),
    "peers": Metric(
        "Producers this consumer's workers know, by state (the rank that knows most).", ("state",), is_gauge=True
    ),
}
"""Every metric kvlease publishes. Counters appear in ``/metrics`` with ``_total`` appended."""


def metric_key(name: str, *labels: str) -> str:
    """The flat key of a sample: ``name|label|label``."""
    return "|".join((name, *labels))


def _is_gauge(key: str) -> bool:
    metric = METRICS.get(key.partition("|")[0])
    return metric is not None and metric.is_gauge


class KVLeaseStats(KVConnectorStats):
    """One batch of samples, as vLLM passes them about."""

    def reset(self) -> None:
        """Forget all samples."""
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVLeaseStats:
        """Join another half's or rank's batch: counters add up, of gauges the larger value stands."""
        for key, value in other.data.items():
            if not isinstance(value, int | float):
                continue
            mine = self.data.get(key, 0)
            self.data[key] = max(mine, value) if _is_gauge(key) else mine + value
        return self

    def reduce(self) -> dict[str, int | float]:
        """What the periodic log line shows."""
        numbers = {key: value for key, value in sorted(self.data.items()) if isinstance(value, int | float) and value}
        return {key.replace("|", ":"): round(value, 3) for key, value in numbers.items()}

    def is_empty(self) -> bool:
        """Whether there is nothing to publish."""
        return not self.data


class StatsDelta:
    """Turns monotonic counters and current gauges into the batch since the last call."""

    def __init__(self) -> None:
        self._last: dict[str, float] = {}

    def take(self, samples: dict[str, float]) -> KVLeaseStats | None:
        """The changed part of ``samples`` (flat keys, see :func:`metric_key`), or None when nothing changed."""
        changed: dict[str, float] = {}
        for key, value in samples.items():
            last = self._last.get(key)
            if value != last and key.partition("|")[0] in METRICS:
                changed[key] = value if _is_gauge(key) else value - (last or 0)
        self._last.update(samples)
        return KVLeaseStats(data=changed) if changed else None


class KVLeasePromMetrics(KVConnectorPromMetrics):
    """The Prometheus families of one API server process."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._families = {name: self._family(name, metric, labelnames) for name, metric in METRICS.items()}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Publish one batch."""
        engine_labels = self.per_engine_labelvalues.get(engine_idx)
        if engine_labels is None:
            return
        for key, value in transfer_stats_data.items():
            name, *labels = key.split("|")
            metric = METRICS.get(name)
            if metric is None or len(labels) != len(metric.labels) or not isinstance(value, int | float):
                continue
            sample = self._families[name].labels(*engine_labels, *labels)
            if metric.is_gauge:
                sample.set(value)
            elif value > 0:
                sample.inc(value)

    def _family(self, name: str, metric: Metric, labelnames: list[str]) -> Any:
        names = [*labelnames, *metric.labels]
        if metric.is_gauge:
            return self._gauge_cls(
                name=_PREFIX + name, documentation=metric.help, labelnames=names, multiprocess_mode="mostrecent"
            )
        return self._counter_cls(name=_PREFIX + name, documentation=metric.help, labelnames=names)
