"""What the transfer thread leaves for the engine's thread: reports and numbers, taken without a lock.

A deque's ``append`` and ``popleft`` are atomic, and so is the exchange of one finished dict for another. Beside them
there is only an event, for an engine's thread that has nothing to do but to wait for a report.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass

from kvlease.core.ids import LeaseId, LoadId
from kvlease.core.loads import FailureCause
from kvlease.core.orders import Reports


@dataclass(frozen=True)
class _Sent:
    lease: LeaseId


@dataclass(frozen=True)
class _Received:
    load: LoadId
    cause: FailureCause | None
    unsettled: bool


@dataclass(frozen=True)
class _Settled:
    load: LoadId


class Outbox:
    """Written by one thread, drained by another."""

    def __init__(self) -> None:
        self._items: deque[_Sent | _Received | _Settled] = deque()
        self._stats: dict[str, float] = {}
        self._arrived = threading.Event()

    def __len__(self) -> int:
        """How much there is to :meth:`take`."""
        return len(self._items)

    def sent(self, lease: LeaseId) -> None:
        """The producer's lease is over for this rank."""
        self._items.append(_Sent(lease))

    def received(self, load: LoadId, cause: FailureCause | None = None, unsettled: bool = False) -> None:
        """The load's one report: committed, or failed with ``cause``; ``unsettled`` while a read may still write."""
        self._items.append(_Received(load, cause, unsettled))
        self._arrived.set()

    def settled(self, load: LoadId) -> None:
        """No read of a load that was reported as unsettled can write any more."""
        self._items.append(_Settled(load))

    def wait(self, timeout_s: float) -> bool:
        """Whether a load was reported since the last :meth:`take`, or is within ``timeout_s``."""
        return self._arrived.wait(timeout_s)

    def take(self) -> Reports:
        """Everything since the last call, but of one name only one load that settled.

        Request ids come again. A name that is among ``unsettled`` or ``settled`` already is told of as settled by the
        next call: two loads of one name in one batch would pass for one, and the blocks of the other for free or for
        held for ever.
        """
        self._arrived.clear()
        reports = Reports()
        later: list[_Settled] = []
        while self._items:
            item = self._items.popleft()
            match item:
                case _Sent(lease):
                    reports.sent.add(lease)
                case _Received(load, cause, unsettled):
                    reports.received.add(load)
                    if cause is not None:
                        reports.failed[load] = cause
                    if unsettled:
                        reports.unsettled.add(load)
                case _Settled(load) if load in reports.unsettled or load in reports.settled:
                    later.append(item)
                case _Settled(load):
                    reports.settled.add(load)
        self._items.extendleft(reversed(later))
        return reports

    def publish(self, stats: dict[str, float]) -> None:
        """Replace the numbers; ``stats`` is not changed afterwards."""
        self._stats = stats

    def stats(self) -> dict[str, float]:
        """The numbers as last published."""
        return dict(self._stats)
