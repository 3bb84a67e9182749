"""An engine's `/metrics` as numbers, and the names of those that we look at."""

from collections import defaultdict
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

KV_USAGE = "vllm:kv_cache_usage_perc"
"""Used share of the KV blocks, 0 to 1."""
RUNNING = "vllm:num_requests_running"
TTFT_SUM_S = "vllm:time_to_first_token_seconds_sum"
"""Seconds from an engine's receipt of a request to its first token, summed over requests."""
PREFIX_HIT_TOKENS = "vllm:prefix_cache_hits_total"
BYTES_PULLED = "vllm:kvlease_bytes_pulled_total"
LOADS = "vllm:kvlease_loads_total"
"""Loads by `outcome` and `cause`."""


@dataclass(frozen=True)
class Metrics:
    """One reading of `/metrics`: (labels, value) by sample name."""

    samples: dict[str, list[tuple[dict[str, str], float]]]

    @classmethod
    def parse(cls, text: str) -> "Metrics":
        """Reads the Prometheus text format."""
        samples: dict[str, list[tuple[dict[str, str], float]]] = defaultdict(list)
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                samples[sample.name].append((dict(sample.labels), float(sample.value)))
        return cls(dict(samples))

    def total(self, name: str, **labels: str) -> float:
        """The sum of the samples of `name` whose labels include `labels`; 0 when there is none."""
        wanted = labels.items()
        return sum(value for have, value in self.samples.get(name, ()) if wanted <= have.items())

    def by_label(self, name: str, label: str) -> dict[str, float]:
        """The sums of `name` for each value of `label`."""
        sums: dict[str, float] = defaultdict(float)
        for labels, value in self.samples.get(name, ()):
            sums[labels.get(label, "")] += value
        return dict(sums)
