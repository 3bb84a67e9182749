"""Many seeds, and the planted faults: what `make sim` and the tests run."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from tests.sim.mutants import Mutant
from tests.sim.simulation import Result, run_seed, silence

MUTANT_SEEDS = 1000
"""How many seeds a planted fault may survive."""

_COLLECT_EVERY = 50


@dataclass
class Tally:
    """What many seeds came to. ``first`` is the first one with a violation."""

    seeds: int = 0
    violations: int = 0
    first: Result | None = None
    scenarios: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    causes: Counter[str] = field(default_factory=Counter)

    def add(self, result: Result) -> None:
        self.seeds += 1
        self.scenarios[result.scenario.partition(" (")[0]] += 1
        self.outcomes += result.outcomes
        self.causes += result.causes
        if result.violations:
            self.violations += 1
            self.first = self.first or result


def run_seeds(seeds: Iterable[int], tick: Callable[[Tally], None] = lambda tally: None) -> Tally:
    """Simulate each of ``seeds``; worlds are thrown away in batches, which is faster than one by one."""
    tally = Tally()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        with silence():
            for seed in seeds:
                tally.add(run_seed(seed))
                if tally.seeds % _COLLECT_EVERY == 0:
                    gc.collect()
                tick(tally)
    finally:
        gc.enable()
        gc.unfreeze()
    return tally


def hunt(mutant: Mutant, seeds: Iterable[int]) -> Result | None:
    """The first of ``seeds`` in which the planted fault is seen."""
    with silence(), mutant.patch():
        for seed in seeds:
            result = run_seed(seed)
            if result.violations:
                return result
    return None
