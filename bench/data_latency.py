"""What a small pull and an abort wait for while a large pull is under way."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial

from bench.data_pair import LOOK_S, WAIT_S, Blocks, DataPair, contiguous, data_pair, scattered
from bench.output import Table
from bench.timing import repeat, spread
from kvlease.core.ids import LoadId
from kvlease.core.loads import FailureCause

BOUND_MS = 50.0
_NUM_BLOCKS = 2048
_SMALL: Blocks = {2050: 5}


def behind(rounds: int) -> Iterator[Table]:
    """One block while 2 GiB are being pulled from the same producer, and alone."""
    table = Table("One block behind 2 GiB", ["blocks of the large pull", "alone ms", "behind ms"], f"< {BOUND_MS} ms")
    medians = []
    with data_pair() as pair:
        for name, large in _large(pair).items():
            alone = repeat(partial(_alone_ms, pair), rounds)
            found = repeat(partial(_behind_ms, pair, large), rounds)
            medians.append(found.median)
            table.add(name, alone, found)
    table.is_met = max(medians) < BOUND_MS
    yield table


def abort(rounds: int) -> Iterator[Table]:
    """From the order to abort to the report, and how much was read after that order."""
    table = Table("Abort of 2 GiB", ["blocks", "until reported ms", "read after MiB"], f"< {BOUND_MS} ms")
    medians = []
    with data_pair() as pair:
        for name, large in _large(pair).items():
            after: list[float] = []
            found = repeat(partial(_abort_ms, pair, large, after), rounds)
            medians.append(found.median)
            table.add(name, found, spread(after))
    table.is_met = max(medians) < BOUND_MS
    yield table


def _large(pair: DataPair) -> dict[str, Blocks]:
    return {"contiguous": contiguous(_NUM_BLOCKS), "scattered": scattered(_NUM_BLOCKS, pair.shape.blocks)}


def _begin(pair: DataPair, large: Blocks) -> LoadId:
    """Order a large pull and wait until some of it is here."""
    order, read = pair.order(large), _read_bytes(pair)
    pair.consumer.take(order)
    pair.consumer.wait(lambda: _read_bytes(pair) > read, WAIT_S, LOOK_S)
    return order.load


def _behind_ms(pair: DataPair, large: Blocks) -> float:
    small = pair.order(_SMALL)
    load = _begin(pair, large)
    began = time.perf_counter()
    pair.consumer.take(small)
    pair.wait_for(small)
    took_s = time.perf_counter() - began
    assert load not in pair.consumer.reports.received, "the large pull was over too soon to be in the way"
    pair.consumer.take(aborts=(load,))
    pair.consumer.wait_for(load, timeout_s=WAIT_S)
    return took_s * 1e3


def _alone_ms(pair: DataPair) -> float:
    return pair.pull_s(_SMALL) * 1e3


def _abort_ms(pair: DataPair, large: Blocks, after: list[float]) -> float:
    load = _begin(pair, large)
    read = _read_bytes(pair)
    began = time.perf_counter()
    pair.consumer.take(aborts=(load,))
    pair.consumer.wait_for(load, timeout_s=WAIT_S, step_s=LOOK_S)
    took_s = time.perf_counter() - began
    assert pair.consumer.reports.failed[load] is FailureCause.ABORTED
    pair.pull_s(_SMALL)  # the numbers are published a little later than the report
    after.append((_read_bytes(pair) - read) / (1 << 20))
    return took_s * 1e3


def _read_bytes(pair: DataPair) -> float:
    return pair.consumer.half.take_stats().get("bytes_pulled", 0.0)
