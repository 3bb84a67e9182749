"""One round with an HTTP server that plays all engines: what comes out is what the measurements are made from."""

from __future__ import annotations

import pytest

from bench.engines import Plan, Prompts, visit
from bench.engines_findings import measurements_of
from bench.engines_pair import CONTENDERS
from tests.bench.stub import BYTES_PER_PULL, StubServer

PLAN = Plan(rounds=1, settle_s=0, idle_s=0.05, handovers=3, quiet_s=0.05, leased_s=0.05, pulls=4, pull_every_s=0.02)
PROMPTS = Prompts(long=[1, 2, 3], short=[1])


def test_every_request_of_a_visit_is_sampled_and_counted() -> None:
    with StubServer() as server:
        seen = visit(server.pair(CONTENDERS[0]), PROMPTS, PLAN, 0)
    assert [one["error"] for one in seen["handovers"] + seen["pulls"]] == [""] * 7
    assert seen["counted"]["pulls"] == 7
    assert seen["counted"]["bytes_pulled"] == 7 * BYTES_PER_PULL
    assert seen["gaps_alone_s"]
    assert seen["gaps_leased_s"]
    assert seen["gaps_pulling_s"]
    assert seen["gaps_cached_s"]
    assert all(key.startswith(("producer/", "consumer/")) for key in seen["idle"])


def test_the_measurements_can_be_made_from_visits() -> None:
    contenders = {}
    for contender in CONTENDERS:
        with StubServer(pull_s=0.02) as server:
            visits = [visit(server.pair(contender), PROMPTS, PLAN, 0)]
        contenders[contender.key] = {"title": contender.title, "start_s": 1.0, "visits": visits}
    found = {one.name: one for one in measurements_of({"prompt_tokens": 3, "contenders": contenders})}
    assert found["handover, median"].value >= 20
    assert found["bytes of one pull"].value == pytest.approx(BYTES_PER_PULL / 1e6)
    assert set(found["handover, median"].beside) == {"B", "B'"}
