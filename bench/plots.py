"""Pictures of kept results as SVG files: what the tables of the page say, for the eye."""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("svg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, PercentFormatter

from bench.engines_findings import gaps_s, handovers_s
from bench.output import Table
from bench.results import Result

Samples = Mapping[str, Any]

_COLOURS = ("#0072b2", "#d55e00", "#e69f00", "#009e73", "#cc79a7")
_STYLE: Any = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "svg.fonttype": "none",
    "svg.hashsalt": "kvlease",  # equal data, equal file
    "figure.constrained_layout.use": True,
}
_UNITS = frozenset({"s", "ms", "us", "µs", "ns", "MiB", "MB", "MB/s", "GB/s", "%", "share"})
"""What the title of a column may end with; columns without any of these share one pane."""

_LOG_FROM = 30.0
"""Bars whose longest is this many times their shortest get a logarithmic axis."""


def draw(result: Result, into: Path) -> list[Path]:
    """All pictures of one result, replacing those of the last one; their files."""
    into.mkdir(parents=True, exist_ok=True)
    for old in into.glob(f"{result.part}-*.svg"):
        old.unlink()
    figures: dict[str, Figure] = {}
    with mpl.rc_context(_STYLE):
        if "contenders" in result.findings.samples:
            for name, picture in _ENGINE_PICTURES.items():
                figures[name] = picture(result.findings.samples)
        for table in result.findings.tables:
            if (figure := _bars(table)) is not None:
                figures[_slug(table.name)] = figure
        return [_save(figure, into / f"{result.part}-{name}.svg") for name, figure in figures.items()]


def _save(figure: Figure, path: Path) -> Path:
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
    return path


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


# -- engines ----------------------------------------------------------------------------------------------------------


def _visits(samples: Samples) -> dict[str, list[Samples]]:
    return {f"{key} ({one['title']})": one["visits"] for key, one in samples["contenders"].items()}


def _handovers(samples: Samples) -> Figure:
    """Every single handover, and the median."""
    figure, axes = plt.subplots(figsize=(7, 2.4))
    for row, (name, visits) in enumerate(_visits(samples).items()):
        times_ms = sorted(one * 1e3 for one in handovers_s(visits))
        if not times_ms:
            continue
        jitter = [row + 0.3 * ((index * 0.618) % 1 - 0.5) for index in range(len(times_ms))]
        axes.scatter(times_ms, jitter, s=10, color=_COLOURS[row], alpha=0.6, linewidths=0, label=name)
        median_ms = times_ms[len(times_ms) // 2]
        axes.plot([median_ms, median_ms], [row - 0.35, row + 0.35], color=_COLOURS[row], linewidth=2)
    _log_ms(axes, "handover, ms (logarithmic); the line is the median")
    _name_rows(axes, list(_visits(samples)))
    return figure


def _gap_tails(samples: Samples) -> Figure:
    """How many gaps are longer than so many milliseconds: alone dashed, with pulls solid, nothing pulled dotted."""
    figure, axes = plt.subplots(figsize=(7.6, 3.8))
    for row, (name, visits) in enumerate(_visits(samples).items()):
        for which, line, words in (
            ("alone", "--", "alone"),
            ("cached", ":", "nothing pulled"),
            ("pulling", "-", "with pulls"),
        ):
            gaps_ms = sorted(gap * 1e3 for gap in gaps_s(visits, which))
            longer = [1 - index / len(gaps_ms) for index in range(len(gaps_ms))]
            axes.step(gaps_ms, longer, line, color=_COLOURS[row], where="post", linewidth=1.3, label=f"{name}, {words}")
    axes.axhline(0.01, color="grey", linewidth=0.8)
    axes.annotate("p99", (axes.get_xlim()[1], 0.01), ha="right", va="bottom", color="grey")
    _log_ms(axes, "time between two tokens, ms (logarithmic)")
    axes.set(yscale="log", ylabel="share of gaps that are longer")
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=1))
    figure.legend(fontsize=7, loc="outside upper center", ncols=3)
    return figure


