"""What the documents list is what the code has."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from kvlease.config import Settings
from kvlease.core.loads import FailureCause

ROOT = Path(__file__).parents[1]
FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef


def first_cells(page: str) -> set[str]:
    """The names in backticks in the first column of every table of a page."""
    rows = [line for line in (ROOT / page).read_text().splitlines() if line.startswith("| `")]
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row.split("|")[1])}


def test_the_readme_lists_every_knob() -> None:
    assert set(Settings.__struct_fields__) <= first_cells("README.md")


def test_every_cause_is_explained() -> None:
    assert {cause.value for cause in FailureCause} <= first_cells("docs/metrics.md")


def named_tests(page: str) -> list[tuple[str, str]]:
    """Each test a page names as ``tests/FILE.py::TEST``, as file and function; a class in between is not looked at."""
    found = re.findall(r"`(tests/[\w/]+\.py)::(?:\w+::)*(\w+)`", (ROOT / page).read_text())
    return sorted(set(found))


def functions_in(file: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, FUNCTION)}


@pytest.mark.parametrize(("file", "name"), named_tests("docs/field-reports.md"))
def test_every_test_that_is_named_exists(file: str, name: str) -> None:
    assert (ROOT / file).is_file()
    assert name in functions_in(ROOT / file)


def test_every_row_of_the_fault_suite_that_is_named_exists() -> None:
    page = (ROOT / "docs/field-reports.md").read_text()
    named = {row.replace("-", "_") for row in re.findall(r"`make faults ROW=([\w-]+)`", page)}
    assert named
    assert named <= {name for file in (ROOT / "tests" / "faults").glob("*.py") for name in functions_in(file)}


def test_every_report_says_where_it_stands_and_what_shows_it() -> None:
    lines = (ROOT / "docs/field-reports.md").read_text().splitlines()
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in lines if re.match(r"\| [A-H]\d+ \|", line)
    ]
    names = [row[0] for row in rows]
    assert len(names) == len(set(names)) > 70
    for name, _, _, stands, shown in rows:
        assert stands in {"covered", "cannot happen", "partly open", "open"}, name
        assert "`tests/" in shown or stands in {"cannot happen", "open"}, name
        assert ("Open:" in shown) is ("open" in stands), name
