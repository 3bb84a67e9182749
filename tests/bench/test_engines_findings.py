"""Samples in, measurements out."""

from __future__ import annotations

from typing import Any

import pytest

from bench.engines_findings import LEAST_BYTES_PER_TOKEN, measurements_of, percentile
from bench.measure import Measurement

TOKENS = 100
WHOLE = LEAST_BYTES_PER_TOKEN * TOKENS


def visit(
    handovers_s: list[float], gaps_alone_s: list[float], gaps_pulling_s: list[float], worker: float, **counted: float
) -> dict[str, Any]:
    pulls = len(handovers_s) + 1
    return {
        "idle": {"producer/VLLM::Worker[1]": 0.001, "consumer/VLLM::Worker[2]": worker},
        "handovers": [{"handover_s": one, "prefill_s": 0.05, "error": ""} for one in handovers_s],
        "gaps_alone_s": gaps_alone_s,
        "gaps_leased_s": gaps_alone_s,
        "gaps_pulling_s": gaps_pulling_s,
        "gaps_cached_s": gaps_alone_s,
        "pulls": [{"sent_at_s": 1.0, "took_s": 0.1, "error": ""}],
        "counted": {"pulls": pulls, "bytes_pulled": pulls * WHOLE, "expired": 0, "causes": {}, **counted},
    }


def samples(**visits: dict[str, Any]) -> dict[str, Any]:
    contenders = {key.replace("Q", "'"): {"start_s": 30.0, "visits": [one]} for key, one in visits.items()}
    return {"prompt_tokens": TOKENS, "contenders": contenders}


def good() -> dict[str, Any]:
    return samples(
        A=visit([0.08, 0.1, 0.12], [0.02] * 99 + [0.03], [0.02] * 90 + [0.03] * 10, 0.02),
        B=visit([0.4, 0.5, 0.9], [0.1] * 100, [0.1] * 100, 0.9),
        BQ=visit([0.2, 0.15, 0.2], [0.02] * 100, [0.1] * 100, 0.5),
    )


def by_name(found: list[Measurement]) -> dict[str, Measurement]:
    return {one.name: one for one in found}


def missed(found: list[Measurement]) -> set[str]:
    return {one.name for one in found if one.met is False}


def test_a_good_run_meets_every_target() -> None:
    found = measurements_of(good())
    assert missed(found) == set()
    assert sum(one.met is not None for one in found) == 7
    named = by_name(found)
    assert named["handover, median"].value == pytest.approx(100)
    assert named["handover, median"].beside == pytest.approx({"B": 500, "B'": 200})
    assert named["handover, median, against B"].value == pytest.approx(0.2)
    assert named["idle, CPU of the busier worker"].value == pytest.approx(2)
    assert named["request with a handoff beside the stream, median"].value == pytest.approx(100)


def test_one_slow_handover_misses_only_its_own_target() -> None:
    run = good()
    run["contenders"]["A"]["visits"][0]["handovers"][2]["handover_s"] = 0.4
    assert missed(measurements_of(run)) == {"handover, worst of 3"}


def test_a_stream_that_stutters_with_pulls_misses_both_of_its_targets() -> None:
    run = good()
    run["contenders"]["A"]["visits"][0]["gaps_pulling_s"] = [0.02] * 90 + [0.06] * 10
    assert missed(measurements_of(run)) == {
        "decode gap, p99 with pulls against p99 alone",
        "decode gap, p99 with pulls against B'",
    }


@pytest.mark.parametrize("short", [{"pulls": 3}, {"bytes_pulled": 4 * WHOLE - 1}], ids=["load", "bytes"])
def test_a_request_that_was_not_pulled_whole_is_seen(short: dict[str, float]) -> None:
    run = good()
    run["contenders"]["A"]["visits"][0]["counted"].update(short)
    found = measurements_of(run)
    assert missed(found) == {"requests that were pulled whole"}
    assert by_name(found)["requests that were pulled whole"].value == pytest.approx(75)


def test_failed_handovers_are_no_samples() -> None:
    run = good()
    run["contenders"]["A"]["visits"][0]["handovers"][0] = {"handover_s": None, "prefill_s": 0.05, "error": "500"}
    assert by_name(measurements_of(run))["handover, median"].num_samples == 2


def test_an_opponent_that_never_answers_leaves_a_hole_and_no_target_met() -> None:
    run = good()
    for one in run["contenders"]["B"]["visits"][0]["handovers"]:
        one["error"] = "timeout"
    assert "handover, median, against B" in missed(measurements_of(run))


def test_percentiles_are_samples() -> None:
    assert percentile([3, 1, 2], 50) == 2
    assert percentile([*range(1, 101)], 99) == 99
    assert percentile([5], 99) == 5
