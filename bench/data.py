"""``python -m bench.data [NAME ...] [--rounds N] [--json FILE]``: the data plane in numbers.

Transports are UCX's to choose; ``UCX_TLS=tcp,self`` before the command compares another one.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from rich.console import Console

from bench import data_checksum, data_growth, data_latency, data_plan, data_posting, data_pull, data_steps
from bench.output import Table, show, write_json

MEASUREMENTS: Final[dict[str, Callable[[int], Iterator[Table]]]] = {
    "plan": data_plan.planning,
    "pull": data_pull.pull,
    "behind": data_latency.behind,
    "abort": data_latency.abort,
    "steps": data_steps.steps,
    "posting": data_posting.posting,
    "tokens": data_growth.tokens,
    "loads": data_growth.loads,
    "chunks": data_pull.chunks,
    "checksum": data_checksum.checksum,
}


_WIDTH_MIN: Final = 110


def main(arguments: list[str] | None = None) -> None:
    """Measure what is named, or everything."""
    parser = argparse.ArgumentParser(prog="python -m bench.data", description="Measures the data plane.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"any of {', '.join(MEASUREMENTS)}; none: all")
    parser.add_argument("--rounds", type=int, default=7, help="how often each is measured (default %(default)s)")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    chosen = parser.parse_args(arguments)
    if unknown := sorted(set(chosen.names) - set(MEASUREMENTS)):
        parser.error(f"{', '.join(unknown)}: unknown; there are {', '.join(MEASUREMENTS)}")
    console, tables = Console(), list[Table]()
    console.width = max(console.width, _WIDTH_MIN)
    for name in chosen.names or MEASUREMENTS:
        for table in MEASUREMENTS[name](chosen.rounds):
            show(table, console)
            tables.append(table)
            if chosen.json is not None:
                write_json(tables, chosen.json)


if __name__ == "__main__":
    main()
