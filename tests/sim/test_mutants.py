"""Each planted fault is seen: the simulation has teeth."""

from __future__ import annotations

import pytest

from tests.sim.mutants import MUTANTS
from tests.sim.runs import MUTANT_SEEDS, hunt

BEGIN_AT = {
    "no load timeout": 460,
    "repeat refused": 260,
    "release forgotten": 70,
    "released reader returns": 470,
    "tombstone lost": 55,
    "deaf lifeline": 125,
    "grants late": 220,
    "claim names reused": 140,
    "token ignored": 95,
    "unknown is over": 40,
}
"""A seed shortly before the first one that shows the fault, where that is not among the first few: it saves time only.
`python -m tests.sim --mutants` prints them.
"""


@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_fault_is_caught(name: str) -> None:
    begin = BEGIN_AT.get(name, 0)
    assert hunt(MUTANTS[name], range(begin, begin + MUTANT_SEEDS)) is not None, MUTANTS[name].description
