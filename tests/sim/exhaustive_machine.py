"""How the exhaustive checker names a state: by the events that led to it, and by what every field holds afterwards.

A part is deterministic, so :class:`Machine` rebuilds one by replaying its events, applies one event more, and knows the
state by a projection of every field of every real object (:func:`freeze`; times are relative to the part's own clock,
statistics are left out). Each pair of state and event is computed once.
"""

from __future__ import annotations

import enum
import itertools
from collections import deque
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec

START = 1_000_000.0
"""When every clock starts; a float of this size is a point in time, any smaller one is a duration."""

_STATISTICS = {"counters", "counts", "_counts", "_counters", "_log", "rtt_s", "_pull_seconds", "since"}
_CONSTANT = {
    "_timing",
    "_settings",
    "_channel",
    "_id",
    "_agent",
    "agent",
    "identity",
    "local",
    "key",
    "grant",
    "handoff",
}
_LEFT_OUT = _STATISTICS | _CONSTANT | {"kv_transfer_params", "_heap", "_order"}
"""Fields that decide nothing, or never change."""


class Violation(Exception):  # noqa: N818 - named for what happened
    """A rule is broken: which, and how."""


def freeze(value: Any, now: float = 0.0, seen: dict[int, Any] | None = None) -> Hashable:  # noqa: PLR0911
    """Everything that ``value`` holds, as something that compares equal exactly when the state is the same.

    The order of dictionaries and sets does not count; callables, statistics and constants are left out. What is held in
    several places is told once.
    """
    if value is None or isinstance(value, str | bytes | int):
        return value
    if isinstance(value, float):
        return ("t", round(value - now, 6)) if START / 2 < value < 2 * START else value
    if isinstance(value, enum.Enum):
        return value.name
    if callable(value):
        return None
    seen = {} if seen is None else seen
    if id(value) in seen:
        return type(value).__name__, seen[id(value)][0]
    seen[id(value)] = (len(seen), value)  # kept alive, so that no id comes twice
    if isinstance(value, Mapping):
        items = ((freeze(key, now, seen), freeze(item, now, seen)) for key, item in value.items())
        return tuple(sorted(items, key=repr)) if len(value) > 1 else tuple(items)
    if isinstance(value, set | frozenset):
        return tuple(sorted((freeze(item, now, seen) for item in value), key=repr))
    if isinstance(value, list | tuple | deque):
        return tuple([freeze(item, now, seen) for item in value])
    if isinstance(value, msgspec.Struct):
        return (type(value).__name__, *[freeze(item, now, seen) for item in msgspec.structs.astuple(value)])
    if isinstance(value, itertools.count):
        return repr(value)
    names = getattr(value, "__dict__", None) or getattr(type(value), "__slots__", ())
    return (
        type(value).__name__,
        *[(name, freeze(getattr(value, name), now, seen)) for name in names if name not in _LEFT_OUT],
    )


@dataclass(frozen=True)
class StateRecord:
    """One state of a part: the events that lead to it, and what the checker wants to know of it."""

    history: tuple[Any, ...]
    facts: Any


P = TypeVar("P", bound="Part")


class Part:
    """One process of the model. ``apply`` makes one event happen and returns what came of it.

    Every part has a clock of its own, which moves only when an event says so: no rule may need two clocks to agree.
    """

    now: float

    def apply(self, event: Any) -> Any:
        raise NotImplementedError

    def facts(self) -> Any:
        raise NotImplementedError

    def core(self) -> Any:
        """The objects whose fields are the state."""
        raise NotImplementedError


class Machine(Generic[P]):
    """All states of one kind of part that were seen. A state's number is only a name."""

    def __init__(self, make: Callable[[Any], P]) -> None:
        self._make = make
        self._numbers: dict[Hashable, int] = {}
        self._steps: dict[tuple[int, Any], tuple[int, Any]] = {}
        self.records: list[StateRecord] = []

    def begin(self, kind: Any) -> int:
        """The first state of a part that begins as ``kind``."""
        return self._number(self._make(kind), (kind,))

    def step(self, state: int, event: Any, key: Hashable = None) -> tuple[int, Any]:
        """The state after ``event``, and what came of it. ``key``: the event's name, if it is not hashable."""
        key = event if key is None else key
        found = self._steps.get((state, key))
        if found is None:
            history = self.records[state].history
            part = self._rebuild(history)
            out = self._apply(part, event)
            found = self._steps[state, key] = (self._number(part, (*history, event)), out)
        return found

    def again(self, state: int, event: Any) -> tuple[int, Any]:
        """What another ``event`` of the same kind, right after it, leads to; nothing is remembered."""
        part = self._rebuild((*self.records[state].history, event))
        out = self._apply(part, event)
        return self._number(part, (*self.records[state].history, event, event)), out

    def replay(self, history: tuple[Any, ...]) -> int:
        """The state that ``history`` leads to."""
        return self._number(self._rebuild(history), history)

    def _rebuild(self, history: tuple[Any, ...]) -> P:
        part = self._make(history[0])
        for event in history[1:]:
            part.apply(event)
        return part

    @staticmethod
    def _apply(part: P, event: Any) -> Any:
        try:
            return part.apply(event)
        except Violation:
            raise
        except Exception as error:
            raise Violation(f"I1: {type(part).__name__} raised {error!r} on {event!r}") from error

    def _number(self, part: P, history: tuple[Any, ...]) -> int:
        frozen = freeze(part.core(), part.now)
        number = self._numbers.get(frozen)
        if number is None:
            number = self._numbers[frozen] = len(self.records)
            self.records.append(StateRecord(history, part.facts()))
        return number
