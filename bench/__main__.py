"""`python -m bench [PART ...]`: measure, show tables, keep the raw numbers, write `docs/benchmarks.md` and its plots.

Without names all parts are run. Ends with status 0 whatever the numbers are; an error is only what cannot be measured.
A quick run leaves page, plots and kept results alone.
"""

import argparse
import importlib
import logging
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import httpx
from rich.console import Console

from bench import plots, report, results
from bench.measure import Findings, Show
from bench.output import Table
from bench.results import ROOT, Result
from devtools.display import Display
from devtools.processes import ChildError

PAGE = ROOT / "docs" / "benchmarks.md"
PLOTS_DIR = ROOT / "docs" / "plots"
QUICK_RESULTS_DIR = ROOT / ".cache" / "bench-quick"


@dataclass(frozen=True)
class Part:
    """Something that can be measured by itself; `module` is imported only when it is."""

    title: str
    module: str
    function: str
    """Takes the arguments below and returns a table or several; without arguments it is what `bench.measure` says."""
    arguments: Mapping[str, Any] | None = None
    quick_arguments: Mapping[str, Any] | None = None


ROUNDS: Mapping[str, Any] = {"rounds": 7}
FEW_ROUNDS: Mapping[str, Any] = {"rounds": 3}

PARTS: dict[str, Part] = {
    "engines": Part("Real engines, against vLLM's NixlConnector", "bench.engines", "measure"),
    "plan": Part("Planning a transfer", "bench.data_plan", "planning", ROUNDS, FEW_ROUNDS),
    "pull": Part("Pulls, against bare NIXL and memcpy", "bench.data_pull", "pull", ROUNDS, FEW_ROUNDS),
    "behind": Part("A small pull behind a large one", "bench.data_latency", "behind", ROUNDS, FEW_ROUNDS),
    "abort": Part("Abort of a large pull", "bench.data_latency", "abort", ROUNDS, FEW_ROUNDS),
    "steps": Part("What pulls cost the engine's thread", "bench.data_steps", "steps", ROUNDS, FEW_ROUNDS),
    "posting": Part("Posting by index", "bench.data_posting", "posting", ROUNDS, FEW_ROUNDS),
    "tokens": Part("Growth with tokens", "bench.data_growth", "tokens", ROUNDS, FEW_ROUNDS),
    "loads": Part("Growth with loads", "bench.data_growth", "loads", ROUNDS, FEW_ROUNDS),
    "chunks": Part("The size of chunks", "bench.data_pull", "chunks", ROUNDS, FEW_ROUNDS),
    "checksum": Part("What checksums cost", "bench.data_checksum", "checksum", ROUNDS, FEW_ROUNDS),
    "hooks": Part(
        "What kvlease costs vLLM's scheduler",
        "bench.control_hooks",
        "measure_hooks",
        {"loads": 256, "steps": 1000},
        {"loads": 256, "steps": 200},
    ),
    "scale": Part(
        "One producer with very many leases",
        "bench.control_endpoint",
        "measure_scale",
        {"leases": 100_000, "channels": 200, "window_s": 30.0, "probes": 1000},
        {"leases": 4_000, "channels": 40, "window_s": 6.0, "probes": 100},
    ),
    "flood": Part(
        "A consumer that floods its producer",
        "bench.control_endpoint",
        "measure_flood",
        {"window_s": 10.0, "probes": 300},
        {"window_s": 2.0, "probes": 50},
    ),
    "commit": Part(
        "The round trip of a commit", "bench.control_commit", "measure_commits", {"rounds": 500}, {"rounds": 100}
    ),
}


def run(name: str, quick: bool, show: Show) -> Result:
    """One part, from the start to its result."""
    part = PARTS[name]
    machine, commit = results.conditions(), results.commit()
    began = time.monotonic()
    function = getattr(importlib.import_module(part.module), part.function)
    if part.arguments is None or part.quick_arguments is None:
        findings = function(quick, show)
    else:
        arguments = part.quick_arguments if quick else part.arguments
        findings = _of_tables(partial(function, **arguments), lambda words: show(name, 0.5, words))
    return Result(
        part=name,
        title=part.title,
        commit=commit,
        quick=quick,
        took_s=time.monotonic() - began,
        machine=machine,
        findings=findings,
    )


def _of_tables(measure: Callable[[], Table | Iterable[Table]], say: Callable[[str], None]) -> Findings:
    say("measuring")
    found, tables = measure(), list[Table]()
    for table in [found] if isinstance(found, Table) else found:
        tables.append(table)
        say(f"measured: {table.name}")
    return Findings(tables=tables)


def write_page() -> None:
    """Page and plots, from whatever results are kept."""
    kept = results.read_all(PARTS, results.RESULTS_DIR)
    pictures = {one.part: [str(path.relative_to(PAGE.parent)) for path in plots.draw(one, PLOTS_DIR)] for one in kept}
    PAGE.write_text(report.page(kept, pictures))


def main(arguments: list[str] | None = None) -> int:
    """Measures what is named, or everything."""
    parser = argparse.ArgumentParser(prog="python -m bench", description="Measures kvlease; see docs/benchmarks.md.")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"any of {', '.join(PARTS)}; none: all")
    parser.add_argument("--quick", action="store_true", help="few rounds, nothing written: for a look, not for a claim")
    parser.add_argument("--page", action="store_true", help="measure nothing, write the page from the kept results")
    chosen = parser.parse_args(arguments)
    if unknown := sorted(set(chosen.parts) - set(PARTS)):
        parser.error(f"{', '.join(unknown)}: unknown; there are {', '.join(PARTS)}")

    signal.signal(signal.SIGTERM, _interrupt)
    logging.disable(logging.INFO)
    console = Console(width=None if sys.stdout.isatty() else 140)
    if chosen.page:
        write_page()
        return 0
    names = chosen.parts or list(PARTS)
    results_dir = QUICK_RESULTS_DIR if chosen.quick else results.RESULTS_DIR
    try:
        with Display(console) as display:
            for index, name in enumerate(names):
                if len(names) > 1:
                    display.show("bench", index / len(names), f"part {index + 1} of {len(names)}: {PARTS[name].title}")
                results.write(run(name, chosen.quick, display.show), results_dir)
    except KeyboardInterrupt:
        console.print("bench: interrupted; all its processes have ended", markup=False)
        return 130
    except (ChildError, httpx.HTTPError) as error:
        console.print(f"bench: FAILED, {type(error).__name__}: {error}", markup=False, highlight=False)
        return 1
    kept = results.read_all(names, results_dir)
    report.show(kept, console)
    if not chosen.quick:
        write_page()
        console.print(
            f"written: {PAGE.relative_to(ROOT)}, {PLOTS_DIR.relative_to(ROOT)}/, bench/results/", markup=False
        )
    console.print(report.verdict(kept), markup=False, highlight=False)
    return 0


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
