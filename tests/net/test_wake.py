"""Waking another thread: it is never missed, never piles up, and never costs the waker its turn."""

from __future__ import annotations

import os
import select
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from kvlease.net.wake import Waker


@pytest.fixture
def waker() -> Iterator[Waker]:
    waker = Waker()
    yield waker
    waker.close()


def is_awake(waker: Waker) -> bool:
    return bool(select.select([waker.fd], [], [], 0)[0])


def test_a_wake_is_kept_until_it_is_cleared(waker: Waker) -> None:
    assert not is_awake(waker)
    waker.wake()
    assert is_awake(waker)
    waker.clear()
    assert not is_awake(waker)
    waker.wake()
    assert is_awake(waker)


def test_many_wakes_are_one(waker: Waker) -> None:
    for _ in range(1000):
        waker.wake()
    waker.clear()
    assert not is_awake(waker)


def test_clearing_what_was_never_woken_does_nothing(waker: Waker) -> None:
    waker.clear()
    waker.wake()
    assert is_awake(waker)


def test_a_sleeping_thread_is_woken(waker: Waker) -> None:
    found: list[bool] = []
    sleeper = threading.Thread(target=lambda: found.append(bool(select.select([waker.fd], [], [], 20)[0])))
    sleeper.start()
    waker.wake()
    sleeper.join()
    assert found == [True]


def test_no_wake_is_lost_between_two_threads(waker: Waker) -> None:
    queued: list[int] = []
    taken: list[int] = []

    def take() -> None:
        while len(taken) < 2000 and select.select([waker.fd], [], [], 20)[0]:
            waker.clear()
            while queued:
                taken.append(queued.pop(0))

    taker = threading.Thread(target=take)
    taker.start()
    for number in range(2000):
        queued.append(number)
        waker.wake()
    taker.join()
    assert taken == list(range(2000))


@pytest.mark.parametrize("reads_first", [True, False])
def test_a_wake_while_another_one_is_cleared_silences_none_after_it(
    waker: Waker, monkeypatch: pytest.MonkeyPatch, reads_first: bool
) -> None:
    """What another thread may do just before or just after the descriptor is read, which lets go of the interpreter."""
    read = os.eventfd_read

    def read_beside_a_wake(fd: int) -> int:
        number = read(fd) if reads_first else 0
        waker.wake()
        return number if reads_first else read(fd)

    waker.wake()
    with monkeypatch.context() as patch:
        patch.setattr(os, "eventfd_read", read_beside_a_wake)
        waker.clear()
    waker.wake()
    assert is_awake(waker)


def test_after_closing_it_touches_nobody_elses_descriptor() -> None:
    waker = Waker()
    waker.close()
    waker.close()
    other = Waker()  # gets the descriptor that was given back
    assert other.fd == waker.fd
    waker.wake()
    assert not is_awake(other)
    other.close()


def test_waking_does_not_give_the_interpreter_away(waker: Waker) -> None:
    order: list[str] = []
    others = [Waker() for _ in range(200)]
    sleeper = threading.Thread(target=lambda: (select.select([waker.fd], [], [], 20), order.append("woken")))
    sleeper.start()
    before = sys.getswitchinterval()
    sys.setswitchinterval(60.0)  # from here on the interpreter is only given away, never taken away
    try:
        waker.wake()
        until = time.monotonic() + 0.05
        while time.monotonic() < until:  # the other one is awake by now, and wants the interpreter
            pass
        for other in others:
            other.wake()
        order.append("waker")
    finally:
        sys.setswitchinterval(before)
    sleeper.join()
    for other in others:
        other.close()
    assert order == ["waker", "woken"]
