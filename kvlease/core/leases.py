"""The producer's lease table: the one authority on which KV blocks may still be read, and by whom.

The states of a lease are drawn in :mod:`kvlease.core.lease`, those of a reader in :mod:`kvlease.core.readers`.
Invariants, for whatever arrives in whatever order:

* A lease's blocks may be freed once it is in :meth:`LeaseTable.take_ended`, where each granted lease appears exactly
  once.
* ``Committed`` is answered only while the lease is live, or to the repetition of a commit that was so answered. A lease
  is live until :meth:`LeaseTable.expire` or a message ended it; a deadline that has passed has ended nothing yet.
* Only a reader whose ``Acquire`` carried the right digest can ever commit.
* Everything ends: an unclaimed lease after ``lease_duration_s``, any lease ``max_lease_lifetime_s`` after its grant.

Time is ``now`` in seconds on a clock that never goes back.
"""

from __future__ import annotations

import hmac
import math
from collections import Counter, OrderedDict
from typing import Final

from kvlease.core.ids import ChannelId, Incarnation, LeaseId, ReaderId
from kvlease.core.lease import Ended, Grant, Lease, LeaseEvent, LeaseState, LeaseTiming, next_state
from kvlease.core.messages import (
    Acquire,
    AnyReply,
    Checksum,
    Commit,
    Committed,
    Gone,
    GoneHolding,
    GoneReason,
    Granted,
    Holding,
    ProtocolError,
    Release,
    Released,
    Renew,
    Renewed,
    Request,
    Resend,
)
from kvlease.core.readers import Channel, Reader, ReaderState, RenewStep
from kvlease.core.timers import Timers
from kvlease.core.tombstones import Tombstone, Tombstones

__all__ = ["Ended", "Grant", "LeaseRequest", "LeaseState", "LeaseTable", "LeaseTiming"]

_FINAL: Final = {ReaderState.RELEASED: GoneReason.RELEASED, ReaderState.COMMITTED: GoneReason.COMMITTED}

LeaseRequest = Acquire | Renew | Commit | Release
"""What the table answers; the rest of the protocol needs no lease."""


