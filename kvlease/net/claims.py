"""What one consumer claims: each reader's claim, what is held at each producer, and the calls in between.

One claim is one record, keyed by its reader; it exists from ``acquire`` until the load is refused, finished or
released, or its lease is gone. Invariants:

- Each acquire has exactly one of :class:`AcquireGranted` and :class:`AcquireFailed`, or none if the load was let go
  before; after a grant at most one :class:`LeaseGone` follows.
- A reader that may have reached the producer is released there: by a ``Release``, and by the next ``Renew`` if that got
  lost.
- One small ``Renew`` per producer and heartbeat. Whether a lease was renewed in time is for the producer to say;
  nothing is guessed here.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Final, NamedTuple

from kvlease.config import Settings
from kvlease.core.digest import PromptIdentity
from kvlease.core.holdings import Holdings
from kvlease.core.ids import ChannelId, Incarnation, LeaseId, LeaseToken, LoadId, PeerKey, ReaderId, reader_id
from kvlease.core.loads import FailureCause
from kvlease.core.messages import (
    ID_CHARS_MAX,
    Acquire,
    AnyReply,
    Gone,
    GoneHolding,
    GoneReason,
    Granted,
    Release,
    Renew,
    Renewed,
    Resend,
)
from kvlease.core.peers import Answered, Event, Peer, PeerDied, PeerForgotten, Unanswered
from kvlease.core.timers import Timers
from kvlease.net.channel import Channel, TooManyPeers

logger = logging.getLogger(__name__)

_RETRY_S: Final = 0.5
"""The longest wait before a renewal that was not answered is tried again."""

_UNANSWERED: Final = {
    "timeout": FailureCause.ACQUIRE_TIMEOUT,
    "peer_restarted": FailureCause.PEER_RESTARTED,
    "unsendable": FailureCause.BAD_HANDOFF,
    "cancelled": FailureCause.INTERNAL,
}


@dataclass(frozen=True)
class AcquireGranted:
    """The load's lease is held, and renewed from now on."""

    load: LoadId
    granted: Granted


@dataclass(frozen=True)
class AcquireFailed:
    """The load has no lease, and why. There is nothing left to be released."""

    load: LoadId
    cause: FailureCause


@dataclass(frozen=True)
class LeaseGone:
    """A lease that was granted is over before its load: it is renewed no more and need not be released.

    It only spares work that cannot succeed; the commit decides. ``UNKNOWN`` when the producer was restarted.
    """

    load: LoadId
    why: GoneReason


Result = AcquireGranted | AcquireFailed | LeaseGone


@dataclass(eq=False)
class _Claim:
    """One reader's claim. ``granted_at`` is None while its ``Acquire`` is unanswered."""

    load: LoadId
    reader: ReaderId
    key: PeerKey
    lease: LeaseId
    token: LeaseToken = field(repr=False)
    granted_at: float | None = None


@dataclass(eq=False)
class _Producer:
    """What is held at one peer.

    ``renewing_since``: when the renewal under way began. ``beat_at``: when the next one is due. ``resent``: this beat's
    list was refused once already and sent again in full, which is not to become a loop.
    """

    peer: Peer
    holdings: Holdings
    renewing_since: float | None = None
    beat_at: float | None = None
    resent: bool = False


class _AcquireCall(NamedTuple):
    claim: _Claim


class _ReleaseCall(NamedTuple):
    number: int


class _RenewCall(NamedTuple):
    key: PeerKey


