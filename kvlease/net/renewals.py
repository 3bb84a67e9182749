"""The heartbeats of one consumer: one small ``Renew`` per producer, listing what changed of what is held there.

Whether a lease was renewed in time is for the producer to say; nothing is guessed here. A peer is pinned, so that its
channel keeps it, while anything is held there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Final, NamedTuple

from kvlease.config import Settings
from kvlease.core.holdings import Holdings
from kvlease.core.ids import ChannelId, Incarnation, LeaseId, LeaseToken, PeerKey, ReaderId
from kvlease.core.messages import AnyReply, GoneHolding, Renew, Renewed, Resend
from kvlease.core.peers import Peer
from kvlease.core.timers import Timers
from kvlease.net.channel import Channel

_RETRY_S: Final = 0.5
"""The longest wait before a renewal that was not answered is tried again."""

TellGone = Callable[[PeerKey, GoneHolding, float | None], None]
"""Told of each reader that a producer lists as gone: where, which, and since when the producer had been asked."""


class RenewCall(NamedTuple):
    """The name of the call that renews at one peer."""

    key: PeerKey


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


class Renewals:
    """See the module. Belongs to the thread of the claims, whose ``counters`` it shares."""

    def __init__(
        self,
        channel_id: ChannelId,
        settings: Settings,
        channel: Channel,
        clock: Callable[[], float],
        counters: Counter[str],
        tell_gone: TellGone,
    ) -> None:
        self._id = channel_id
        self._settings = settings
        self._channel = channel
        self._clock = clock
        self._counters = counters
        self._tell_gone = tell_gone
        self._producers: dict[PeerKey, _Producer] = {}
        self._beats: Timers[PeerKey] = Timers()
        self._generations = count(1)

    # What is held

    def hold(self, key: PeerKey, lease: LeaseId, token: LeaseToken, reader: ReaderId) -> Peer:
        """From now on ``reader``, whose ``Acquire`` is being sent, belongs to what is held; at which peer.

        Raises:
            TooManyPeers: there is no room for the peer; nothing is held then.
        """
        producer = self._producers.get(key)
        if producer is None:
            producer = self._producers[key] = _Producer(self._channel.peer(key), Holdings(self._generations))
        producer.holdings.add(lease, token, reader)
        producer.peer.pinned = True
        return producer.peer

    def confirm(self, key: PeerKey, reader: ReaderId, ttl_s: float) -> None:
        """The reader's lease was granted for ``ttl_s``: renew in time."""
        producer = self._producers[key]
        producer.holdings.confirm(reader)
        at = self._clock() + self._interval_s(ttl_s)
        self._set_beat(producer, at if producer.beat_at is None else min(at, producer.beat_at))

    def remove(self, key: PeerKey, reader: ReaderId) -> Peer:
        """Hold it no more, and have the producer told by the next renewal, if there is one; the peer."""
        producer = self._producers[key]
        producer.holdings.remove(reader)
        self._shrunk(producer)
        return producer.peer

    def drop(self, key: PeerKey, reader: ReaderId) -> None:
        """Hold it no more: the producer refused it or never saw it."""
        producer = self._producers[key]
        producer.holdings.drop(reader)
        self._shrunk(producer)

    def readers(self, key: PeerKey) -> list[ReaderId]:
        """Who is held at that peer."""
        producer = self._producers.get(key)
        return [] if producer is None else list(producer.holdings)

    def forget(self, key: PeerKey) -> None:
        """The channel let the peer go."""
        self._producers.pop(key, None)

    def _shrunk(self, producer: _Producer) -> None:
        if not producer.holdings:
            producer.peer.pinned = False
            self._set_beat(producer, None)

    # Renewing

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

    def answered(self, key: PeerKey, reply: AnyReply) -> None:
        """The producer answered a renewal."""
        producer = self._producers[key]
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
                    self._tell_gone(key, holding, since)
            case Resend():
                self._counters["resends"] += 1
                producer.holdings.resend()
                again, producer.resent = not producer.resent, True
            case _:
                self._counters["confused"] += 1
                producer.holdings.resend()
        if again and producer.holdings:
            self._renew(producer)
        else:
            self._set_beat(producer, now + next_s)

    def lost(self, key: PeerKey) -> None:
        """A renewal will not be answered: try again soon."""
        producer = self._producers[key]
        producer.renewing_since = None
        self._counters["renewals_lost"] += 1
        if producer.holdings.send_once:
            producer.holdings.resend()
        self._set_beat(producer, self._clock() + min(self._settings.heartbeat_interval_s / 4, _RETRY_S))

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
        self._counters["renewals"] += 1
        call = RenewCall(producer.peer.key)
        producer.peer.call(call, request, now, timeout_s, resend=not producer.holdings.send_once)
