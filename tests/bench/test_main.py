"""The command: parts by name, results kept, and nothing of the repository touched by a quick run."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench import __main__ as command
from bench import results
from bench.measure import Findings, Measurement, Show
from bench.output import Table

MISSED = Measurement(name="slow", value=3.0, unit="ms", target="≤ 2 ms", at_most=2.0)


def one(rounds: int) -> Table:
    table = Table("One", ["what", "value"], "< 9", is_met=rounds < 9)
    table.add("rounds", rounds)
    return table


def several(rounds: int) -> Iterator[Table]:
    yield one(rounds)
    yield one(rounds)


def other(quick: bool, show: Show) -> Findings:
    show("other", 1.0, "done")
    return Findings(measurements=[MISSED])


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The command with three parts of ours, writing to a folder of ours."""
    parts = {
        "one": command.Part("One", __name__, "one", {"rounds": 7}, {"rounds": 3}),
        "several": command.Part("Several", __name__, "several", {"rounds": 7}, {"rounds": 3}),
        "other": command.Part("Other", __name__, "other"),
    }
    monkeypatch.setattr(command, "PARTS", parts)
    monkeypatch.setattr(command, "ROOT", tmp_path)
    monkeypatch.setattr(command, "PAGE", tmp_path / "benchmarks.md")
    monkeypatch.setattr(command, "PLOTS_DIR", tmp_path / "plots")
    monkeypatch.setattr(command, "QUICK_RESULTS_DIR", tmp_path / "quick")
    monkeypatch.setattr(results, "RESULTS_DIR", tmp_path / "results")
    return tmp_path


def test_a_missed_target_is_no_error(folders: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([]) == 0
    shown = capsys.readouterr().out
    assert "missed: other: slow: 3.00 ms, target ≤ 2 ms" in shown
    assert shown.splitlines()[-1] == "bench: 3/4 targets met"
    assert (folders / "benchmarks.md").read_text().count("## ") >= 3


def test_named_parts_leave_the_results_of_others_alone(folders: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command.main([])
    before = (folders / "results" / "other.json").read_bytes()
    assert command.main(["one"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "bench: 1/1 targets met"
    assert (folders / "results" / "other.json").read_bytes() == before
    assert "Other" in (folders / "benchmarks.md").read_text()


def test_a_quick_run_writes_nothing_that_is_kept(folders: Path) -> None:
    assert command.main(["--quick", "several"]) == 0
    assert [path.name for path in folders.iterdir()] == ["quick"]


def test_the_page_alone_can_be_written_again(folders: Path) -> None:
    command.main(["one"])
    page = (folders / "benchmarks.md").read_text()
    (folders / "benchmarks.md").unlink()
    assert command.main(["--page"]) == 0
    assert (folders / "benchmarks.md").read_text() == page


def test_an_unknown_part_is_named(folders: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["nonsense"])
    assert "nonsense: unknown" in capsys.readouterr().err


@pytest.mark.parametrize("part", command.PARTS.values(), ids=command.PARTS)
def test_every_part_is_there(part: command.Part) -> None:
    assert callable(getattr(importlib.import_module(part.module), part.function))
