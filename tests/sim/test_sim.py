"""Seeded worlds in which nothing may go wrong that must not, and the same world each time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sim.runs import Tally, run_seeds
from tests.sim.simulation import run_seed, silence
from tests.sim.story import replay, tell

SEEDS = 2000
PARTS = 8
ROOT = Path(__file__).parents[2]


def story_of(tally: Tally) -> str:
    if tally.first is None:
        return ""
    return "\n".join([tally.first.scenario, *tell(tally.first), replay(tally.first.seed)])


@pytest.mark.parametrize("part", range(PARTS))
def test_no_rule_is_broken(part: int) -> None:
    size = SEEDS // PARTS
    tally = run_seeds(range(part * size, (part + 1) * size))
    assert tally.violations == 0, story_of(tally)
    # that everything fails would not do either
    assert tally.outcomes["loaded"] > tally.seeds
    assert tally.outcomes["failed"] > 0
    assert tally.outcomes["aborted"] > 0


def test_a_seed_is_the_same_story_each_time() -> None:
    with silence():
        for seed in range(10):
            first, second = run_seed(seed), run_seed(seed)
            assert (first.fingerprint, first.events) == (second.fingerprint, second.events)
            assert list(tell(first)) == list(tell(second))


def test_the_story_does_not_depend_on_how_strings_are_hashed() -> None:
    code = (
        "from tests.sim.simulation import run_seed, silence\n"
        "with silence():\n"
        "    print([run_seed(seed).fingerprint for seed in range(25)])"
    )
    told = {
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("1", "2")
    }
    assert len(told) == 1


def test_vllm_is_not_needed() -> None:
    code = "import sys, tests.sim.__main__\nassert not [name for name in sys.modules if name.startswith('vllm')]"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


@pytest.mark.parametrize("seed", [2908, 11589])
def test_seeds_that_once_found_something_find_nothing_now(seed: int) -> None:
    """2908: a greeting that could not be used was never over, so its producer was neither greeted nor forgotten.
    11589: an engine that shuts down gives its blocks to nobody, which is as it should be.
    """
    with silence():
        assert run_seed(seed).violations == []
