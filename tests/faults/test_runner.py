"""The fault suite itself, without engines: which rows run, what is judged how, and that a bad row stops no other."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.engines.clients import CONNECTION_LOST, NO_ANSWER, POLICIES, Answer
from tests.faults import __main__ as command
from tests.faults import report
from tests.faults import rows as listed
from tests.faults.fleets import KVLEASE, NIXL, Fleet
from tests.faults.rows import ROWS, Case, Row, passes, select
from tests.faults.runner import Runner, wait_for_blocks
from tests.faults.verdict import CLEAN, POLICY, REFUSED, SERVED, Got, Result, judge, summary


class TestTheList:
    def test_has_about_forty_rows_that_all_say_what_they_do(self) -> None:
        assert len(ROWS) >= 40
        assert all(one.fault and one.policies and set(one.policies) <= set(POLICIES) for one in ROWS.values())

    def test_rows_of_one_fleet_come_together(self) -> None:
        fleets = [one.fleet for one in select([], KVLEASE)]
        assert fleets == sorted(fleets, key=fleets.index)
        assert {"main", "small", None} == set(fleets)

    def test_a_beginning_selects_all_rows_that_begin_so(self) -> None:
        assert [one.name for one in select(["swapped"], KVLEASE)] == ["swapped"]
        assert len(select(["producer-killed"], KVLEASE)) == 3
        with pytest.raises(KeyError):
            select(["no-such-row"], KVLEASE)

    def test_rows_that_need_our_messages_are_not_run_with_another_connector(self) -> None:
        theirs = {one.name for one in select([], NIXL)}
        assert "forged-token" not in theirs
        assert {"swapped", "producer-frozen-before-the-claim", "two-hundred-cut-off"} <= theirs

    def test_the_other_connector_meets_one_policy_after_the_other(self) -> None:
        rows = select(["swapped", "two-hundred"], NIXL)
        assert [(policies, [one.name for one in chosen]) for policies, chosen in passes(rows, NIXL)] == [
            (["recompute"], ["swapped"]),
            (["fail"], ["two-hundred-cut-off", "swapped"]),
        ]
        assert all(one.policies == list(policies) for policies, chosen in passes(rows, NIXL) for one in chosen)
        assert passes(rows, KVLEASE) == [(POLICIES, rows)]

    def test_is_shown_without_engines(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert command.main(["--list"]) == 0
        assert "swapped" in capsys.readouterr().out
        assert command.main(["no-such-row"]) == 2


class TestVerdict:
    @pytest.mark.parametrize(
        ("status", "token_ids", "got"),
        [
            (200, [1, 2], Got.RIGHT),
            (200, [1, 3], Got.WRONG),
            (200, [], Got.WRONG),
            (500, None, Got.ERROR),
            (400, None, Got.REFUSED),
            (NO_ANSWER, None, Got.HANG),
            (CONNECTION_LOST, None, Got.LOST),
        ],
    )
    def test_of_an_answer(self, status: int, token_ids: list[int] | None, got: Got) -> None:
        assert judge(Answer(status, token_ids, ""), [1, 2]) is got

    def test_a_wrong_text_is_never_wanted(self) -> None:
        for wants in (SERVED, POLICY, CLEAN, REFUSED):
            assert all(Got.WRONG not in wanted and Got.HANG not in wanted for wanted in wants.values())

    def test_a_failed_load_under_fail_must_not_pass_for_served(self) -> None:
        result = Result("row", "fail", "fault")
        result.see(Got.RIGHT, POLICY["fail"])
        assert not result.is_ok
        assert result.verdict == "right text instead of HTTP 500"

    @pytest.mark.parametrize(
        ("blocks_s", "ok", "leaked"), [(1.0, True, False), (9.0, False, False), (None, False, True)]
    )
    def test_of_blocks(self, blocks_s: float | None, ok: bool, leaked: bool) -> None:
        result = Result("row", "fail", "fault")
        result.settle_blocks(blocks_s, 8.0)
        assert (result.is_ok, result.leaked) == (ok, leaked)

    def test_the_last_line_counts(self) -> None:
        good, bad = Result("a", "fail", ""), Result("b", "fail", "")
        bad.see(Got.WRONG, SERVED["fail"])
        bad.settle_blocks(None, 1.0)
        assert summary([good, bad]) == "faults: 1/2 as they should be, 1 wrong texts, 1 leaked blocks"


class FakeEngine:
    """An engine that never started."""

    def __init__(self, name: str) -> None:
        self.name, self.usage, self.is_well, self.is_dying = name, 0.0, True, False

    def healthy(self, timeout_s: float) -> bool:
        was_well, self.is_well = self.is_well, self.is_well and not self.is_dying
        return was_well

    def kv_usage(self) -> float:
        if not self.is_well:
            raise httpx.ConnectError("connection refused")
        return self.usage

    def thaw(self) -> None:
        pass


class FakeFleet(Fleet):
    """Notes restarts in place of making them."""

    restarted: list[str]

    def restart(self, engine: Any) -> None:
        self.restarted.append(engine.name)
        engine.is_well, engine.is_dying, engine.usage = True, False, 0.0


def fake_fleet(connector: str = NIXL) -> FakeFleet:
    consumers: dict[str, Any] = {policy: FakeEngine(policy) for policy in POLICIES}
    fleet = FakeFleet(connector, FakeEngine("producer"), consumers, None, Path())  # type: ignore[arg-type]
    fleet.restarted = []
    return fleet


def row_of(run: Any, name: str = "row", fleet: str | None = "main") -> Row:
    return Row(name, "a fault", fleet, run, POLICIES, [NIXL], 1.0)


class TestRunner:
    @pytest.fixture
    def fleet(self) -> FakeFleet:
        return fake_fleet()

    @pytest.fixture(autouse=True)
    def next_handoff(self, monkeypatch: pytest.MonkeyPatch) -> dict[str, Answer]:
        """What the handoff after each row comes to; nobody prefills here."""
        answers = {"next": Answer(200, [1], "")}
        monkeypatch.setattr(Case, "prompt", lambda case, length: [1] * length)
        monkeypatch.setattr(Case, "reference", lambda case, prompt, max_tokens: [1])
        monkeypatch.setattr(Case, "handoff", lambda case, prompt: {})
        monkeypatch.setattr(listed, "ask", lambda *_, **__: answers["next"])
        return answers

    def run(self, fleet: FakeFleet, *rows: Row) -> list[Result]:
        @contextmanager
        def start(name: str) -> Iterator[Fleet]:
            self.started.append(name)
            yield fleet

        self.started: list[str] = []
        self.shown: list[Result] = []
        return Runner(NIXL, start, lambda _: None, self.shown.append).run(rows)

    def test_a_row_has_a_line_for_each_policy(self, fleet: FakeFleet) -> None:
        results = self.run(fleet, row_of(lambda case: None))
        assert [(one.policy, one.verdict) for one in results] == [("recompute", "ok"), ("fail", "ok")]
        assert self.shown == results

    def test_a_fleet_is_started_once_for_its_rows(self, fleet: FakeFleet) -> None:
        self.run(fleet, *(row_of(lambda case: None, f"row-{index}") for index in range(3)))
        assert self.started == ["main"]

    def test_a_row_that_breaks_is_told_and_stops_no_other(self, fleet: FakeFleet) -> None:
        def broken(case: Case) -> None:
            raise AssertionError("not within 20 s: a pull")

        results = self.run(fleet, row_of(broken), row_of(lambda case: None, "next"))
        assert [one.is_ok for one in results] == [False, False, True, True]
        assert "not within 20 s: a pull" in results[0].verdict

    def test_an_engine_that_died_is_told_and_restarted(self, fleet: FakeFleet) -> None:
        def kill(case: Case) -> None:
            fleet.consumers["fail"].is_well = False  # type: ignore[attr-defined]

        results = self.run(fleet, row_of(kill))
        assert results[0].verdict == "the engine fail died"
        assert fleet.restarted == ["fail"]

    def test_an_engine_that_answers_once_more_before_it_dies_is_told_and_restarted(self, fleet: FakeFleet) -> None:
        def poison(case: Case) -> None:
            fleet.consumers["fail"].is_dying = True  # type: ignore[attr-defined]

        results = self.run(fleet, row_of(poison), row_of(lambda case: None, "next"))
        assert [one.verdict for one in results] == ["the engine fail died"] * 2 + ["ok"] * 2
        assert fleet.restarted == ["fail"]

    def test_blocks_that_stay_are_a_leak_and_their_engine_is_restarted(
        self, fleet: FakeFleet, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("tests.faults.runner.KEPT_AFTER_S", -10.0)

        def leak(case: Case) -> None:
            fleet.producer.usage = 0.5  # type: ignore[attr-defined]

        results = self.run(fleet, row_of(leak))
        assert all(one.leaked and not one.is_ok for one in results)
        assert fleet.restarted == ["producer"]

    def test_a_wrong_text_in_the_next_handoff_counts(self, fleet: FakeFleet, next_handoff: dict[str, Answer]) -> None:
        next_handoff["next"] = Answer(200, [2], "")
        results = self.run(fleet, row_of(lambda case: None))
        assert [one.wrong_texts for one in results] == [1, 1]
        assert not any(one.is_ok for one in results)
        assert fleet.restarted == ["recompute", "producer", "fail", "producer"]

    def test_blocks_are_waited_for_from_the_event(self) -> None:
        engine: Any = FakeEngine("producer")
        assert wait_for_blocks([engine], since=0.0, limit_s=1e12)[1] == []
        engine.usage = 0.1
        assert wait_for_blocks([engine], since=0.0, limit_s=0.0) == (None, [engine])


class TestReport:
    def run_of(self, connector: str, *results: Result) -> dict[str, Any]:
        found = {
            "connector": connector, "date": "2026-01-02", "versions": {"vllm": "1"}, "settings": {"lease": 8},
            "results": [one.as_json() for one in results],
        }  # fmt: skip
        return json.loads(json.dumps(found))  # type: ignore[no-any-return]

    def test_shows_both_side_by_side_and_where_the_other_is_as_good(self, tmp_path: Path) -> None:
        ours, theirs, relayed = (
            Result("swapped", "fail", "Swapped"),
            Result("swapped", "fail", "Swapped"),
            Result("b", "fail", "B"),
        )
        ours.see(Got.ERROR, POLICY["fail"])
        theirs.see(Got.WRONG, POLICY["fail"])
        theirs.settle_blocks(None, 4.5)
        page = report.render(self.run_of(KVLEASE, ours, relayed), self.run_of(NIXL, theirs))
        assert (
            "| swapped | fail | HTTP 500 | – | WRONG TEXT; **WRONG TEXT instead of HTTP 500; blocks are kept** |"
            in page
        )
        assert "| b | fail |  | – | – | – |" in page
        assert "| KVLeaseConnector | 2026-01-02 | vllm 1 | lease 8 | 2/2 | 0 | 0 |" in page
        assert "Of 1 lines run with both, 0 are as they should be with both." in page

    def test_is_written_by_its_command(self, tmp_path: Path) -> None:
        source = tmp_path / "ours.json"
        source.write_text(json.dumps(self.run_of(KVLEASE, Result("swapped", "fail", "Swapped"))))
        assert report.main([str(source), "--docs", str(tmp_path / "faults.md")]) == 0
        assert "- **swapped**: Swapped." in (tmp_path / "faults.md").read_text()