def _idle(samples: Samples) -> Figure:
    """The processes of an idle pair, by kind, averaged over the visits."""
    figure, axes = plt.subplots(figsize=(7, 2.8))
    by_name = {name: _by_kind(visits) for name, visits in _visits(samples).items()}
    kinds = sorted({kind for shares in by_name.values() for kind in shares})
    height = 0.8 / len(by_name)
    for row, (name, shares) in enumerate(by_name.items()):
        places = [index + row * height for index in range(len(kinds))]
        axes.barh(places, [shares.get(kind, 0.0) for kind in kinds], height, color=_COLOURS[row], label=name)
    axes.set(xlabel="% of a core while idle")
    axes.set_yticks([index + 0.4 - height / 2 for index in range(len(kinds))], kinds)
    axes.invert_yaxis()
    axes.legend(fontsize=7)
    return figure


def _by_kind(visits: Sequence[Samples]) -> dict[str, float]:
    """Per cent of a core by `producer worker` and the like."""
    shares: dict[str, float] = {}
    for visit in visits:
        for key, share in visit["idle"].items():
            role, _, process = key.partition("/")
            kind = next((kind for kind in ("Worker", "EngineCore") if kind in process), "server and others")
            name = f"{role}, {kind}"
            shares[name] = shares.get(name, 0.0) + share * 100 / len(visits)
    return shares


_ENGINE_PICTURES: dict[str, Callable[[Samples], Figure]] = {
    "handover": _handovers,
    "decode-gaps": _gap_tails,
    "idle": _idle,
}


# -- tables -----------------------------------------------------------------------------------------------------------


def _bars(table: Table) -> Figure | None:
    """The columns of spreads of one table as bars, one picture of panes: those with the same unit share one."""
    columns = [name for name in table.columns if table.rows and all(_is_spread(row[name]) for row in table.rows)]
    if not columns:
        return None
    units: dict[str, list[str]] = {}
    for name in columns:
        last = name.rpartition(" ")[2]
        units.setdefault(last if last in _UNITS else "", []).append(name)
    height = 0.8 + 0.25 * len(table.rows) * max(len(names) for names in units.values())
    figure, panes = plt.subplots(1, len(units), figsize=(7, height), sharey=True, squeeze=False)
    for axes, (unit, names) in zip(panes[0], units.items(), strict=True):
        _bar_pane(axes, table, names)
        axes.set(xlabel=unit if len(names) > 1 else names[0])
    _name_rows(panes[0][0], [_row_name(row) for row in table.rows])
    figure.suptitle(table.name, fontsize=10)
    return figure


def _row_name(row: Mapping[str, Any]) -> str:
    words = [value for value in row.values() if isinstance(value, str)]
    return ", ".join(words) or str(next(iter(row.values())))


def _bar_pane(axes: Axes, table: Table, names: Sequence[str]) -> None:
    height = 0.8 / len(names)
    medians = [row[name]["median"] for row in table.rows for name in names]
    if min(medians) > 0 and max(medians) / min(medians) > _LOG_FROM:
        axes.set_xscale("log")
    for index, name in enumerate(names):
        spreads = [row[name] for row in table.rows]
        middles = [one["median"] for one in spreads]
        errors = [
            [one["median"] - one["low"] for one in spreads],
            [one["high"] - one["median"] for one in spreads],
        ]
        places = [row - 0.4 + height * (index + 0.5) for row in range(len(spreads))]
        colour = _COLOURS[index % len(_COLOURS)]
        axes.barh(places, middles, height, xerr=errors, color=colour, ecolor="#444444", label=name)
    if len(names) > 1:
        axes.legend(fontsize=7)


def _log_ms(axes: Axes, label: str) -> None:
    """A logarithmic axis with plain numbers."""
    axes.set(xscale="log", xlabel=label)
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())


def _name_rows(axes: Axes, names: Sequence[str]) -> None:
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)


def _is_spread(value: Any) -> bool:
    return isinstance(value, dict) and {"median", "low", "high"} <= value.keys()
