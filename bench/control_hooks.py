"""What kvlease costs vLLM's scheduler thread: the time in all of its hooks, per engine step, with loads in flight.

vLLM's real ``Scheduler`` drives the real connector with its endpoint and leaser threads; only the model and the workers
are scripted. Three situations:

- *pulling*: every load waits for its workers;
- *queued*: vLLM has no room for the requests, and asks about the first of them in every step;
- *turnover*: in every step some loads arrive and as many are received, so that every hook has work and every counter
  changes; ``get_num_new_matched_tokens`` then waits for the claims' round trip.
"""

from __future__ import annotations

import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, Final

from vllm.v1.outputs import KVConnectorOutput

from bench.output import Table
from bench.timing import spread
from tests.connector.harness import BLOCK_SIZE, ScriptedWorker, Site, prompt

STEP_BOUND_US: Final = 50.0

HOOKS: Final = (
    "on_new_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "get_kv_connector_stats",
    "request_finished_all_groups",
    "has_pending_block_frees",
    "has_pending_push_work",
    "take_events",
)
"""What vLLM's scheduler calls, in each step or for each request."""

_PROMPT_TOKENS: Final = 8 * BLOCK_SIZE
_MODEL_S: Final = 0.002
_KNOBS: Final[dict[str, Any]] = {"lease_duration_s": 600.0, "tombstone_max": 1000}


class _Worker(ScriptedWorker):
    """Takes its time, as a model does, and leaves the interpreter to others meanwhile."""

    def output(self) -> KVConnectorOutput:
        time.sleep(_MODEL_S)
        return super().output()


class HookClock:
    """Times every hook of a connector by name, in microseconds; the cost of looking at the clock is taken off."""

    def __init__(self, connector: Any) -> None:
        self._spent_ns: Counter[str] = Counter()
        self._calls: Counter[str] = Counter()
        self._overhead_ns = min(-(time.perf_counter_ns() - time.perf_counter_ns()) for _ in range(1000))
        for name in HOOKS:
            setattr(connector, name, self._timed(name, getattr(connector, name)))

    def take(self) -> tuple[dict[str, float], Counter[str]]:
        """Microseconds and calls by hook since the last taking."""
        spent, calls = {name: ns / 1000 for name, ns in self._spent_ns.items()}, self._calls
        self._spent_ns, self._calls = Counter(), Counter()
        return spent, calls

    def _timed(self, name: str, hook: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter_ns()
            try:
                return hook(*args, **kwargs)
            finally:
                self._spent_ns[name] += time.perf_counter_ns() - start - self._overhead_ns
                self._calls[name] += 1

        return timed


def measure_hooks(loads: int, steps: int, turnover: int = 4) -> Table:
    """All situations with ``loads`` in flight; in *turnover* so many come and go in each step."""
    table = Table(
        f"time in all scheduler hooks per step, us; {loads} loads in flight",
        ("situation", "hook", "calls per step", "us per step"),
        f"all hooks, pulling and queued: median < {STEP_BOUND_US:.0f} us",
    )
    table.is_met = True
    with tempfile.TemporaryDirectory() as folder:
        for situation, changing in (("pulling", 0), ("queued", 0), (f"turnover of {turnover}", turnover)):
            with _two_sites(Path(folder), loads, queued=situation == "queued") as (producer, consumer):
                taken = _steps(producer, consumer, loads, steps, changing)
            median_us = _add(table, situation, taken)
            table.is_met &= changing > 0 or median_us < STEP_BOUND_US
    return table


@contextmanager
def _two_sites(folder: Path, loads: int, *, queued: bool) -> Iterator[tuple[Site, Site]]:
    blocks_each = _PROMPT_TOKENS // BLOCK_SIZE + 1
    room = {"max_num_seqs": 2 * loads, "max_num_batched_tokens": 1 << 20}
    producer = Site(folder, "kv_producer", num_blocks=100_000, engine=room, **_KNOBS)
    consumer = Site(folder, "kv_both", num_blocks=8 if queued else 2 * loads * blocks_each, engine=room, **_KNOBS)
    consumer.worker = _Worker()
    try:
        yield producer, consumer
    finally:
        consumer.close()
        producer.close()


def _steps(
    producer: Site, consumer: Site, loads: int, steps: int, changing: int
) -> list[tuple[dict[str, float], Counter[str]]]:
    names = count()
    warm_up = steps // 10
    handoffs = [_prefilled(producer, index) for index in range(loads + (warm_up + steps) * changing)]
    handoffs.reverse()

    def arrive() -> None:
        index, handoff = next(names), handoffs.pop()
        consumer.submit(f"d{index}", prompt(_PROMPT_TOKENS, seed=index), handoff)

    for _ in range(loads):
        arrive()
    for _ in range(warm_up):
        consumer.step()
    clock = HookClock(consumer.connector)
    taken = []
    for _ in range(steps):
        for _ in range(changing):
            arrive()
        for name in list(consumer.worker.loads)[:changing]:
            consumer.worker.reports.received.add(consumer.worker.loads.pop(name).load)
        consumer.step()
        taken.append(clock.take())
    return taken


def _prefilled(producer: Site, index: int) -> dict[str, Any]:
    return producer.prefill(f"p{index}", prompt(_PROMPT_TOKENS, seed=index))


def _add(table: Table, situation: str, taken: list[tuple[dict[str, float], Counter[str]]]) -> float:
    by_hook: dict[str, list[float]] = defaultdict(list)
    calls: Counter[str] = Counter()
    for spent, called in taken:
        calls += called
        for name in HOOKS:
            by_hook[name].append(spent.get(name, 0.0))
    total = spread([sum(spent.values()) for spent, _ in taken])
    table.add(situation, "all", round(calls.total() / len(taken), 1), total)
    for name in HOOKS:
        if calls[name]:
            table.add(situation, name, round(calls[name] / len(taken), 1), spread(by_hook[name]))
    return total.median
