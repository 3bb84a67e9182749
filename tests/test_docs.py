"""What the documents list is what the code has."""

from __future__ import annotations

import re
from pathlib import Path

from kvlease.config import Settings
from kvlease.core.loads import FailureCause

ROOT = Path(__file__).parents[1]


def first_cells(page: str) -> set[str]:
    """The names in backticks in the first column of every table of a page."""
    rows = [line for line in (ROOT / page).read_text().splitlines() if line.startswith("| `")]
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row.split("|")[1])}


def test_the_readme_lists_every_knob() -> None:
    assert set(Settings.__struct_fields__) <= first_cells("README.md")


def test_every_cause_is_explained() -> None:
    assert {cause.value for cause in FailureCause} <= first_cells("docs/metrics.md")
