"""One remote engine as a consumer sees it: what it was asked, whether it lives, and whether we fit together.

::

    UNKNOWN --greet--> GREETING --welcome--> READY --greet--> GREETING
       ^                  |  |
       |<----give up------+  +---refuse--> REFUSED --forgive--> UNKNOWN
       |
       +--back-- DEAD <--die-- (any of the others)

Greeting is for those who read pages; a scheduler half calls in UNKNOWN. A peer is dead when it was watched and stayed
silent for ``peer_timeout_s`` although it was asked, when a call ran out, resends included, and nothing at all was heard
since it was first sent, when its address leads nowhere, or when another incarnation answers there. The last is for
good: another life is another peer. Other deaths are a negative cache: calls fail at once until the back-off is over,
then one is let through to find out. Any reply of the right incarnation brings the peer back.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Final

from kvlease.core.calls import Calls, PendingCall, RequestFactory
from kvlease.core.ids import PeerKey
from kvlease.core.messages import AnyReply, AnyRequest, Ping, Refused, Welcome
from kvlease.core.silence import Backoff, PeerTiming, Watch

GREETING: Final = ("greeting",)
"""The name of the call that :meth:`Peer.greet` makes."""


class PeerState(enum.Enum):
    """Where we stand with a peer."""

    UNKNOWN = "unknown"
    GREETING = "greeting"
    READY = "ready"
    REFUSED = "refused"
    DEAD = "dead"


class _Turn(enum.Enum):
    """What can happen between us and a peer."""

    GREET = "greet"
    WELCOME = "welcome"
    REFUSE = "refuse"
    GIVE_UP = "give_up"
    FORGIVE = "forgive"
    DIE = "die"
    BACK = "back"


_DEATH: Final = {_Turn.DIE: PeerState.DEAD}

_TRANSITIONS: Final[dict[PeerState, dict[_Turn, PeerState]]] = {
    PeerState.UNKNOWN: {_Turn.GREET: PeerState.GREETING, **_DEATH},
    PeerState.GREETING: {
        _Turn.WELCOME: PeerState.READY,
        _Turn.REFUSE: PeerState.REFUSED,
        _Turn.GIVE_UP: PeerState.UNKNOWN,
        **_DEATH,
    },
    PeerState.READY: {_Turn.GREET: PeerState.GREETING, **_DEATH},
    PeerState.REFUSED: {_Turn.FORGIVE: PeerState.UNKNOWN, **_DEATH},
    PeerState.DEAD: {_Turn.BACK: PeerState.UNKNOWN},
}


@dataclass(frozen=True)
class Answered:
    """The peer answered. Each call ends in exactly one of this and :class:`Unanswered`, or in nothing if cancelled."""

    call: Hashable
    reply: AnyReply


@dataclass(frozen=True)
class Unanswered:
    """``call`` will not be answered.

    ``cause``: ``timeout``, ``peer_dead``, ``peer_restarted``, ``unreachable`` (the address leads nowhere),
    ``unsendable`` (the request has no wire form) or ``cancelled`` (the peer was forgotten).
    """

    call: Hashable
    cause: str


@dataclass(frozen=True)
class PeerDied:
    """The peer is taken for dead: ``silent``, ``timeout``, ``unreachable``, or ``peer_restarted`` (for good)."""

    cause: str


@dataclass(frozen=True)
class PeerBack:
    """A peer that was taken for dead answered."""


@dataclass(frozen=True)
class PeerForgotten:
    """The channel let the peer go; whoever keeps something for it may do so, too."""


Event = Answered | Unanswered | PeerDied | PeerBack | PeerForgotten


class TooManyPeers(Exception):  # noqa: N818 - named for what happened
    """There is no room for one more peer: all that there may be are in use."""


def _ignore(peer: Peer) -> None:
    """Tell nobody."""


class Peer:
    """See the module. Time is an argument; what is to be sent and what happened are taken from the outside.

    ``changed`` is told whenever there may be something new to take or an earlier deadline. ``pinned`` is the owner's
    word that the peer is to be kept although nothing is going on. ``refusal`` is the producer's, while REFUSED.
    """

    def __init__(self, key: PeerKey, timing: PeerTiming, *, changed: Callable[[Peer], None] = _ignore) -> None:
        self.key = key
        self.state = PeerState.UNKNOWN
        self.pinned = False
        self.refusal: Refused | None = None
        self.rtt_s: float | None = None
        self._timing = timing
        self._changed = changed
        self._calls = Calls()
        self._watch = Watch(timing)
        self._backoff = Backoff(timing)
        self._events: list[Event] = []
        self._heard_at: float | None = None
        self._probe_seq: int | None = None
        self._forgive_at = 0.0
        self._restarted = False

    def __repr__(self) -> str:
        return f"<Peer {self.key} {self.state.value} calls={len(self._calls)} watchers={self._watch.watchers}>"

    @property
    def is_busy(self) -> bool:
        """Whether calls are waiting or loads are open."""
        return len(self._calls) > 0 or self._watch.watchers > 0

    @property
    def wants_to_send(self) -> bool:
        """Whether :meth:`take_requests` has something to give."""
        return self._calls.has_outbox

    def call(
        self, call: Hashable, factory: RequestFactory, now: float, timeout_s: float, *, resend: bool = True
    ) -> None:
        """Ask; :class:`Answered` or :class:`Unanswered` follows, once. Without ``resend`` it is sent a single time.

        Raises:
            ValueError: ``call`` is waiting already. Whatever ``factory`` raises passes, too; nothing has begun then.
        """
        if self.state is PeerState.DEAD and not self._may_try(now):
            cause = "peer_restarted" if self._restarted else "peer_dead"
            self._events.append(Unanswered(call, cause))
        else:
            pending = self._calls.start(call, factory, self.key.incarnation, now, timeout_s, resend)
            if self.state is PeerState.DEAD:
                self._probe_seq = pending.seq
        self._changed(self)

    def cancel(self, call: Hashable) -> None:
        """Forget ``call`` if it waits: no event follows, and its reply is nobody's."""
        pending = self._calls.forget(call)
        if pending is not None:
            self._close(pending)
            self._changed(self)

    def greet(self, factory: RequestFactory, now: float, timeout_s: float) -> None:
        """Say hello as the call :data:`GREETING`, which ends like any other.

        While GREETING this joins the greeting under way; while REFUSED the remembered refusal is the answer. A peer
        that is READY is greeted again, and is READY no more until it answers.
        """
        if GREETING in self._calls:
            return
        if self.refusal is not None:
            self._events.append(Answered(GREETING, self.refusal))
            self._changed(self)
            return
        self.call(GREETING, factory, now, timeout_s)
        if self.state is not PeerState.DEAD:
            self._turn(_Turn.GREET)

    def watch(self, now: float) -> None:
        """One more open load: from the first on the peer is asked whether it lives."""
        self._watch.open(now, self._heard_at)
        self._changed(self)

    def unwatch(self, now: float) -> None:
        """One open load less.

        Raises:
            ValueError: there was none.
        """
        if self._watch.watchers == 0:
            raise ValueError(f"{self.key} is not watched")
        self._watch.watchers -= 1
        self._changed(self)

    def hear(self, reply: AnyReply, now: float) -> str | None:
        """Take a reply from the peer's address.

        Returns:
            None when it was of use, else one word why not: ``other_incarnation`` or ``unknown_seq``.
        """
        if reply.incarnation != self.key.incarnation:
            self._replaced(now)
            return "other_incarnation"
        if self._restarted:
            return "other_incarnation"
        awaited = self._watch.ping is not None and reply.seq == self._watch.ping.seq
        self._alive(now)
        pending = self._calls.settle(reply.seq)
        if pending is None:
            return None if awaited else "unknown_seq"
        self.rtt_s = now - pending.started_at
        self._answer(pending, reply, now)
        return None

    def tick(self, now: float) -> None:
        """Let time do its work: resends, time-outs, pings, death by silence, forgiveness."""
        for pending in self._calls.tick(now):
            self._run_out(pending, now)
        if self._watch.watchers > 0 and not self._restarted:
            self._tick_watch(now)
        if self.state is PeerState.REFUSED and now >= self._forgive_at:
            self._turn(_Turn.FORGIVE)
            self.refusal = None

    def next_deadline(self) -> float | None:
        """When :meth:`tick` has something to do."""
        deadlines = [self._calls.next_deadline()]
        if self._watch.watchers > 0 and not self._restarted:
            if self.state is PeerState.DEAD:
                deadlines.append(self._backoff.retry_at if self._probe_seq is None else None)
            else:
                deadlines += [self._watch.ping_at, self._watch.dead_at()]
        if self.state is PeerState.REFUSED:
            deadlines.append(self._forgive_at)
        return min((at for at in deadlines if at is not None), default=None)

    def unreachable(self, now: float) -> None:
        """The peer's address leads nowhere: dead, and its calls are told so."""
        self._die("unreachable", "unreachable", now)
        self._changed(self)

    def unsendable(self, seq: int) -> None:
        """The request ``seq`` has no wire form: its call fails, nothing else changes."""
        pending = self._calls.settle(seq)
        if pending is not None:
            self._fail(pending, "unsendable")
            self._changed(self)

    def abandon(self) -> None:
        """Every waiting call ends as ``cancelled``: the peer is about to be forgotten."""
        for pending in self._calls.forget_all():
            self._fail(pending, "cancelled")

    def take_requests(self) -> list[AnyRequest]:
        """What is to be sent now."""
        return self._calls.take_outbox()

    def take_events(self) -> list[Event]:
        """What happened since the last taking."""
        events, self._events = self._events, []
        return events

    def _turn(self, turn: _Turn) -> None:
        self.state = _TRANSITIONS[self.state][turn]

    def _may_try(self, now: float) -> bool:
        return not self._restarted and self._probe_seq is None and now >= self._backoff.retry_at

    def _close(self, pending: PendingCall) -> None:
        """The call is over without an answer."""
        if pending.seq == self._probe_seq:
            self._probe_seq = None
        if pending.call == GREETING and self.state is PeerState.GREETING:
            self._turn(_Turn.GIVE_UP)

    def _fail(self, pending: PendingCall, cause: str) -> None:
        self._close(pending)
        self._events.append(Unanswered(pending.call, cause))

    def _answer(self, pending: PendingCall, reply: AnyReply, now: float) -> None:
        if pending.call == GREETING:
            match reply:
                case Welcome():
                    self._turn(_Turn.WELCOME)
                case Refused():
                    self._turn(_Turn.REFUSE)
                    self.refusal = reply
                    self._forgive_at = now + self._timing.backoff_max_s
                case _:
                    self._turn(_Turn.GIVE_UP)
        self._events.append(Answered(pending.call, reply))

    def _alive(self, now: float) -> None:
        self._heard_at = now
        self._watch.heard(now)
        if self.state is PeerState.DEAD:
            self._turn(_Turn.BACK)
            self._probe_seq = None
            self._events.append(PeerBack())
            if GREETING in self._calls:
                self._turn(_Turn.GREET)

    def _run_out(self, pending: PendingCall, now: float) -> None:
        if pending.seq == self._probe_seq:
            self._backoff.double(now)
            self._fail(pending, "peer_dead")
            return
        self._fail(pending, "timeout")
        silent = self._heard_at is None or self._heard_at <= pending.started_at
        # One message that was sent once may simply be lost; silence as long as a watched peer is allowed says more.
        since = pending.started_at if self._heard_at is None else self._heard_at
        tells = pending.resend_s is not None or now - since >= self._timing.peer_timeout_s
        if silent and tells and self._watch.watchers == 0 and self.state is not PeerState.DEAD:
            self._die("timeout", "peer_dead", now)

    def _tick_watch(self, now: float) -> None:
        if self.state is PeerState.DEAD:
            if self._may_try(now):
                self._backoff.double(now)
                self._ping(now)
            return
        dead_at = self._watch.dead_at()
        if dead_at is not None and now >= dead_at:
            self._die("silent", "peer_dead", now)
        elif now >= self._watch.ping_at:
            self._ping(now)

    def _ping(self, now: float) -> None:
        ping = self._watch.ping or Ping(seq=self._calls.next_seq(), to=self.key.incarnation)
        self._calls.post(ping)
        self._watch.asked(ping, now)

    def _die(self, cause: str, calls_cause: str, now: float) -> None:
        if self.state is not PeerState.DEAD:
            self._turn(_Turn.DIE)
            self._backoff.start(now)
            self._events.append(PeerDied(cause))
        elif self._probe_seq is not None:
            self._backoff.double(now)
        self.refusal = None
        self._watch.ping = None
        for pending in self._calls.forget_all():
            self._fail(pending, calls_cause)

    def _replaced(self, now: float) -> None:
        if self._restarted:
            return
        self._restarted = True
        if self.state is PeerState.DEAD:
            self._events.append(PeerDied("peer_restarted"))
        self._die("peer_restarted", "peer_restarted", now)
