"""What a producer remembers of ended leases, so that a late message still gets a precise answer.

A tombstone keeps who had committed: a commit whose answer was lost is repeated, and must hear ``Committed`` again
although the lease has ended since. The memory is bounded in age and in number; what it forgot is answered "unknown".
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvlease.core.ids import LeaseId, LeaseToken, ReaderId
from kvlease.core.messages import GoneReason
from kvlease.core.readers import Reader


@dataclass(frozen=True, slots=True)
class Tombstone:
    """One ended lease. ``readers`` holds only those of whom at least one rank committed."""

    token: LeaseToken = field(repr=False)
    why: GoneReason
    ended_at: float
    readers: Mapping[ReaderId, Reader]


class Tombstones:
    """The ended leases of the last ``ttl_s`` seconds, at most ``max_count`` of them: the oldest is forgotten first."""

    def __init__(self, ttl_s: float, max_count: int) -> None:
        self._ttl_s = ttl_s
        self._max_count = max_count
        # In the order in which the leases ended. A dict whose first entries were deleted looks for the next one anew
        # each time, past all of their places; an OrderedDict knows it.
        self._stones: OrderedDict[LeaseId, Tombstone] = OrderedDict()

    def __len__(self) -> int:
        return len(self._stones)

    def get(self, lease: LeaseId) -> Tombstone | None:
        """The tombstone of ``lease``, if it is remembered."""
        return self._stones.get(lease)

    def add(self, lease: LeaseId, stone: Tombstone) -> None:
        """Remember ``lease``, which has no tombstone yet, and forget the oldest if they are too many."""
        self._stones[lease] = stone
        if len(self._stones) > self._max_count:
            self._stones.popitem(last=False)

    def forget(self, lease: LeaseId) -> None:
        """Drop the tombstone of ``lease``: its name is used again."""
        self._stones.pop(lease, None)

    def expire(self, now: float) -> None:
        """Forget what ended ``ttl_s`` ago or earlier."""
        while (deadline := self.next_deadline()) is not None and deadline <= now:
            self._stones.popitem(last=False)

    def next_deadline(self) -> float | None:
        """When the oldest tombstone is to be forgotten."""
        for stone in self._stones.values():
            return stone.ended_at + self._ttl_s
        return None