class Claims:
    """See the module. Belongs to one thread, which polls ``channel`` and brings its events to :meth:`happen`.

    ``results`` is appended to; ``counters`` only grow.
    """

    def __init__(
        self,
        channel_id: ChannelId,
        settings: Settings,
        channel: Channel,
        clock: Callable[[], float],
        tell: Callable[[Result], None],
    ) -> None:
        self.counters: Counter[str] = Counter()
        self.releases_open = 0
        self._id = channel_id
        self._settings = settings
        self._channel = channel
        self._clock = clock
        self._tell = tell
        self._claims: dict[ReaderId, _Claim] = {}
        self._producers: dict[PeerKey, _Producer] = {}
        self._beats: Timers[PeerKey] = Timers()
        self._generations = count(1)
        self._numbers = count(1)

    def __len__(self) -> int:
        return len(self._claims)

    # What the load does

    def acquire(self, load: LoadId, key: PeerKey, lease: LeaseId, token: LeaseToken, prompt: PromptIdentity) -> None:
        """Claim ``lease`` for ``load``. Does not raise: a claim that cannot even be made fails like any other."""
        claim = _Claim(load, reader_id(self._id, load), key, lease, token)
        if claim.reader in self._claims:
            logger.error("request %s: claimed twice; the first claim stands", load)
            self.counters["internal"] += 1
            return
        try:
            self._acquire(claim, prompt)
        except TooManyPeers as error:
            self._cannot_claim(claim, "too_many_peers", str(error))
        except Exception as error:
            logger.exception("request %s", load)
            self._cannot_claim(claim, "internal", repr(error))

    def finish(self, load: LoadId) -> None:
        """The load is committed everywhere: hold its lease no more. Unknown loads are ignored."""
        self._let_go(self._claims.get(reader_id(self._id, load)), release=False)

    def release(self, load: LoadId) -> None:
        """The load will not read: tell the producer. Unknown loads are ignored."""
        self._let_go(self._claims.get(reader_id(self._id, load)), release=True)

    def release_unclaimed(self, key: PeerKey, lease: LeaseId, token: LeaseToken) -> None:
        """Nobody here will ever read ``lease``: tell the producer, as a reader that never acquired.

        Raises:
            TooManyPeers: there is no room for the peer.
        """
        reader = reader_id(self._id, LoadId(f"unclaimed {next(self._numbers)}"))
        self._release(self._channel.peer(key), lease, token, reader)

    def loads(self) -> list[LoadId]:
        """The loads with a claim, granted or not yet."""
        return [claim.load for claim in self._claims.values()]

    # What the producers and the clock do

    def happen(self, key: PeerKey, event: Event) -> None:
        """Take in what the channel reports. Does not raise."""
        try:
            self._happen(key, event)
        except Exception:
            self.counters["internal"] += 1
            logger.exception("%s: could not take in %s", key, type(event).__name__)
            if isinstance(event, Answered | Unanswered) and isinstance(event.call, _AcquireCall):
                claim = event.call.claim
                if self._claims.get(claim.reader) is claim and claim.granted_at is None:
                    self._fail(claim, FailureCause.INTERNAL)

    def tick(self) -> None:
        """Renew where it is time."""
        now = self._clock()
        for key in self._beats.take_due(now):
            producer = self._producers[key]
            self._set_beat(producer, now + self._settings.heartbeat_interval_s)
            producer.resent = False
            if producer.renewing_since is None:
                self._renew(producer)

    def next_deadline(self) -> float | None:
        """When :meth:`tick` has something to do."""
        return self._beats.next_at()

    def _happen(self, key: PeerKey, event: Event) -> None:
        match event:
            case Answered(call=_AcquireCall(claim=claim), reply=reply):
                if self._claims.get(claim.reader) is claim:
                    self._acquired(claim, reply)
            case Unanswered(call=_AcquireCall(claim=claim), cause=cause):
                if self._claims.get(claim.reader) is claim:
                    self.counters["acquires_lost"] += 1
                    self._give_up(claim, _UNANSWERED.get(cause, FailureCause.PEER_DEAD))
            case Answered(call=_RenewCall(), reply=reply):
                self._renewed(self._producers[key], reply)
            case Unanswered(call=_RenewCall()):
                self._renewal_lost(self._producers[key])
            case Answered(call=_ReleaseCall()):
                self.releases_open -= 1
            case Unanswered(call=_ReleaseCall()):
                self.releases_open -= 1
                self.counters["releases_lost"] += 1
            case PeerDied(cause="peer_restarted") if key in self._producers:
                self._all_gone(self._producers[key])
            case PeerForgotten():
                self._producers.pop(key, None)
            case _:
                pass

    # Claims

    def _acquire(self, claim: _Claim, prompt: PromptIdentity) -> None:
        if len(claim.reader) > ID_CHARS_MAX or len(claim.lease) > ID_CHARS_MAX:
            logger.warning("request %s: an id of more than %d characters", claim.load[:64], ID_CHARS_MAX)
            self._fail(claim, FailureCause.BAD_HANDOFF)
            return
        digest = prompt.digest()
        producer = self._producer(claim.key)
        self._claims[claim.reader] = claim
        producer.holdings.add(claim.lease, claim.token, claim.reader)
        producer.peer.pinned = True

        def request(seq: int, to: Incarnation) -> Acquire:
            return Acquire(
                seq=seq,
                to=to,
                lease=claim.lease,
                token=claim.token,
                reader=claim.reader,
                channel=self._id,
                digest=digest,
            )

        self.counters["acquires"] += 1
        producer.peer.call(_AcquireCall(claim), request, self._clock(), self._settings.acquire_timeout_s)

    def _cannot_claim(self, claim: _Claim, kind: str, why: str) -> None:
        self.counters[kind] += 1
        logger.error("request %s: no claim could be made: %s", claim.load, why)
        self._fail(claim, FailureCause.INTERNAL)

    def _acquired(self, claim: _Claim, reply: AnyReply) -> None:
        match reply:
            case Granted():
                now = self._clock()
                claim.granted_at = now
                producer = self._producers[claim.key]
                producer.holdings.confirm(claim.reader)
                at = now + self._interval_s(reply.ttl_s)
                self._set_beat(producer, at if producer.beat_at is None else min(at, producer.beat_at))
                self._tell(AcquireGranted(claim.load, reply))
            case Gone():
                self._fail(claim, FailureCause(f"gone_{reply.why.value}"))
            case _:
                self.counters["confused"] += 1
                self._give_up(claim, FailureCause.PEER_CONFUSED)

    def _fail(self, claim: _Claim, cause: FailureCause) -> None:
        """Forget a claim that the producer refused or never saw, and tell."""
        if self._claims.get(claim.reader) is claim:
            del self._claims[claim.reader]
            self._producers[claim.key].holdings.drop(claim.reader)
            self._shrunk(self._producers[claim.key])
        self._tell(AcquireFailed(claim.load, cause))

    def _give_up(self, claim: _Claim, cause: FailureCause) -> None:
        """Forget a claim that the producer may know of, there too, and tell."""
        self._let_go(claim, release=True)
        self._tell(AcquireFailed(claim.load, cause))

    def _let_go(self, claim: _Claim | None, *, release: bool) -> None:
        if claim is None:
            return
        del self._claims[claim.reader]
        producer = self._producers[claim.key]
        producer.holdings.remove(claim.reader)
        if claim.granted_at is None:
            producer.peer.cancel(_AcquireCall(claim))
        if release:
            self._release(producer.peer, claim.lease, claim.token, claim.reader)
        self._shrunk(producer)

    def _release(self, peer: Peer, lease: LeaseId, token: LeaseToken, reader: ReaderId) -> None:
        def request(seq: int, to: Incarnation) -> Release:
            return Release(seq=seq, to=to, lease=lease, token=token, reader=reader)

        self.counters["releases"] += 1
        call = _ReleaseCall(next(self._numbers))
        peer.call(call, request, self._clock(), self._settings.acquire_timeout_s)
        self.releases_open += 1

    def _gone(self, claim: _Claim, why: GoneReason) -> None:
        del self._claims[claim.reader]
        producer = self._producers[claim.key]
        producer.holdings.remove(claim.reader)
        self._shrunk(producer)
        self.counters["leases_gone"] += 1
        self._tell(LeaseGone(claim.load, why))

    def _all_gone(self, producer: _Producer) -> None:
        for reader in list(producer.holdings):
            if self._claims[reader].granted_at is not None:
                self._gone(self._claims[reader], GoneReason.UNKNOWN)

    # Producers and their renewals

    def _producer(self, key: PeerKey) -> _Producer:
        producer = self._producers.get(key)
        if producer is None:
            producer = _Producer(self._channel.peer(key), Holdings(self._generations))
            self._producers[key] = producer
        return producer

    def _shrunk(self, producer: _Producer) -> None:
        if not producer.holdings:
            producer.peer.pinned = False
            self._set_beat(producer, None)

    def _interval_s(self, ttl_s: float) -> float:
        """The time to the next renewal: a heartbeat, or less where leases are shorter than ours (a NaN is not)."""
        heartbeat_s = self._settings.heartbeat_interval_s
        return min(heartbeat_s, max(ttl_s / 3, heartbeat_s / 10)) if ttl_s >= 0 else heartbeat_s

    def _set_beat(self, producer: _Producer, at: float | None) -> None:
        producer.beat_at = at if producer.holdings else None
        self._beats.set(producer.peer.key, producer.beat_at)

    def _renew(self, producer: _Producer) -> None:
        renewal = producer.holdings.renewal()

        def request(seq: int, to: Incarnation) -> Renew:
            return Renew(seq=seq, to=to, channel=self._id, **renewal._asdict())

        now = self._clock()
        timeout_s = min(self._settings.heartbeat_interval_s, self._settings.acquire_timeout_s)
        producer.renewing_since = now
        self.counters["renewals"] += 1
        call = _RenewCall(producer.peer.key)
        producer.peer.call(call, request, now, timeout_s, resend=not producer.holdings.send_once)

    def _renewed(self, producer: _Producer, reply: AnyReply) -> None:
        since, producer.renewing_since = producer.renewing_since, None
        now = self._clock()
        next_s = self._settings.heartbeat_interval_s
        self._set_beat(producer, now + next_s)
        again = False
        match reply:
            case Renewed():
                next_s = self._interval_s(reply.ttl_s)
                again = producer.holdings.renewed()
                for holding in reply.gone:
                    self._listed_gone(producer, holding, since)
            case Resend():
                self.counters["resends"] += 1
                producer.holdings.resend()
                again, producer.resent = not producer.resent, True
            case _:
                self.counters["confused"] += 1
                producer.holdings.resend()
        if again and producer.holdings:
            self._renew(producer)
        else:
            self._set_beat(producer, now + next_s)

    def _listed_gone(self, producer: _Producer, holding: GoneHolding, since: float | None) -> None:
        """The producer says that a reader of ours lost its lease.

        It cannot mean a claim that was granted after it was asked. ``COMMITTED`` is what a reader that has read
        everything looks like until its load is reported.
        """
        claim = self._claims.get(ReaderId(holding.reader))
        if claim is None or claim.key != producer.peer.key or holding.why is GoneReason.COMMITTED:
            return
        if claim.granted_at is not None and since is not None and claim.granted_at <= since:
            self._gone(claim, holding.why)

    def _renewal_lost(self, producer: _Producer) -> None:
        producer.renewing_since = None
        self.counters["renewals_lost"] += 1
        if producer.holdings.send_once:
            producer.holdings.resend()
        self._set_beat(producer, self._clock() + min(self._settings.heartbeat_interval_s / 4, _RETRY_S))
