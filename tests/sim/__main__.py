"""``python -m tests.sim``: first the planted faults, then many seeds; or one seed, told in full."""

from __future__ import annotations

import argparse
import sys

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from tests.sim.mutants import MUTANTS
from tests.sim.runs import MUTANT_SEEDS, Tally, hunt, run_seeds
from tests.sim.simulation import Result, run_seed, silence
from tests.sim.story import replay, tell

console = Console(highlight=False)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--seeds", type=int, default=20_000, help="how many seeds to simulate (default: 20000)")
    parser.add_argument("--first", type=int, default=0, metavar="SEED", help="the first of them (default: 0)")
    parser.add_argument("--seed", type=int, metavar="SEED", help="tell the whole story of this one seed instead")
    parser.add_argument("--mutants", action="store_true", help="only plant the faults, and see each one caught")
    parser.add_argument("--mutant", choices=sorted(MUTANTS), help="with --seed: plant this fault first")
    options = parser.parse_args()
    if options.seed is not None:
        return _replay(options.seed, options.mutant)
    survivors = _mutants()
    if options.mutants:
        return min(survivors, 1)
    violations = _seeds(range(options.first, options.first + options.seeds))
    return min(survivors + violations, 1)


def _replay(seed: int, mutant: str | None) -> int:
    with silence():
        if mutant is None:
            result = run_seed(seed, keep_all=True)
        else:
            with MUTANTS[mutant].patch():
                result = run_seed(seed, keep_all=True)
    for line in tell(result, last=None):
        print(line)
    print(f"seed {seed}: {result.scenario}; {result.events} events, fingerprint {result.fingerprint:08x}")
    return _judge(result)


def _judge(result: Result) -> int:
    for rule, text in result.violations:
        print(f"{rule} is violated: {text}")
    return 1 if result.violations else 0


def _mutants() -> int:
    """Show that each planted fault is seen; how many were not."""
    table = Table("planted fault", "what the code does", "seed", "rule", "what was seen", title="Planted faults")
    survivors = 0
    with _progress() as progress:
        task = progress.add_task("planting faults", total=len(MUTANTS))
        for name, mutant in MUTANTS.items():
            result = hunt(mutant, range(MUTANT_SEEDS))
            if result is None:
                survivors += 1
                table.add_row(name, mutant.description, "-", "-", "[red]NOT CAUGHT[/]")
            else:
                rule, text = result.violations[0]
                table.add_row(name, mutant.description, str(result.seed), rule, text.strip().splitlines()[-1][:120])
            progress.advance(task)
    console.print(table)
    console.print(f"mutants: {len(MUTANTS)} planted, {len(MUTANTS) - survivors} caught")
    return survivors


def _seeds(seeds: range) -> int:
    """Simulate them all, and print what they came to; how many broke a rule."""
    with _progress() as progress:
        task = progress.add_task("simulating", total=len(seeds))

        def tick(tally: Tally) -> None:
            if tally.seeds % 20 == 0 or tally.seeds == len(seeds):
                progress.update(task, completed=tally.seeds, description=f"simulating, {tally.violations} violations")

        tally = run_seeds(seeds, tick)
    if tally.first is not None:
        _tell_failure(tally.first)
    console.print(_outcomes(tally))
    print(f"sim: {tally.seeds} seeds, {tally.violations} violations")
    return tally.violations


def _tell_failure(result: Result) -> None:
    print(f"\nseed {result.seed}: {result.scenario}")
    for line in tell(result):
        print(line)
    print(f"again, in full: {replay(result.seed)}\n")


def _outcomes(tally: Tally) -> Table:
    table = Table("how many", "of what", title="What became of the loads")
    for name, number in tally.scenarios.most_common():
        table.add_row(str(number), f"worlds: {name}")
    table.add_section()
    for name, number in tally.outcomes.most_common():
        table.add_row(str(number), f"requests with a handoff: {name}")
    table.add_section()
    for key, number in tally.causes.most_common():
        outcome, _, cause = key.partition("|")
        table.add_row(str(number), f"loads {outcome}{': ' if cause else ''}{cause}")
    return table


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True)


if __name__ == "__main__":
    sys.exit(main())