class LeaseTable:
    """All live leases of one producer, what their consumers hold, and a memory of those that ended.

    ``counters`` only grow. ``acquired``, ``committed`` and ``released`` count readers, once each; ``granted``,
    ``ended``, ``expired`` and ``revoked`` count leases; ``renewed``, ``resend`` and ``refused_<why>`` count answers.
    """

    def __init__(self, incarnation: Incarnation, timing: LeaseTiming) -> None:
        self.incarnation = incarnation
        self.counters: Counter[str] = Counter()
        self._timing = timing
        self._leases: OrderedDict[LeaseId, Lease] = OrderedDict()  # of their grants; the oldest is asked for often
        self._channels: dict[ChannelId, Channel] = {}
        self._tombstones = Tombstones(timing.tombstone_ttl_s, timing.tombstone_max)
        self._alarms: Timers[LeaseId] = Timers()  # when each lease ends, whatever its channels do
        self._channel_alarms: Timers[ChannelId] = Timers()
        self._ended: list[Ended] = []

    def __len__(self) -> int:
        return len(self._leases)

    def __repr__(self) -> str:
        return f"<LeaseTable leases={len(self)} channels={self.num_channels} tombstones={self.num_tombstones}>"

    @property
    def num_tombstones(self) -> int:
        """How many ended leases are remembered."""
        return len(self._tombstones)

    @property
    def num_channels(self) -> int:
        """How many consumers hold something, or did a short while ago."""
        return len(self._channels)

    def state_of(self, lease: LeaseId) -> LeaseState | None:
        """The state of ``lease`` while it is live."""
        record = self._leases.get(lease)
        return record.state if record else None

    def oldest_grant(self, now: float) -> float:
        """The age in seconds of the oldest live lease; 0 without any."""
        for lease in self._leases.values():
            return now - lease.granted_at
        return 0.0

    def take_ended(self) -> list[Ended]:
        """The leases that ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    # Events of the producer itself

    def grant(self, grant: Grant, now: float) -> None:
        """Lend ``grant.blocks`` to whoever shows the token and the digest.

        Raises:
            ValueError: a lease of that name is live. Nothing has changed; the caller must not wait for a second end.
        """
        if grant.lease in self._leases:
            raise ValueError(f"a lease named {grant.lease} is live already")
        self._tombstones.forget(grant.lease)
        lease = self._leases[grant.lease] = Lease(grant, granted_at=now)
        self._set_alarm(lease, now + self._timing.lease_duration_s)
        self.counters["granted"] += 1

    def expire(self, now: float) -> None:
        """End what nobody renewed in time, and forget what is old enough. Call it when the inbox is empty."""
        for channel_id in self._channel_alarms.take_due(now):
            channel = self._channels[channel_id]
            for reader in channel.lapsing(now):
                self._leave(self._leases[channel.held[reader]], reader, ReaderState.LAPSED, now)
            if channel.deadline <= now:
                del self._channels[channel_id]
            else:
                self._channel_alarms.set(channel_id, channel.next_deadline())
        for lease_id in self._alarms.take_due(now):
            lease = self._leases[lease_id]
            if lease.state is LeaseState.LINGERING and now >= self._grace_end(lease):
                self._end(lease, LeaseEvent.RELEASE, GoneReason.COMMITTED, now)
            else:
                self._end(lease, LeaseEvent.EXPIRE, GoneReason.EXPIRED, now)
        self._tombstones.expire(now)

    def revoke_all(self, now: float) -> None:
        """End every lease: its blocks are about to hold something else."""
        for lease in list(self._leases.values()):
            self._end(lease, LeaseEvent.REVOKE, GoneReason.REVOKED, now)

    def next_deadline(self) -> float | None:
        """When :meth:`expire` has something to do if nothing is heard before."""
        deadlines = (self._channel_alarms.next_at(), self._alarms.next_at(), self._tombstones.next_deadline())
        return min((at for at in deadlines if at is not None), default=None)

    # Requests of the consumers

    def handle(self, request: LeaseRequest, now: float) -> AnyReply:
        """Answer one request. The same request again gets an answer that says the same, and changes nothing more.

        Raises:
            ProtocolError: ``too_many_readers`` or ``bad_rank``. Nothing has changed.
        """
        if request.to != self.incarnation:
            return self._refuse(request, GoneReason.UNKNOWN, now)
        match request:
            case Acquire():
                return self._acquire(request, now)
            case Renew():
                return self._renew(request, now)
            case Commit():
                return self._commit(request, now)
        return self._release(request, now)

    def readable(self, request: Checksum, now: float) -> Grant | Gone:
        """What the reader that asks may read, if the lease is live and the reader has acquired it and not left."""
        if request.to != self.incarnation:
            return self._refuse(request, GoneReason.UNKNOWN, now)
        lease = self._find(request)
        if not isinstance(lease, Lease):
            return self._refuse(request, lease, now)
        reader = lease.readers.get(ReaderId(request.reader))
        if reader is None:
            return self._refuse(request, GoneReason.UNKNOWN, now)
        return self._refuse(request, _FINAL[reader.state], now) if reader.state in _FINAL else lease.grant

    def _acquire(self, request: Acquire, now: float) -> AnyReply:
        lease = self._find(request)
        if not isinstance(lease, Lease):
            return self._refuse(request, lease, now)
        if request.digest != lease.grant.digest:
            lease.is_mistaken = True
            return self._refuse(request, GoneReason.MISMATCH, now)
        reader_id, channel_id = ReaderId(request.reader), ChannelId(request.channel)
        reader = lease.readers.get(reader_id)
        if reader is not None and reader.state in _FINAL:
            return self._refuse(request, _FINAL[reader.state], now)
        if reader is None:
            reader = lease.add_reader(reader_id)
            self.counters["acquired"] += 1
        lease.has_siblings |= request.has_siblings
        channel = self._channels.setdefault(channel_id, Channel(deadline=now))
        channel.deadline = now + self._timing.lease_extension_s
        self._hold(lease, reader_id, reader, channel_id, now)
        self._channel_alarms.set(channel_id, channel.next_deadline())
        lifetime_s = lease.granted_at + self._timing.max_lease_lifetime_s - now
        return Granted(
            seq=request.seq,
            incarnation=self.incarnation,
            ttl_s=max(0.0, min(self._timing.lease_extension_s, lifetime_s)),
            num_tokens=lease.grant.num_tokens,
            blocks=lease.grant.blocks,
        )

    def _commit(self, request: Commit, now: float) -> AnyReply:
        if request.rank >= request.of_ranks:
            raise ProtocolError("bad_rank", f"rank {request.rank} of {request.of_ranks}")
        lease = self._find(request)
        if isinstance(lease, GoneReason):
            return self._refuse(request, lease, now)
        reader = lease.readers.get(ReaderId(request.reader))
        committed = Committed(seq=request.seq, incarnation=self.incarnation)
        if reader is not None and request.rank in reader.ranks:
            return committed
        if isinstance(lease, Tombstone):
            return self._refuse(request, lease, now)
        if reader is None:  # it never acquired, so nobody compared its digest
            return self._refuse(request, GoneReason.UNKNOWN, now)
        if reader.state is ReaderState.RELEASED:
            return self._refuse(request, GoneReason.RELEASED, now)
        if reader.of_ranks not in (0, request.of_ranks):
            raise ProtocolError("bad_rank", f"of {request.of_ranks} ranks; another rank said of {reader.of_ranks}")
        reader.of_ranks = request.of_ranks
        reader.ranks.add(request.rank)
        if len(reader.ranks) == reader.of_ranks:
            lease.committed_at = now
            self.counters["committed"] += 1
            self._leave(lease, ReaderId(request.reader), ReaderState.COMMITTED, now)
        return committed

    def _release(self, request: Release, now: float) -> AnyReply:
        lease = self._find(request)
        if lease is GoneReason.BAD_TOKEN:
            return self._refuse(request, lease, now)
        if isinstance(lease, Lease):
            if request.reader is not None:
                self._release_reader(lease, ReaderId(request.reader), now)
            elif lease.state is LeaseState.GRANTED:
                self._end(lease, LeaseEvent.RELEASE, GoneReason.RELEASED, now)
        return Released(seq=request.seq, incarnation=self.incarnation)

    def _renew(self, request: Renew, now: float) -> AnyReply:
        channel_id = ChannelId(request.channel)
        known = self._channels.get(channel_id)
        channel = known or Channel(deadline=now)
        step = channel.step(request)
        if step is RenewStep.RESEND:
            self.counters["resend"] += 1
            return Resend(seq=request.seq, incarnation=self.incarnation)
        channel.deadline = now + self._timing.lease_extension_s
        if step is RenewStep.APPLY:
            self._channels[channel_id] = channel
            self._update_list(request, channel, now)
            if known is None and not channel.held:  # who shows no token gets no record
                del self._channels[channel_id]
        if channel_id in self._channels:
            self._channel_alarms.set(channel_id, channel.next_deadline())
        self.counters["renewed"] += 1
        gone = [GoneHolding(reader=reader, why=why) for reader, why in channel.gone.items()]
        return Renewed(seq=request.seq, incarnation=self.incarnation, ttl_s=self._timing.lease_extension_s, gone=gone)

    def _update_list(self, request: Renew, channel: Channel, now: float) -> None:
        """Bring what ``channel`` holds from the list's last generation to that of ``request``."""
        if request.full:
            channel.begin_full_list(lapse_at=channel.deadline)
        added = {holding.reader for holding in request.added}
        for reader in map(ReaderId, request.removed):
            channel.gone.pop(reader, None)
            if reader in channel.held and reader not in added:  # else its name is used again, for another lease
                self._release_reader(self._leases[channel.held[reader]], reader, now)
        for holding in request.added:
            self._list_reader(holding, ChannelId(request.channel), now)
        channel.generation = request.generation
        if channel.listing and not request.more:
            channel.listing = False
            for reader in list(channel.unlisted):
                # Listed before and now not: it is out. Never listed: it may have been acquired while the consumer
                # made the list, and has until it lapses to be listed.
                lease = self._leases[channel.held[reader]]
                if lease.readers[reader].listed:
                    self._release_reader(lease, reader, now)

    def _list_reader(self, holding: Holding, channel_id: ChannelId, now: float) -> None:
        """The consumer says that it holds ``holding``; that makes nobody a reader, for no digest came with it."""
        lease = self._find(holding)
        reader_id = ReaderId(holding.reader)
        channel = self._channels[channel_id]
        if isinstance(lease, GoneReason):
            channel.mark_gone(reader_id, lease)
            return
        reader = lease.readers.get(reader_id)
        if isinstance(lease, Tombstone):
            if reader is None or reader.state is not ReaderState.COMMITTED:
                channel.mark_gone(reader_id, lease.why)
        elif reader is not None and reader.state not in _FINAL:
            reader.listed = True
            self._hold(lease, reader_id, reader, channel_id, now)

    # What the requests have in common

    def _find(self, request: Acquire | Checksum | Commit | Release | Holding) -> Lease | Tombstone | GoneReason:
        """The lease that is meant, live or ended, if the token proves the claim."""
        lease_id = LeaseId(request.lease)
        found = self._leases.get(lease_id) or self._tombstones.get(lease_id)
        if found is None:
            return GoneReason.UNKNOWN
        return found if hmac.compare_digest(found.token, request.token) else GoneReason.BAD_TOKEN

    def _refuse(self, request: Request, why: Tombstone | GoneReason, now: float) -> Gone:
        age_s = None
        if isinstance(why, Tombstone):
            age_s, why = now - why.ended_at, why.why
        self.counters[f"refused_{why.value}"] += 1
        return Gone(seq=request.seq, incarnation=self.incarnation, why=why, age_s=age_s)

    def _hold(self, lease: Lease, reader_id: ReaderId, reader: Reader, channel_id: ChannelId, now: float) -> None:
        """From now on ``channel_id`` holds ``lease`` for ``reader_id``, and for that reader nothing else."""
        channel = self._channels[channel_id]
        before = channel.held.get(reader_id)
        if before is not None and before != lease.grant.lease:
            self._release_reader(self._leases[before], reader_id, now)
        if reader.channel is None:
            lease.reading += 1
        elif reader.channel != channel_id:
            self._channels[reader.channel].drop(reader_id)
        reader.state, reader.channel = ReaderState.READING, channel_id
        channel.hold(reader_id, lease.grant.lease)
        lease.state = next_state(lease.state, LeaseEvent.ACQUIRE)
        self._set_alarm(lease, math.inf)

    def _release_reader(self, lease: Lease, reader_id: ReaderId, now: float) -> None:
        """``reader_id`` will not read, even if its ``Acquire`` is still to come.

        vLLM lets go of the handoff of every request that ends in an error. Where that error was a claim for another
        prompt, the lease is still wanted by the request it is for: it ends by its deadline.
        """
        reader = lease.readers.get(reader_id) or lease.add_reader(reader_id)
        if reader.state in _FINAL:
            return
        self.counters["released"] += 1
        if lease.state is LeaseState.GRANTED and lease.is_mistaken:
            reader.state = ReaderState.RELEASED
            return
        self._leave(lease, reader_id, ReaderState.RELEASED, now)

    def _leave(self, lease: Lease, reader_id: ReaderId, state: ReaderState, now: float) -> None:
        """``reader_id`` keeps ``lease`` alive no longer; the last one to leave ends it or starts its grace."""
        reader = lease.readers[reader_id]
        reader.state = state
        if reader.channel is not None:
            self._channels[reader.channel].drop(reader_id)
            reader.channel = None
            lease.reading -= 1
        if lease.reading:
            return
        if now < self._grace_end(lease):
            lease.state = next_state(lease.state, LeaseEvent.QUIET)
            self._set_alarm(lease, self._grace_end(lease))
        elif state is ReaderState.LAPSED:
            self._end(lease, LeaseEvent.EXPIRE, GoneReason.EXPIRED, now)
        else:
            committed = lease.committed_at is not None
            self._end(lease, LeaseEvent.RELEASE, GoneReason.COMMITTED if committed else GoneReason.RELEASED, now)

    def _grace_end(self, lease: Lease) -> float:
        """Until when late siblings, if there may be any, can still join after the last whole commit."""
        if lease.committed_at is None or not lease.has_siblings:
            return -math.inf
        return lease.committed_at + self._timing.sibling_grace_s

    def _set_alarm(self, lease: Lease, at: float) -> None:
        self._alarms.set(lease.grant.lease, min(at, lease.granted_at + self._timing.max_lease_lifetime_s))

    def _end(self, lease: Lease, event: LeaseEvent, why: GoneReason, now: float) -> None:
        lease.state = next_state(lease.state, event)
        lease_id = lease.grant.lease
        del self._leases[lease_id]
        self._alarms.set(lease_id, None)
        for reader_id, reader in lease.readers.items():
            if reader.channel is not None:
                channel = self._channels[reader.channel]
                channel.drop(reader_id)
                channel.mark_gone(reader_id, why)
        committed = {reader_id: reader for reader_id, reader in lease.readers.items() if reader.ranks}
        self._tombstones.add(lease_id, Tombstone(lease.token, why, now, committed))
        self._ended.append(Ended(lease_id, why, now - lease.granted_at))
        self.counters["ended"] += 1
        if lease.state is not LeaseState.RELEASED:
            self.counters[lease.state.value] += 1
