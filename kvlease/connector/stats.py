"""Counters and gauges on their way from both halves to vLLM's ``/metrics``.

vLLM carries a connector's numbers as one plain dict from each engine step to its logger process. Ours is flat:
``"name"`` or ``"name|label value"`` to a number. Counters are what was added since the last batch, gauges are the
latest value. Everything here is total: an unknown, empty or odd entry is skipped, because a metrics path that raises
takes an API server down.
"""

from __future__ import annotations

from typing import Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvlease.connector.metrics import METRICS, Metric, Samples, is_gauge

_PREFIX: Final = "vllm:kvlease_"


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
            self.data[key] = max(mine, value) if is_gauge(key) else mine + value
        return self

    def reduce(self) -> dict[str, int | float]:
        """What the periodic log line shows."""
        numbers = {key: value for key, value in sorted(self.data.items()) if isinstance(value, int | float) and value}
        return {key.replace("|", ":"): round(value, 3) for key, value in numbers.items()}

    def is_empty(self) -> bool:
        """Whether there is nothing to publish."""
        return not self.data


class StatsDelta:
    """Turns the samples of several sources into the batch since the last call.

    It is asked in many engine steps: a source that gives the very object it gave the last time has nothing new, and is
    not looked into.
    """

    def __init__(self) -> None:
        self._last: list[Samples] = []

    def take(self, *sources: Samples) -> KVLeaseStats | None:
        """What changed since the last call, which named as many sources in the same order; None when nothing did.

        A counter that several sources have is the sum of theirs.
        """
        batch: dict[str, float] = {}
        self._last += [{}] * (len(sources) - len(self._last))
        for index, samples in enumerate(sources):
            last = self._last[index]
            if samples is not last:
                _add_changes(batch, last, samples)
                self._last[index] = samples
        return KVLeaseStats(data=batch) if batch else None


def _add_changes(batch: dict[str, float], last: Samples, samples: Samples) -> None:
    for key, value in samples.items():
        before = last.get(key)
        if value != before and (metric := METRICS.get(key.partition("|")[0])) is not None:
            batch[key] = value if metric.is_gauge else batch.get(key, 0) + value - (before or 0)


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
