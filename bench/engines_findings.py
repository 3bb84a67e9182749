"""From the samples of an engine run to measurements with targets. Pure: the same samples give the same numbers."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bench.engines_load import worker_share
from bench.measure import Measurement
from bench.timing import spread

Samples = Mapping[str, Any]

OURS, SHIPPED, QUIET = "A", "B", "B'"
IDLE_AT_MOST_PERCENT = 3.0
HANDOVER_AT_MOST = {SHIPPED: 0.25, QUIET: 0.8}
WORST_AT_MOST = 3.0
GAP_P99_AT_MOST_ALONE = 1.5
GAP_P99_AT_MOST_QUIET = 0.5
LEAST_BYTES_PER_TOKEN = 46_080
"""KV of one token: 30 layers, K and V, 3 heads of 64 numbers of four bytes."""


def measurements_of(samples: Samples) -> list[Measurement]:
    """All of them, in the order of the page."""
    by_key: dict[str, list[Samples]] = {key: one["visits"] for key, one in samples["contenders"].items()}
    return [
        _start_up(samples),
        _idle(by_key),
        *_handover(by_key),
        *_gaps(by_key),
        *_real_pulls(by_key, samples["prompt_tokens"]),
    ]


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least `percent` of all values do not exceed; NaN when there are none."""
    if not values:
        return math.nan
    rank = math.ceil(len(values) * percent / 100)
    return sorted(values)[max(rank, 1) - 1]


def handovers_s(visits: Sequence[Samples]) -> list[float]:
    """The handovers that worked, of all visits."""
    return [one["handover_s"] for visit in visits for one in visit["handovers"] if not one["error"]]


def gaps_s(visits: Sequence[Samples], which: str) -> list[float]:
    """The gaps of all visits; `which` is `alone`, `leased`, `pulling` or `cached`."""
    return [gap for visit in visits for gap in visit[f"gaps_{which}_s"]]


def _median(values: Sequence[float]) -> float:
    return spread(values).median if values else math.nan


def _others(by_key: Mapping[str, list[Samples]], of: Callable[[list[Samples]], float]) -> dict[str, float]:
    return {key: of(visits) for key, visits in by_key.items() if key != OURS}


def _without_ours(by_key: Mapping[str, float]) -> dict[str, float]:
    return {key: value for key, value in by_key.items() if key != OURS}


def _measurement(
    name: str, unit: str, scale: float, by_key: Mapping[str, list[Samples]], of: Callable[[list[Samples]], list[float]]
) -> Measurement:
    """The median of what `of` takes from the visits, for us and beside it for the others; without a target."""
    ours = [value * scale for value in of(by_key[OURS])]
    return Measurement(
        name=name,
        value=_median(ours),
        unit=unit,
        spread=_range(ours),
        num_samples=len(ours),
        beside=_others(by_key, lambda visits: _median(of(visits)) * scale),
    )


def _range(values: Sequence[float]) -> tuple[float, float] | None:
    if not values:
        return None
    if len(values) < 10:
        return min(values), max(values)
    of_all = spread(values)
    return of_all.low, of_all.high


def _start_up(samples: Samples) -> Measurement:
    started = {key: one["start_s"] for key, one in samples["contenders"].items()}
    return Measurement(
        name="start of a pair, until both answer",
        value=started[OURS],
        unit="s",
        beside=_without_ours(started),
        note="one start each",
    )


def _idle(by_key: Mapping[str, list[Samples]]) -> Measurement:
    def busiest(visits: list[Samples]) -> list[float]:
        return [worker_share(visit["idle"]) * 100 for visit in visits]

    ours = busiest(by_key[OURS])
    return Measurement(
        name="idle, CPU of the busier worker",
        value=_median(ours),
        unit="% of a core",
        spread=_range(ours),
        num_samples=len(ours),
        target=f"≤ {IDLE_AT_MOST_PERCENT:g} %",
        at_most=IDLE_AT_MOST_PERCENT,
        beside=_others(by_key, lambda visits: _median(busiest(visits))),
    )


def _handover(by_key: Mapping[str, list[Samples]]) -> list[Measurement]:
    ours = handovers_s(by_key[OURS])
    found = [_measurement("handover, median", "ms", 1e3, by_key, handovers_s)]
    for key, at_most in HANDOVER_AT_MOST.items():
        found.append(
            Measurement(
                name=f"handover, median, against {key}",
                value=_median(ours) / _median(handovers_s(by_key[key])),
                unit=f"x {key}",
                spread=_round_ratios(by_key, key),
                num_samples=len(ours),
                target=f"≤ {at_most:g} x {key}",
                at_most=at_most,
            )
        )

    def worst_of(visits: list[Samples]) -> float:
        return max(handovers_s(visits), default=math.nan) / _median(handovers_s(visits))

    found.append(
        Measurement(
            name=f"handover, worst of {len(ours)}",
            value=worst_of(by_key[OURS]),
            unit="x own median",
            num_samples=len(ours),
            target=f"≤ {WORST_AT_MOST:g} x own median",
            at_most=WORST_AT_MOST,
            beside=_others(by_key, worst_of),
        )
    )
    found.append(_measurement("the producer's answer to the same request, all cached", "ms", 1e3, by_key, _prefills_s))
    for key in HANDOVER_AT_MOST:
        found.append(
            Measurement(
                name=f"that answer, against {key}: what a pull in no time would reach",
                value=_median(_prefills_s(by_key[OURS])) / _median(handovers_s(by_key[key])),
                unit=f"x {key}",
                num_samples=len(ours),
            )
        )
    return found


