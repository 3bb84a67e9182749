"""The control plane's measurements: ``python -m bench.control [hooks scale flood commit] [--json FILE] [--quick]``.

Run them on a machine that is otherwise quiet: they are about tens of microseconds, and about who gets a core.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Final

from rich.console import Console

from bench.output import Table, show, write_json


def _hooks(quick: bool) -> Table:
    from bench.control_hooks import measure_hooks

    return measure_hooks(loads=256, steps=200 if quick else 1000)


def _scale(quick: bool) -> Table:
    from bench.control_endpoint import measure_scale

    if quick:
        return measure_scale(leases=4_000, channels=40, window_s=6.0, probes=100)
    return measure_scale(leases=100_000, channels=200, window_s=30.0, probes=1000)


def _flood(quick: bool) -> Table:
    from bench.control_endpoint import measure_flood

    return measure_flood(window_s=2.0 if quick else 10.0, probes=50 if quick else 300)


def _commit(quick: bool) -> Table:
    from bench.control_commit import measure_commits

    return measure_commits(rounds=100 if quick else 500)


MEASUREMENTS: Final[dict[str, Callable[[bool], Table]]] = {
    "hooks": _hooks,
    "scale": _scale,
    "flood": _flood,
    "commit": _commit,
}


def main() -> None:
    """Measure what was asked for, print it, and write it down."""
    parser = argparse.ArgumentParser(prog="python -m bench.control", description=__doc__)
    parser.add_argument("what", nargs="*", metavar="WHAT", help=f"{', '.join(MEASUREMENTS)}; all, unless named")
    parser.add_argument("--json", type=Path, help="also write the tables here")
    parser.add_argument("--quick", action="store_true", help="small numbers: a look, no measurement")
    arguments = parser.parse_args()
    if unknown := set(arguments.what) - MEASUREMENTS.keys():
        parser.error(f"no such measurement: {', '.join(sorted(unknown))}")
    logging.disable(logging.INFO)
    console, tables = Console(), []
    for name in arguments.what or MEASUREMENTS:
        tables.append(MEASUREMENTS[name](arguments.quick))
        show(tables[-1], console)
    if arguments.json:
        write_json(tables, arguments.json)


if __name__ == "__main__":
    main()
