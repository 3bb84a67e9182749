"""Medians and spreads are what they say, and pairs are taken in turn."""

from __future__ import annotations

import json
import threading
import time
from functools import partial
from pathlib import Path

from rich.console import Console

from bench.output import Table, show, write_json
from bench.timing import Clocked, Spread, alternate, alternate_both, measured_by, repeat, spread, thread_clock, timed


def test_a_spread_is_the_median_and_the_middle_eight_tenths() -> None:
    assert spread([3.0]) == Spread(3.0, 3.0, 3.0, 1)
    assert spread(range(11)) == Spread(5, 1, 9, 11)
    assert spread([4, 1, 2, 3]).median == 2.5


def test_warm_ups_do_not_count() -> None:
    values = iter([99.0, 1.0, 2.0, 3.0])
    assert repeat(lambda: next(values), rounds=3) == Spread(2.0, 1.0, 3.0, 3)


def test_pairs_are_measured_in_turn_and_compared_round_by_round() -> None:
    order: list[str] = []

    def measure(name: str, value: float) -> float:
        order.append(name)
        return value * len(order)

    found = alternate(lambda: measure("a", 2.0), lambda: measure("b", 1.0), rounds=2, warm_up=0)
    assert order == ["a", "b", "b", "a"]
    assert (found.a.median, found.b.median) == ((2 + 8) / 2, (2 + 3) / 2)
    assert found.ratio.median == (2 / 2 + 8 / 3) / 2


def test_clocks_are_read_around_what_counts() -> None:
    now = 0.0

    def measure(by: float) -> float:
        nonlocal now
        now += by
        return 2 * by

    one, other = (Clocked(partial(measure, by), lambda: now) for by in (3.0, 1.0))
    assert measured_by(one, rounds=3) == (spread([6.0] * 3), spread([3.0] * 3))
    said, ran = alternate_both(one, other, rounds=3)
    assert (said.ratio, ran.ratio) == (spread([3.0] * 3), spread([3.0] * 3))
    assert (said.a.median, ran.a.median) == (6.0, 3.0)


def test_a_thread_has_a_clock_of_its_own() -> None:
    end = threading.Event()
    thread = threading.Thread(target=end.wait, name="waiting")
    thread.start()
    clock = thread_clock("waiting")
    before = clock()
    sum(range(100_000))
    assert clock() - before < time.thread_time()
    end.set()
    thread.join()


def test_what_takes_no_time_takes_none() -> None:
    assert 0 <= timed(lambda: None)() < 1


def test_a_table_is_printed_with_its_verdict_and_written_as_json(tmp_path: Path) -> None:
    table = Table("Pulls", ["what", "ms"], "at most 3 ms", is_met=True)
    table.add("contiguous", spread([0.001, 0.002, 0.003]))
    console = Console(record=True, width=80)
    show(table, console)
    text = console.export_text()
    assert "contiguous" in text
    assert "at most 3 ms: met" in text
    write_json([table], tmp_path / "out.json")
    content = json.loads((tmp_path / "out.json").read_text())
    assert content["tables"][0]["rows"] == [
        {"what": "contiguous", "ms": {"median": 0.002, "low": 0.001, "high": 0.003, "count": 3}}
    ]
    assert content["machine"]["cpus"] >= 1
