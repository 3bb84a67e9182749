"""The measurements run: those that take moments are run once, all can be named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.data import MEASUREMENTS, main
from bench.data_pair import contiguous, nine_in_ten, scattered
from kvlease.core.runs import block_runs


def test_planning_is_measured_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["plan", "--rounds", "1", "--json", str(tmp_path / "out.json")])
    assert "Plan of a million tokens" in capsys.readouterr().out
    (table,) = json.loads((tmp_path / "out.json").read_text())["tables"]
    assert [row["blocks"] for row in table["rows"]] == ["contiguous", "nine in ten follow", "scattered"]


def test_an_unknown_name_is_refused_with_those_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plam"])
    said = capsys.readouterr().err.split("plam: unknown", 1)[1]
    assert all(name in said for name in MEASUREMENTS)


def test_blocks_lie_as_they_are_said_to() -> None:
    assert len(block_runs(list(contiguous(1000)))) == 1
    assert 90 <= len(block_runs(list(nine_in_ten(1000, 2000)))) <= 100
    assert len(block_runs(list(scattered(1000, 2000)))) > 900


@pytest.mark.parametrize("blocks", [contiguous(1000), nine_in_ten(1000, 2000), scattered(1000, 2000)])
def test_no_block_is_read_twice_and_none_is_block_0(blocks: dict[int, int]) -> None:
    assert len(blocks) == len(set(blocks.values())) == 1000
    assert 0 not in blocks
    assert 0 not in blocks.values()
