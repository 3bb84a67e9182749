"""Times as medians with their spread, and two ways of doing a thing measured in turn."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

Measure = Callable[[], float]
"""Does something once and says what it took, in any unit."""

Clock = Callable[[], float]
"""Seconds since whenever."""


@dataclass(frozen=True)
class Spread:
    """What repeated measurements gave: the median, and the range that holds the middle eight tenths of them."""

    median: float
    low: float
    high: float
    count: int

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f} .. {self.high:.2f})"

    def scaled(self, factor: float) -> Spread:
        """The same in another unit."""
        return Spread(self.median * factor, self.low * factor, self.high * factor, self.count)


@dataclass(frozen=True, eq=False)
class Clocked:
    """A measure, and a clock that is read before and after it."""

    measure: Measure
    clock: Clock


@dataclass(frozen=True)
class Paired:
    """A and B measured in turn; ``ratio`` is A / B of each round, which a slow minute of the machine hits alike."""

    a: Spread
    b: Spread
    ratio: Spread


def spread(values: Sequence[float]) -> Spread:
    """Of at least one measurement."""
    ordered = sorted(values)
    last = len(ordered) - 1
    return Spread(statistics.median(ordered), ordered[round(0.1 * last)], ordered[round(0.9 * last)], len(ordered))


def p99_of(ordered: Sequence[float]) -> float:
    """What 99 in 100 of the values do not exceed; they come sorted, and there is at least one."""
    return ordered[round(0.99 * (len(ordered) - 1))]


def timed(action: Callable[[], object], clock: Clock = time.perf_counter) -> Measure:
    """A measure of how many seconds ``action`` takes.

    For what only computes, ``time.thread_time`` as the ``clock`` counts this thread's own time on a core, which other
    processes do not lengthen.
    """

    def measure() -> float:
        began = clock()
        action()
        return clock() - began

    return measure


def repeat(measure: Measure, rounds: int, warm_up: int = 1) -> Spread:
    """``rounds`` measurements, after ``warm_up`` that do not count."""
    for _ in range(warm_up):
        measure()
    return spread([measure() for _ in range(rounds)])


def alternate(a: Measure, b: Measure, rounds: int, warm_up: int = 1) -> Paired:
    """A and B ``rounds`` times each; who goes first changes from round to round."""
    for _ in range(warm_up):
        a()
        b()
    pairs: list[tuple[float, float]] = []
    for number in range(rounds):
        if number % 2:
            of_b = b()
            pairs.append((a(), of_b))
        else:
            pairs.append((a(), b()))
    return _paired(pairs)


def measured_by(one: Clocked, rounds: int, warm_up: int = 1) -> tuple[Spread, Spread]:
    """Like :func:`repeat`: what the measure says, and how much its clock went on meanwhile."""
    ran: list[float] = []

    def clocked() -> float:
        began = one.clock()
        found = one.measure()
        ran.append(one.clock() - began)
        return found

    return repeat(clocked, rounds, warm_up), spread(ran[warm_up:])


def alternate_both(a: Clocked, b: Clocked, rounds: int, warm_up: int = 1) -> tuple[Paired, Paired]:
    """Like :func:`alternate`: what A and B say, and how much their clocks went on meanwhile."""
    ran: dict[Clocked, list[float]] = {a: [], b: []}

    def clocked(one: Clocked) -> float:
        began = one.clock()
        found = one.measure()
        ran[one].append(one.clock() - began)
        return found

    found = alternate(lambda: clocked(a), lambda: clocked(b), rounds, warm_up)
    return found, _paired(list(zip(ran[a][warm_up:], ran[b][warm_up:], strict=True)))


def thread_clock(name: str) -> Clock:
    """How many seconds the thread of that name, the only one, has had a core; it must live on."""
    (ident,) = (thread.ident for thread in threading.enumerate() if thread.name == name)
    assert ident is not None
    return partial(time.clock_gettime, time.pthread_getcpuclockid(ident))


def _paired(pairs: Sequence[tuple[float, float]]) -> Paired:
    return Paired(
        spread([of_a for of_a, _ in pairs]),
        spread([of_b for _, of_b in pairs]),
        spread([of_a / of_b for of_a, of_b in pairs]),
    )