def _prefills_s(visits: Sequence[Samples]) -> list[float]:
    return [one["prefill_s"] for visit in visits for one in visit["handovers"]]


def _round_ratios(by_key: Mapping[str, list[Samples]], key: str) -> tuple[float, float] | None:
    """The least and the greatest ratio of medians of one round."""
    ratios = [
        _median(handovers_s([ours])) / _median(handovers_s([theirs]))
        for ours, theirs in zip(by_key[OURS], by_key[key], strict=True)
    ]
    return (min(ratios), max(ratios)) if ratios else None


def _gaps(by_key: Mapping[str, list[Samples]]) -> list[Measurement]:
    def p99(which: str) -> Callable[[list[Samples]], float]:
        return lambda visits: percentile(gaps_s(visits, which), 99)

    def growth(visits: list[Samples], which: str = "pulling") -> float:
        return p99(which)(visits) / p99("alone")(visits)

    ours = by_key[OURS]
    num_pulling = len(gaps_s(ours, "pulling"))
    found = [
        _measurement("decode gap alone, median", "ms", 1e3, by_key, lambda visits: gaps_s(visits, "alone")),
        _measurement("decode gap leases out, median", "ms", 1e3, by_key, lambda visits: gaps_s(visits, "leased")),
        _measurement("decode gap with pulls, median", "ms", 1e3, by_key, lambda visits: gaps_s(visits, "pulling")),
        _measurement("decode gap nothing pulled, median", "ms", 1e3, by_key, lambda visits: gaps_s(visits, "cached")),
    ]
    for which, words in (
        ("alone", "alone"),
        ("leased", "leases out"),
        ("pulling", "with pulls"),
        ("cached", "nothing pulled"),
    ):
        found.append(
            Measurement(
                name=f"decode gap {words}, p99",
                value=p99(which)(ours) * 1e3,
                unit="ms",
                num_samples=len(gaps_s(ours, which)),
                beside=_others(by_key, lambda visits, which=which: p99(which)(visits) * 1e3),  # type: ignore[misc]
            )
        )
    found.append(
        Measurement(
            name="decode gap, p99 with pulls against p99 alone",
            value=growth(ours),
            unit="x own p99 alone",
            num_samples=num_pulling,
            target=f"≤ {GAP_P99_AT_MOST_ALONE:g} x own p99 alone",
            at_most=GAP_P99_AT_MOST_ALONE,
            beside=_others(by_key, growth),
        )
    )
    found.append(
        Measurement(
            name="decode gap, p99 nothing pulled against p99 alone: what a pull at no cost would reach",
            value=growth(ours, "cached"),
            unit="x own p99 alone",
            num_samples=len(gaps_s(ours, "cached")),
            beside=_others(by_key, lambda visits: growth(visits, "cached")),
        )
    )
    found.append(
        Measurement(
            name=f"decode gap, p99 with pulls against {QUIET}",
            value=p99("pulling")(ours) / p99("pulling")(by_key[QUIET]),
            unit=f"x {QUIET}",
            num_samples=num_pulling,
            target=f"≤ {GAP_P99_AT_MOST_QUIET:g} x {QUIET}",
            at_most=GAP_P99_AT_MOST_QUIET,
        )
    )
    found.append(_measurement("request with a handoff beside the stream, median", "ms", 1e3, by_key, _took_s))
    return found


def _took_s(visits: Sequence[Samples]) -> list[float]:
    return [pull["took_s"] for visit in visits for pull in visit["pulls"] if not pull["error"]]


def _real_pulls(by_key: Mapping[str, list[Samples]], prompt_tokens: int) -> list[Measurement]:
    """That each request was a pull of the whole prompt, by the consumer's own count."""

    def asked(visits: list[Samples]) -> int:
        return sum(len(visit["handovers"]) + len(visit["pulls"]) for visit in visits)

    def pulled(visits: list[Samples]) -> float:
        """Whole prompts, by bytes, and never more than there were loads that ended well."""
        whole = LEAST_BYTES_PER_TOKEN * prompt_tokens
        counts = [visit["counted"] for visit in visits]
        return float(sum(min(counted["pulls"], counted["bytes_pulled"] // whole) for counted in counts))

    ours, wanted = by_key[OURS], asked(by_key[OURS])
    shares = {key: pulled(visits) / asked(visits) * 100 for key, visits in by_key.items()}

    def counted(key: str, what: str) -> float:
        return sum(float(visit["counted"][what]) for visit in by_key[key])

    megabytes = {key: counted(key, "bytes_pulled") / max(1.0, counted(key, "pulls")) / 1e6 for key in by_key}
    expired = {key: counted(key, "expired") for key in by_key}
    causes = sorted({cause for visit in ours for cause in visit["counted"]["causes"]})
    return [
        Measurement(
            name="requests that were pulled whole",
            value=shares[OURS],
            unit="%",
            num_samples=wanted,
            target="all",
            at_least=100.0,
            beside=_without_ours(shares),
            note=f"causes: {', '.join(causes)}" if causes else "",
        ),
        Measurement(
            name="bytes of one pull",
            value=megabytes[OURS],
            unit="MB",
            num_samples=wanted,
            beside=_without_ours(megabytes),
        ),
        Measurement(
            name="leases that ran out during the run",
            value=expired[OURS],
            unit="leases",
            num_samples=wanted,
            beside=_without_ours(expired),
        ),
    ]
