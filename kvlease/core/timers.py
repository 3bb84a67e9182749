"""One alarm for each key, so that a loop over thousands of things looks only at those that are due."""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from itertools import count
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

_SPARE = 64


class Timers(Generic[K]):
    """At most one time per key. Setting and cancelling leave old heap entries behind, which are skipped and swept.

    ``_at`` is the truth; a heap entry counts only while it says the same.
    """

    def __init__(self) -> None:
        self._at: dict[K, float] = {}
        self._heap: list[tuple[float, int, K]] = []
        self._order = count()

    def __len__(self) -> int:
        return len(self._at)

    def set(self, key: K, at: float | None) -> None:
        """Let ``key`` be due at ``at`` and at no other time; never, with None."""
        if at is None:
            self._at.pop(key, None)
        elif self._at.get(key) != at:
            self._at[key] = at
            heapq.heappush(self._heap, (at, next(self._order), key))
            self._sweep()

    def next_at(self) -> float | None:
        """The earliest time that is set."""
        while self._heap:
            at, _, key = self._heap[0]
            if self._at.get(key) == at:
                return at
            heapq.heappop(self._heap)
        return None

    def take_due(self, now: float) -> list[K]:
        """The keys due by ``now``, earliest first; they are no longer set."""
        due: list[K] = []
        while (at := self.next_at()) is not None and at <= now:
            _, _, key = heapq.heappop(self._heap)
            del self._at[key]
            due.append(key)
        return due

    def _sweep(self) -> None:
        if len(self._heap) > 2 * len(self._at) + _SPARE:
            self._heap = [entry for entry in self._heap if self._at.get(entry[2]) == entry[0]]
            heapq.heapify(self._heap)
