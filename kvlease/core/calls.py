"""The calls one peer has not answered yet: which are to be sent (again), and which have waited long enough.

A call is one request that wants one reply. Its ``seq`` stays the same however often it is sent, so a producer that
answered already answers the same again, and a late second reply finds nobody waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Final

from kvlease.core.ids import Incarnation
from kvlease.core.messages import AnyRequest
from kvlease.core.timers import Timers

RESEND_S: Final = 0.2
"""The wait before a request is sent a second time; it doubles with each further time."""

RequestFactory = Callable[[int, Incarnation], AnyRequest]
"""Makes the request, given the ``seq`` and ``to`` it must carry."""


@dataclass
class PendingCall:
    """One unanswered call. ``resend_s`` is the wait before the next sending; None: it is sent once."""

    call: Hashable
    request: AnyRequest
    started_at: float
    deadline: float
    resend_s: float | None

    @property
    def seq(self) -> int:
        """What its reply carries."""
        return self.request.seq


class Calls:
    """All unanswered calls to one peer, by ``seq``, and the outbox of what is to be sent now.

    The outbox holds each request at most once, so nothing piles up while nobody takes from it.
    """

    def __init__(self) -> None:
        self._pending: dict[int, PendingCall] = {}
        self._seqs: dict[Hashable, int] = {}
        self._timers: Timers[int] = Timers()
        self._outbox: dict[int, AnyRequest] = {}
        self._last_seq = 0

    def __len__(self) -> int:
        return len(self._pending)

    def __contains__(self, call: Hashable) -> bool:
        return call in self._seqs

    @property
    def has_outbox(self) -> bool:
        """Whether something is to be sent."""
        return bool(self._outbox)

    def next_seq(self) -> int:
        """A number no request to this peer has had."""
        self._last_seq += 1
        return self._last_seq

    def start(
        self, call: Hashable, factory: RequestFactory, to: Incarnation, now: float, timeout_s: float, resend: bool
    ) -> PendingCall:
        """Ask, and wait for the answer for at most ``timeout_s``.

        Raises:
            ValueError: ``call`` is waiting already. Whatever ``factory`` raises passes, too; nothing has begun then.
        """
        if call in self._seqs:
            raise ValueError(f"call {call!r} is still waiting for its answer")
        request = factory(self.next_seq(), to)
        pending = PendingCall(call, request, now, now + timeout_s, RESEND_S if resend else None)
        self._pending[pending.seq] = pending
        self._seqs[call] = pending.seq
        self._send(pending, now)
        return pending

    def settle(self, seq: int) -> PendingCall | None:
        """The call that waits for ``seq``, which then waits no more; None when nobody does."""
        pending = self._pending.pop(seq, None)
        if pending is not None:
            del self._seqs[pending.call]
            self._timers.set(seq, None)
            self._outbox.pop(seq, None)
        return pending

    def forget(self, call: Hashable) -> PendingCall | None:
        """As :meth:`settle`, by the call's own name."""
        seq = self._seqs.get(call)
        return None if seq is None else self.settle(seq)

    def forget_all(self) -> list[PendingCall]:
        """Forget every call, oldest first, and whatever was to be sent."""
        forgotten = list(self._pending.values())
        for pending in forgotten:
            self.settle(pending.seq)
        self._outbox.clear()
        return forgotten

    def post(self, request: AnyRequest) -> None:
        """Send ``request`` once; its reply is nobody's."""
        self._outbox[request.seq] = request

    def tick(self, now: float) -> list[PendingCall]:
        """Put what is due into the outbox again; the calls whose time is over are forgotten and returned."""
        expired = []
        for seq in self._timers.take_due(now):
            pending = self._pending[seq]
            if now >= pending.deadline:
                self.settle(seq)
                expired.append(pending)
            else:
                self._send(pending, now)
        return expired

    def next_deadline(self) -> float | None:
        """When :meth:`tick` has something to do."""
        return self._timers.next_at()

    def take_outbox(self) -> list[AnyRequest]:
        """What is to be sent now, oldest first."""
        requests = list(self._outbox.values())
        self._outbox.clear()
        return requests

    def _send(self, pending: PendingCall, now: float) -> None:
        self._outbox[pending.seq] = pending.request
        again_at = pending.deadline
        if pending.resend_s is not None:
            again_at = min(again_at, now + pending.resend_s)
            pending.resend_s *= 2
        self._timers.set(pending.seq, again_at)
