"""Each planted fault is seen: the simulation has teeth."""

from __future__ import annotations

import pytest

from tests.sim.mutants import MUTANTS
from tests.sim.runs import MUTANT_SEEDS, hunt


@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_fault_is_caught(name: str) -> None:
    mutant = MUTANTS[name]
    found = hunt(mutant, range(mutant.first_seed, mutant.first_seed + MUTANT_SEEDS))
    assert found is not None, f"{mutant.description}: not seen"
