"""One alarm per key."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvlease.core.timers import Timers


def test_alarms_ring_in_order_and_once() -> None:
    timers: Timers[str] = Timers()
    for key, at in (("b", 2.0), ("a", 1.0), ("c", 3.0)):
        timers.set(key, at)
    assert timers.next_at() == 1.0
    assert timers.take_due(2.0) == ["a", "b"]
    assert timers.take_due(2.0) == []
    assert len(timers) == 1


def test_the_last_setting_counts() -> None:
    timers: Timers[str] = Timers()
    timers.set("a", 1.0)
    timers.set("a", 5.0)
    timers.set("a", 5.0)
    assert timers.take_due(4.0) == []
    timers.set("a", 1.0)
    assert timers.take_due(4.0) == ["a"]
    assert timers.take_due(9.0) == []


def test_a_cancelled_alarm_does_not_ring() -> None:
    timers: Timers[str] = Timers()
    timers.set("a", 1.0)
    timers.set("a", None)
    timers.set("b", None)
    assert timers.next_at() is None
    assert timers.take_due(9.0) == []


def test_moving_one_alarm_a_million_times_takes_no_memory() -> None:
    timers: Timers[str] = Timers()
    for at in range(10_000):
        timers.set("a", float(at))
    assert len(timers._heap) < 200
    assert timers.take_due(1e9) == ["a"]


@given(st.lists(st.tuples(st.integers(0, 5), st.one_of(st.none(), st.integers(0, 20)), st.booleans()), max_size=200))
def test_it_agrees_with_a_dictionary(script: list[tuple[int, int | None, bool]]) -> None:
    timers: Timers[int] = Timers()
    model: dict[int, float] = {}
    for key, at, take in script:
        if take and at is not None:
            due = timers.take_due(at)
            assert sorted(due) == sorted(k for k, v in model.items() if v <= at)
            assert [model[k] for k in due] == sorted(model[k] for k in due)
            model = {k: v for k, v in model.items() if v > at}
        else:
            timers.set(key, None if at is None else float(at))
            model.pop(key, None)
            if at is not None:
                model[key] = float(at)
        assert timers.next_at() == min(model.values(), default=None)
        assert len(timers) == len(model)
