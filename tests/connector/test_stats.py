"""The metrics path: it adds up, and nothing that comes in can make it raise."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm")

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector, MultiKVConnectorStats

from kvlease.connector.connector import KVLeaseConnector, NixlConnector
from kvlease.connector.metrics import METRICS
from kvlease.connector.stats import KVLeasePromMetrics, KVLeaseStats, StatsDelta
from kvlease.plugin import register
from tests.test_docs import first_cells


def test_counters_come_as_what_was_added_and_gauges_as_they_are() -> None:
    delta = StatsDelta()
    first = delta.take({"grants": 3, "leases_held": 2})
    assert first is not None
    assert first.data == {"grants": 3, "leases_held": 2}
    assert delta.take({"grants": 3, "leases_held": 2}) is None
    second = delta.take({"grants": 5, "leases_held": 0})
    assert second is not None
    assert second.data == {"grants": 2, "leases_held": 0}


class ReadOnce(dict[str, float]):
    """Samples that may be looked into a single time."""

    was_read = False

    def items(self) -> Any:
        assert not self.was_read, "samples that did not change were looked into again"
        self.was_read = True
        return super().items()


def test_a_source_that_gives_the_same_object_again_is_not_looked_into() -> None:
    delta, quiet = StatsDelta(), ReadOnce(grants=3)
    assert delta.take(quiet, {"commits": 1}) is not None
    second = delta.take(quiet, {"commits": 3})
    assert second is not None
    assert second.data == {"commits": 2}


def test_what_two_sources_count_under_one_name_adds_up() -> None:
    delta = StatsDelta()
    first = delta.take({"refused_input|malformed": 2}, {"refused_input|malformed": 5})
    assert first is not None
    assert first.data == {"refused_input|malformed": 7}
    second = delta.take({"refused_input|malformed": 2}, {"refused_input|malformed": 6})
    assert second is not None
    assert second.data == {"refused_input|malformed": 1}


def test_names_that_are_no_metric_are_left_out() -> None:
    assert StatsDelta().take({"private_number": 1}) is None


def test_batches_of_halves_and_ranks_add_up() -> None:
    one = KVLeaseStats(data={"pulls": 1, "peers|ready": 2})
    one.aggregate(KVLeaseStats(data={"pulls": 2, "peers|ready": 1, "loads|done|": 1, "odd": "text"}))
    assert one.data == {"pulls": 3, "peers|ready": 2, "loads|done|": 1}
    assert one.reduce() == {"loads:done:": 1, "peers:ready": 2, "pulls": 3}
    one.reset()
    assert one.is_empty()


class _Config:
    kv_transfer_config = None


def prom(registry: CollectorRegistry) -> KVLeasePromMetrics:
    def bound(kind: type) -> Any:
        return lambda **kwargs: kind(**kwargs, registry=registry)

    types: Any = {kind: bound(kind) for kind in (Gauge, Counter, Histogram)}
    return KVLeasePromMetrics(_Config(), types, ["engine"], {0: ["0"]})


def test_every_metric_is_published_under_its_name() -> None:
    registry = CollectorRegistry()
    metrics = prom(registry)
    metrics.observe({"|".join([name, *("x" for _ in metric.labels)]): 1 for name, metric in METRICS.items()})
    text = generate_latest(registry).decode()
    for name, metric in METRICS.items():
        sample = f"vllm:kvlease_{name}" + ("" if metric.is_gauge else "_total")
        assert f"{sample}{{" in text, sample


@pytest.mark.parametrize(
    "junk", [{}, {"": 1}, {"x": 1}, {"grants": "x"}, {"grants": -1}, {"grants|a|b": 1}, {"loads": 1}]
)
def test_odd_batches_are_skipped(junk: dict[str, Any]) -> None:
    metrics = prom(CollectorRegistry())
    metrics.observe(junk)
    metrics.observe(junk, engine_idx=7)
    assert KVLeaseConnector.build_kv_connector_stats(junk).reduce() is not None


def test_no_batch_is_an_empty_batch() -> None:
    assert KVLeaseConnector.build_kv_connector_stats(None).is_empty()


def test_every_metric_is_explained() -> None:
    documented = {name.partition("{")[0].removesuffix("_total") for name in first_cells("docs/metrics.md")}
    assert METRICS.keys() <= documented


def test_whatever_name_it_was_chosen_by_our_numbers_are_read_by_our_own_class() -> None:
    """``MultiConnector`` carries each child's numbers under its class's name, and finds the class by it again."""
    register()
    for chosen in (KVLeaseConnector, NixlConnector):
        stats = MultiConnector.build_kv_connector_stats({chosen.__name__: {"grants": 2}})
        assert isinstance(stats, MultiKVConnectorStats)
        assert stats.reduce() == {chosen.__name__: {"grants": 2}}
