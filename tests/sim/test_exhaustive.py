"""Every order in which a small handoff can go keeps the rules, and the checker would see it if one did not."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from tests.sim.exhaustive import FULL, SCOPES, catch, explore
from tests.sim.mutants import MUTANTS

pytestmark = pytest.mark.timeout(1800)  # half a minute of work for the largest, on a machine that may be busy

SEEN = {
    "no commit": "S1",
    "clock as proof": "S1",
    "gone is good": "S1",
    "early commit": "S1",
    "failed is used": "S1",
    "any incarnation": "S1",
    "one rank for all": "S1",
    "vouches for the dead": "S1",
    "reports twice": "S3",
    "release withdraws": "S4",
    "worker knows no quarantine": "S4",
    "no quarantine": "S4",
    "answers after reset": "S4",
    "quarantine for ever": "L1",
    "never expires": "L1",
    "tombstones for ever": "L1",
    "waits for ever": "L1",
    "no load timeout": "L1",
    "first commit ends": "L3",
    "repeat refused": "P1",
    "tombstone lost": "P1",
    "release forgotten": "P1",
    "released reader returns": "P1",
}
"""Planted faults that a small scope is enough for, and the rule that each of them breaks first. The others are about
what is not in the model: prompts, tokens, the endpoint's loop, silence of peers, renewals for long.
"""


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("name", FULL)
def test_no_order_of_events_breaks_a_rule(name: str) -> None:
    report = explore(SCOPES[name])
    assert report.violation is None, "\n".join((report.violation.rule, *report.violation.story))
    assert report.states > {"clean": 50, "renewals": 50_000, "siblings": 20_000, "consumers": 500_000}[name]


def test_without_faults_nobody_is_left_without_an_answer() -> None:
    """A reader that comes after the last commit's grace computes its prompt itself; there is no other way to miss."""
    assert explore(SCOPES["clean"]).endings == {("done", "done"), ("done", "local")}


@pytest.mark.parametrize("name", SEEN)
def test_a_planted_fault_is_seen(name: str) -> None:
    seen = catch(MUTANTS[name])
    assert seen is not None
    assert seen.rule.split(":")[0] == SEEN[name], seen.rule


def test_a_story_tells_the_shortest_way_to_a_violation() -> None:
    seen = catch(MUTANTS["vouches for the dead"])
    assert seen is not None
    assert len(seen.story) == seen.depth
    assert any("the clock of the producer moves" in line or "revokes" in line for line in seen.story)
    assert seen.story[-1].endswith("hears Committed")
