"""Every story of the lease table keeps the rules, with all faults in one; of a worse table the checker sees it."""

from __future__ import annotations

import pytest

from tests.sim.exhaustive_table import catch, explore
from tests.sim.exhaustive_table_model import LoneTablePart
from tests.sim.mutants import MUTANTS

pytestmark = pytest.mark.timeout(1800)  # half a minute of work for the largest, on a machine that may be busy

SEEN = {
    "first commit ends": "L3",
    "no grace": "L3",
    "one rank for all": "S1",
    "vouches for the dead": "S1",
    "any incarnation": "S1",
    "repeat refused": "P1",
    "tombstone lost": "P1",
    "release forgotten": "P1",
    "released reader returns": "P1",
    "answers after reset": "S4",
    "digest ignored": "S2",
    "token ignored": "S2",
    "never expires": "L1",
    "tombstones for ever": "L1",
}
"""The planted faults of the table, and the rule that each breaks first. The others need renewals."""


def test_no_story_with_all_the_faults_breaks_a_rule() -> None:
    report = explore()
    assert report.violation is None, "\n".join((report.violation.rule, *report.violation.story))
    assert report.states > 100_000


def test_no_story_of_readers_without_siblings_breaks_a_rule() -> None:
    report = explore(part=LoneTablePart)
    assert report.violation is None, "\n".join((report.violation.rule, *report.violation.story))
    assert report.states > 50_000


def test_without_faults_every_rank_of_both_readers_is_served() -> None:
    report = explore(0)
    assert report.violation is None, "\n".join((report.violation.rule, *report.violation.story))
    assert report.states > 20


@pytest.mark.parametrize("name", SEEN)
def test_a_planted_fault_is_seen(name: str) -> None:
    seen = catch(MUTANTS[name])
    assert seen is not None
    print(f"{name}: seen at depth {seen.depth}")
    assert seen.rule.split(":")[0] == SEEN[name], "\n".join((seen.rule, *seen.story))


def test_a_story_tells_the_way_to_a_violation_by_the_first_names() -> None:
    seen = catch(MUTANTS["vouches for the dead"])
    assert seen is not None
    assert seen.story[-1].startswith("Commit for rank")
    assert any("deadline" in line or "revoke" in line for line in seen.story)
