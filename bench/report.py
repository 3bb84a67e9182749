"""The page `docs/benchmarks.md` and the tables on the terminal, both from the kept results (see `results.py`)."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import rich.table
from rich.console import Console, Group, RenderableType
from rich.text import Text

from bench.measure import Measurement
from bench.results import Result

_HEADER = """\
# Benchmarks

Written by `make bench`, which measures everything again on your machine (`python -m bench --quick` takes a short look,
`python -m bench --help` lists the parts); changes to this page belong into `bench/report.py`. What is compared was
measured in turn, in one run. Numbers are medians unless they say otherwise; in parentheses the range that holds the
middle eight tenths of the samples (all of them, where they are few). The raw numbers are in `bench/results/`.
[Limits](limits.md) says what is in the way of the targets that are missed.
"""

_COLUMNS = ("what", "kvlease", "for comparison", "target", "met")
_WORDS = {True: "yes", False: "no", None: ""}


def verdict(results: Sequence[Result]) -> str:
    """The last line of a run."""
    all_met = [target.met for result in results for target in targets_of(result)]
    return f"bench: {sum(all_met)}/{len(all_met)} targets met"


class Target(NamedTuple):
    """Something that had a target. `seen` is empty where only a table says it."""

    name: str
    seen: str
    target: str
    met: bool


def targets_of(result: Result) -> list[Target]:
    """All that had one."""
    found = result.findings
    rows = [(one.name, _value(one), one.target, one.met) for one in found.measurements]
    rows += [(table.name, "", table.bound, table.is_met) for table in found.tables]
    return [Target(name, seen, target, met) for name, seen, target, met in rows if met is not None]


# -- on the terminal --------------------------------------------------------------------------------------------------


def show(results: Sequence[Result], console: Console) -> None:
    """All tables, then the targets that were missed."""
    for result in results:
        console.print(_terminal(result))
    for result in results:
        for one in targets_of(result):
            if not one.met:
                words = f"missed: {result.part}: {one.name}: {one.seen or 'see the table'}, target {one.target}"
                console.print(words, markup=False, highlight=False, style="red")


def _terminal(result: Result) -> RenderableType:
    drawn: list[RenderableType] = [Text(f"\n{result.title}", style="bold")]
    if result.findings.measurements:
        table = rich.table.Table()
        for name in _COLUMNS:
            table.add_column(name, overflow="fold")
        for one in result.findings.measurements:
            table.add_row(*_cells(one), style="red" if one.met is False else None)
        drawn.append(table)
    for found in result.findings.tables:
        table = rich.table.Table(title=found.name, title_justify="left", caption=_bound(found.bound, found.is_met))
        for at, column in enumerate(found.columns):
            table.add_column(column, justify="left" if at == 0 else "right")
        for row in found.rows:
            table.add_row(*(text_of(value) for value in row.values()), style="red" if found.is_met is False else None)
        drawn.append(table)
    return Group(*drawn)


# -- the page ---------------------------------------------------------------------------------------------------------


def page(results: Sequence[Result], plots: Mapping[str, Sequence[str]]) -> str:
    """The whole page; `plots` are paths of pictures, from the page, by part."""
    parts = [_HEADER, _summary(results)]
    for result in results:
        parts.append(f"## {result.title}\n")
        if result.findings.about:
            parts.append(result.findings.about)
        parts.append(_conditions(result))
        if result.findings.measurements:
            rows = [_cells(one) for one in result.findings.measurements]
            parts.append(markdown(_COLUMNS, rows))
        for found in result.findings.tables:
            parts.append(f"### {found.name}\n")
            rows = [[text_of(value) for value in row.values()] for row in found.rows]
            parts.append(markdown(list(found.columns), rows, right=True))
            if bound := _bound(found.bound, found.is_met):
                parts.append(f"Target: {bound}\n")
        parts += [f"![{path.rpartition('/')[2].removesuffix('.svg')}]({path})\n" for path in plots.get(result.part, ())]
    return "\n".join(parts)


def _summary(results: Sequence[Result]) -> str:
    rows = [
        [result.title, one.name, one.seen, one.target, _WORDS[one.met]]
        for result in results
        for one in targets_of(result)
    ]
    return f"**{verdict(results)}**\n\n" + markdown(("part", "what", "seen", "target", "met"), rows)


def _conditions(result: Result) -> str:
    machine = result.machine
    packages = ", ".join(f"{name} {version}" for name, version in machine["packages"].items() if version)
    load = machine["load"][0]
    return (
        f"Measured {machine['at'][:10]} at commit `{result.commit}` on {machine['cpus']} cores ({machine['cpu']}), "
        f"{machine['memory_gib']:.0f} GiB, Python {machine['python']}, {packages}; "
        f"load average at the start {load:.1f}; {result.took_s / 60:.0f} min.\n"
    )


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]], *, right: bool = False) -> str:
    """A table; with `right`, all columns but the first are set to the right."""
    rule = ["---", *(["---:" if right else "---"] * (len(columns) - 1))]
    lines = [columns, rule, *rows]
    return "".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |\n" for line in lines)


# -- cells ------------------------------------------------------------------------------------------------------------


def _cells(one: Measurement) -> list[str]:
    beside = ", ".join(f"{name} {number(value)}" for name, value in one.beside.items())
    value = _value(one)
    if one.spread is not None:
        value += f" ({number(one.spread[0])} .. {number(one.spread[1])})"
    name = f"{one.name} ({one.note})" if one.note else one.name
    return [name, value, beside, one.target, _WORDS[one.met]]


def _value(one: Measurement) -> str:
    return f"{number(one.value)} {one.unit}"


def text_of(value: Any) -> str:
    """A cell of a table: a spread (as it comes out of JSON), a number, or words."""
    match value:
        case {"median": median, "low": low, "high": high}:
            return f"{number(median)} ({number(low)} .. {number(high)})"
        case bool():
            return _WORDS[value]
        case int() | float():
            return number(value)
    return str(value)


def number(value: float | None) -> str:
    """Three digits that count, never an exponent."""
    if value is None:
        return "none"
    if isinstance(value, int) or abs(value) >= 100:
        return f"{value:,.0f}"
    if value == 0:
        return "0"
    digits = min(4, max(0, 2 - math.floor(math.log10(abs(value)))))
    return f"{value:.{digits}f}"


def _bound(bound: str, is_met: bool | None) -> str:
    return bound if is_met is None else f"{bound}: {'met' if is_met else 'not met'}"
