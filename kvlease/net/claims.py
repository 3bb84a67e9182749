"""What one consumer claims: each reader's claim, the calls that make it and let it go, and what becomes of it.

One claim is one record, keyed by its reader; it exists from ``acquire`` until the load is refused, finished or
released, or its lease is gone. Invariants:

- Each acquire has exactly one of :class:`AcquireGranted` and :class:`AcquireFailed`, or none if the load was let go
  before; after a grant at most one :class:`LeaseGone` follows.
- A reader that may have reached the producer is released there: by a ``Release``, and by the next ``Renew`` if that got
  lost.

What is held in between is renewed by :mod:`kvlease.net.renewals`.
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
)
from kvlease.core.peers import Answered, Event, Peer, PeerDied, PeerForgotten, TooManyPeers, Unanswered
from kvlease.net.channel import Channel
from kvlease.net.renewals import Renewals, RenewCall

logger = logging.getLogger(__name__)

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


class _AcquireCall(NamedTuple):
    claim: _Claim


class _ReleaseCall(NamedTuple):
    number: int


class Claims:
    """See the module. Belongs to one thread, which polls ``channel`` and brings its events to :meth:`happen`.

    ``tell`` is called with each result; ``counters`` only grow.
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
        self._renewals = Renewals(channel_id, settings, channel, clock, self.counters, self._listed_gone)
        self._tell = tell
        self._claims: dict[ReaderId, _Claim] = {}
        self._numbers = count(1)

    def __len__(self) -> int:
        return len(self._claims)

    # What the load does

    def acquire(
        self,
        load: LoadId,
        key: PeerKey,
        lease: LeaseId,
        token: LeaseToken,
        prompt: PromptIdentity,
        *,
        has_siblings: bool = True,
    ) -> None:
        """Claim ``lease`` for ``load``. Does not raise: a claim that cannot even be made fails like any other.

        ``has_siblings``: other loads may claim it, too, a moment later.
        """
        claim = _Claim(load, reader_id(self._id, load), key, lease, token)
        if claim.reader in self._claims:
            logger.error("request %s: claimed twice; the first claim stands", load)
            self.counters["internal"] += 1
            return
        try:
            self._acquire(claim, prompt, has_siblings)
        except TooManyPeers as error:
            self.counters["too_many_peers"] += 1
            logger.warning("request %s: cannot claim at %s: %s", load, key, error)
            self._fail(claim, FailureCause.TOO_MANY_PEERS)
        except Exception:
            self.counters["internal"] += 1
            logger.exception("request %s: no claim could be made", load)
            self._fail(claim, FailureCause.INTERNAL)

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
        self._renewals.tick()

    def next_deadline(self) -> float | None:
        """When :meth:`tick` has something to do."""
        return self._renewals.next_deadline()

    def _happen(self, key: PeerKey, event: Event) -> None:
        match event:
            case Answered(call=_AcquireCall(claim=claim), reply=reply):
                if self._claims.get(claim.reader) is claim:
                    self._acquired(claim, reply)
            case Unanswered(call=_AcquireCall(claim=claim), cause=cause):
                if self._claims.get(claim.reader) is claim:
                    self.counters["acquires_lost"] += 1
                    self._give_up(claim, _UNANSWERED.get(cause, FailureCause.PEER_DEAD))
            case Answered(call=RenewCall(), reply=reply):
                self._renewals.answered(key, reply)
            case Unanswered(call=RenewCall()):
                self._renewals.lost(key)
            case Answered(call=_ReleaseCall()):
                self.releases_open -= 1
            case Unanswered(call=_ReleaseCall()):
                self.releases_open -= 1
                self.counters["releases_lost"] += 1
            case PeerDied(cause="peer_restarted"):
                self._all_gone(key)
            case PeerForgotten():
                self._renewals.forget(key)
            case _:
                pass

    # Claims

    def _acquire(self, claim: _Claim, prompt: PromptIdentity, has_siblings: bool) -> None:
        if len(claim.reader) > ID_CHARS_MAX or len(claim.lease) > ID_CHARS_MAX:
            logger.warning("request %s: an id of more than %d characters", claim.load[:64], ID_CHARS_MAX)
            self._fail(claim, FailureCause.BAD_HANDOFF)
            return
        digest = prompt.digest()
        peer = self._renewals.hold(claim.key, claim.lease, claim.token, claim.reader)
        self._claims[claim.reader] = claim

        def request(seq: int, to: Incarnation) -> Acquire:
            return Acquire(
                seq=seq,
                to=to,
                lease=claim.lease,
                token=claim.token,
                reader=claim.reader,
                channel=self._id,
                digest=digest,
                has_siblings=has_siblings,
            )

        self.counters["acquires"] += 1
        peer.call(_AcquireCall(claim), request, self._clock(), self._settings.acquire_timeout_s)

    def _acquired(self, claim: _Claim, reply: AnyReply) -> None:
        match reply:
            case Granted():
                claim.granted_at = self._clock()
                self._renewals.confirm(claim.key, claim.reader, reply.ttl_s)
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
            self._renewals.drop(claim.key, claim.reader)
        self._tell(AcquireFailed(claim.load, cause))

    def _give_up(self, claim: _Claim, cause: FailureCause) -> None:
        """Forget a claim that the producer may know of, there too, and tell."""
        self._let_go(claim, release=True)
        self._tell(AcquireFailed(claim.load, cause))

    def _let_go(self, claim: _Claim | None, *, release: bool) -> None:
        if claim is None:
            return
        del self._claims[claim.reader]
        peer = self._renewals.remove(claim.key, claim.reader)
        if claim.granted_at is None:
            peer.cancel(_AcquireCall(claim))
        if release:
            self._release(peer, claim.lease, claim.token, claim.reader)

    def _release(self, peer: Peer, lease: LeaseId, token: LeaseToken, reader: ReaderId) -> None:
        def request(seq: int, to: Incarnation) -> Release:
            return Release(seq=seq, to=to, lease=lease, token=token, reader=reader)

        self.counters["releases"] += 1
        call = _ReleaseCall(next(self._numbers))
        peer.call(call, request, self._clock(), self._settings.acquire_timeout_s)
        self.releases_open += 1

    def _gone(self, claim: _Claim, why: GoneReason) -> None:
        del self._claims[claim.reader]
        self._renewals.remove(claim.key, claim.reader)
        self.counters["leases_gone"] += 1
        self._tell(LeaseGone(claim.load, why))

    def _all_gone(self, key: PeerKey) -> None:
        for reader in self._renewals.readers(key):
            if self._claims[reader].granted_at is not None:
                self._gone(self._claims[reader], GoneReason.UNKNOWN)

    def _listed_gone(self, key: PeerKey, holding: GoneHolding, since: float | None) -> None:
        """The producer says that a reader of ours lost its lease.

        It cannot mean a claim that was granted after it was asked. ``COMMITTED`` is what a reader that has read
        everything looks like until its load is reported.
        """
        claim = self._claims.get(ReaderId(holding.reader))
        if claim is None or claim.key != key or holding.why is GoneReason.COMMITTED:
            return
        if claim.granted_at is not None and since is not None and claim.granted_at <= since:
            self._gone(claim, holding.why)
