"""What was measured, as tables for people and as JSON for whatever compares runs."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import rich.table
from rich.console import Console

_PACKAGES = ("kvlease", "nixl", "numpy", "torch", "pyzmq", "msgspec")


@dataclass
class Table:
    """One measurement. ``bound`` says what its numbers are held against, ``is_met`` whether they are: None, nothing."""

    name: str
    columns: Sequence[str]
    bound: str = ""
    rows: list[dict[str, Any]] = field(default_factory=list)
    is_met: bool | None = None

    def add(self, *cells: Any) -> None:
        """One row: text, numbers and :class:`~bench.timing.Spread`, as many as there are columns."""
        self.rows.append(dict(zip(self.columns, cells, strict=True)))


def show(table: Table, console: Console) -> None:
    """Print it."""
    drawn = rich.table.Table(title=table.name, caption=_verdict(table) or None, title_justify="left")
    for at, column in enumerate(table.columns):
        drawn.add_column(column, justify="left" if at == 0 else "right")
    for row in table.rows:
        drawn.add_row(*(_text(value) for value in row.values()))
    console.print(drawn)


def write_json(tables: Sequence[Table], path: Path) -> None:
    """All of it, with what it was measured on."""
    content = {"machine": describe_machine(), "tables": [dataclasses.asdict(table) for table in tables]}
    path.write_text(json.dumps(content, indent=1) + "\n")


def describe_machine() -> dict[str, Any]:
    """Where and with what a run was made; ``load`` is the machine's load average, to judge the spread by."""
    return {
        "cpus": len(os.sched_getaffinity(0)),
        "load": os.getloadavg(),
        "python": platform.python_version(),
        "system": platform.platform(),
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "packages": {name: _version(name) for name in _PACKAGES},
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _text(value: Any) -> str:
    match value:
        case float():
            return f"{value:.2f}"
        case int():
            return f"{value:,}"
    return str(value)


def _verdict(table: Table) -> str:
    if table.is_met is None:
        return table.bound
    return f"{table.bound}: {'met' if table.is_met else 'NOT met'}"
