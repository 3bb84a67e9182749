"""What is remembered of ended leases, and that remembering many costs no more than remembering few."""

from __future__ import annotations

import time
from collections.abc import Callable

from kvlease.core.ids import LeaseId, LeaseToken
from kvlease.core.messages import GoneReason
from kvlease.core.tombstones import Tombstone, Tombstones

TTL_S = 600.0


def stone(ended_at: float) -> Tombstone:
    return Tombstone(LeaseToken(b"t" * 16), GoneReason.RELEASED, ended_at, {})


def filled(number: int, max_count: int) -> Tombstones:
    """The memory of so many leases, one after another."""
    stones = Tombstones(TTL_S, max_count)
    for index in range(number):
        stones.add(LeaseId(f"lease-{index}"), stone(index / 1000))
    return stones


def cpu_s(call: Callable[[], object]) -> float:
    """The processor time of a thousand calls, at best."""

    def once() -> float:
        began = time.thread_time()
        for _ in range(1000):
            call()
        return time.thread_time() - began

    return min(once() for _ in range(3))


def test_the_oldest_are_forgotten_first_by_number_and_by_age() -> None:
    stones = filled(5, max_count=3)
    assert [stones.get(LeaseId(f"lease-{index}")) is not None for index in range(5)] == [False, False, True, True, True]
    assert stones.next_deadline() == 0.002 + TTL_S
    stones.expire(0.003 + TTL_S)
    assert len(stones) == 1
    stones.forget(LeaseId("lease-4"))
    assert stones.next_deadline() is None


def test_a_memory_that_is_full_for_long_is_asked_as_fast_as_a_new_one() -> None:
    new, old = filled(10, max_count=100), filled(140_000, max_count=80_000)
    assert cpu_s(old.next_deadline) < 50 * cpu_s(new.next_deadline)
