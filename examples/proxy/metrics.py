"""What the proxy counts. A registry of its own, so that two proxies in one process do not share counters."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter


class Metrics:
    """The proxy's counters.

    Outcomes of a prefill: handed, no_handoff, refused (4xx), server_error (5xx), unreachable, lost, timeout, cancelled.
    Reasons of a fallback: no_producer, prefill_failed, no_handoff, many_prompts, prompt_embeds, prompt_logprobs,
    beam_search.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = self._counter("requests", "requests by endpoint", "endpoint")
        self.prefills = self._counter("prefills", "calls to a producer by outcome", "outcome")
        self.fallbacks = self._counter("fallbacks", "requests a consumer served without a handoff, by reason", "reason")
        self.upstream_errors = self._counter("upstream_errors", "failed upstream calls", "role", "cause")
        self.cancels = self._counter("cancels", "requests whose client left, by stage", "stage")

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"kvlease_proxy_{name}", text, labels, registry=self.registry)
