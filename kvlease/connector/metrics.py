"""The metrics by name, and the flat keys under which their samples travel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


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
    "commits": Metric("Readers that committed to this producer on all their ranks."),
    "lease_ends": Metric("Leases that ended on this producer, by reason.", ("why",)),
    "refused_claims": Metric(
        "Claims and commits this producer answered Gone, and greetings it refused, by reason.", ("why",)
    ),
    "refused_input": Metric("Messages and handoffs refused as malformed, by reason.", ("reason",)),
    "endpoint_events": Metric("Other events at this producer's endpoint, by kind.", ("kind",)),
    "loads": Metric("Loads of this consumer by outcome and cause; once for each request.", ("outcome", "cause")),
    "pulls": Metric("Chunks of KV posted to NIXL by this consumer's workers, summed over ranks."),
    "bytes_pulled": Metric("Bytes of KV pulled by this consumer's workers, summed over ranks."),
    "descriptors_pulled": Metric("Pages of KV posted to NIXL by this consumer's workers, summed over ranks."),
    "pull_seconds": Metric("Seconds from a load's first post to its last byte, summed over loads and ranks."),
    "checksums": Metric("Loads whose bytes this consumer compared, by result; once for each rank.", ("result",)),
    "bytes_checked": Metric("Bytes of KV whose checksums this consumer's workers compared, summed over ranks."),
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


Samples = Mapping[str, float]
"""Monotonic counters and current gauges by flat key (see :func:`metric_key`), never changed once they are given out."""


def metric_key(name: str, *labels: str) -> str:
    """The flat key of a sample: ``name|label|label``."""
    return "|".join((name, *labels))


def is_gauge(key: str) -> bool:
    """Whether the sample with this flat key is a gauge; an unknown one is not."""
    metric = METRICS.get(key.partition("|")[0])
    return metric is not None and metric.is_gauge
