"""From findings to files, and from files to the page: nothing is lost on the way, and equal data give equal files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench import plots, report, results
from bench.measure import Findings, Measurement
from bench.output import Table
from bench.results import Result
from bench.timing import spread

MACHINE = {
    "at": "2026-01-02T03:04:05Z",
    "cpu": "a CPU",
    "cpus": 2,
    "load": [0.5, 0, 0],
    "memory_gib": 24.0,
    "packages": {"nixl": "1.5.1", "absent": None},
    "python": "3.11.9",
}


def result(findings: Findings, part: str = "plan") -> Result:
    return Result(
        part=part, title="A title", commit="abc", quick=False, took_s=61.0, machine=MACHINE, findings=findings
    )


def findings() -> Findings:
    table = Table("Plans", ["blocks", "bare ms", "ours ms"], "< 5 ms")
    table.add("few", spread([1.0, 2.0, 3.0]), spread([2.0, 3.0, 4.0]))
    table.add("many", spread([2.0]), spread([3.0]))
    table.is_met = True
    good = Measurement(name="good", value=1.0, unit="ms", target="≤ 2 ms", at_most=2, beside={"B": 4.0})
    bad = Measurement(name="bad", value=3.0, unit="ms", target="≤ 2 ms", at_most=2, spread=(2.5, 3.5))
    return Findings(measurements=[good, bad], tables=[table], samples={"raw": [1.0, float("nan")]}, about="Words.\n")


def kept(tmp_path: Path) -> Result:
    results.write(result(findings()), tmp_path)
    [read] = results.read_all(["never run", "plan"], tmp_path)
    return read


def test_what_is_kept_says_the_same(tmp_path: Path) -> None:
    read = kept(tmp_path)
    assert [one.met for one in read.findings.measurements] == [True, False]
    assert read.findings.tables[0].rows[0]["ours ms"] == {"median": 3.0, "low": 2.0, "high": 4.0, "count": 3}
    assert read.findings.samples == {"raw": [1.0, None]}


def test_the_verdict_counts_measurements_and_tables(tmp_path: Path) -> None:
    assert report.verdict([kept(tmp_path)]) == "bench: 2/3 targets met"


def test_the_page_has_every_number_and_names_what_was_missed(tmp_path: Path) -> None:
    page = report.page([kept(tmp_path)], {"plan": ["plots/plan-plans.svg"]})
    assert "| bad | 3.00 ms (2.50 .. 3.50) |  | ≤ 2 ms | no |" in page
    assert "| good | 1.00 ms | B 4.00 | ≤ 2 ms | yes |" in page
    assert "| few | 2.00 (1.00 .. 3.00) | 3.00 (2.00 .. 4.00) |" in page
    assert "![plan-plans](plots/plan-plans.svg)" in page
    assert "Words." in page
    assert "absent" not in page


def test_equal_data_give_equal_pictures(tmp_path: Path) -> None:
    read = kept(tmp_path)
    [first] = plots.draw(read, tmp_path / "plots")
    content = first.read_bytes()
    [second] = plots.draw(read, tmp_path / "plots")
    assert second.name == "plan-plans.svg"
    assert second.read_bytes() == content


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.01234, "0.0123"),
        (1.234, "1.23"),
        (45.67, "45.7"),
        (123.4, "123"),
        (12345, "12,345"),
        (None, "none"),
    ],
)
def test_numbers_have_three_digits_that_count(value: Any, text: str) -> None:
    assert report.number(value) == text
