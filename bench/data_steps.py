"""What the engine's thread pays at every step while many loads are in flight."""

from __future__ import annotations

import time
from collections.abc import Iterator

from bench.data_pair import WAIT_S, contiguous, data_pair
from bench.output import Table
from bench.timing import Spread, spread
from kvlease.core.orders import Orders

BOUND_US = 100.0
STEP_S = 0.002
"""A short decode step: what the engine's thread does between two calls of ours."""

_LOADS = (0, 1, 32, 256)
_BLOCKS_EACH = 64


def steps(rounds: int) -> Iterator[Table]:
    """Orders in, reports and numbers out, as the connector does once in each step; ``rounds`` times twenty steps."""
    table = Table("Worker hooks in one step", ["loads in flight", "all hooks us", "steps"], f"< {BOUND_US} us")
    worst = 0.0
    with data_pair() as pair:
        for num_loads in _LOADS:
            orders = [pair.order(contiguous(_BLOCKS_EACH, 1 + (i * _BLOCKS_EACH) % 1900)) for i in range(num_loads)]
            pair.consumer.take(*orders)
            took: list[float] = []
            ends_at = time.perf_counter() + WAIT_S
            done: set[str] = set()
            while len(took) < 20 * rounds and (not num_loads or len(done) < num_loads // 4 + 1):
                time.sleep(STEP_S)
                began = time.perf_counter()
                pair.consumer.half.take_orders(Orders())
                reports = pair.consumer.half.take_reports()
                pair.consumer.half.take_stats()
                took.append((time.perf_counter() - began) * 1e6)
                done |= reports.received
                pair.consumer.reports.received |= reports.received
                assert time.perf_counter() < ends_at
            pair.wait_for(*orders)
            found: Spread = spread(took)
            worst = max(worst, found.median)
            table.add(num_loads, found, len(took))
    table.is_met = worst < BOUND_US
    yield table
