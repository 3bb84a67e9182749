"""Planted faults: each patches the real code so that it breaks a rule, to see that the checks see it.

To add one: write a function that makes the faulty attribute of the real one, and enlist it with :func:`_mutant` and a
sentence that says what the mutated code does. It must be caught; one that survives is a hole in the checks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from kvlease.connector.consumer import ConsumerHalf
from kvlease.connector.producer import ProducerHalf
from kvlease.core import leases, tombstones
from kvlease.core.calls import Calls
from kvlease.core.holdings import Holdings
from kvlease.core.ids import ReaderId
from kvlease.core.lease import Lease, LeaseEvent
from kvlease.core.leases import LeaseTable
from kvlease.core.loads import FailureCause, LoadEvent
from kvlease.core.messages import Acquire, Commit, Committed, Gone, GoneReason, Renew
from kvlease.core.peers import Peer
from kvlease.core.readers import ReaderState
from kvlease.core.silence import Watch
from kvlease.net.claims import Claims
from kvlease.net.loop import Loop
from kvlease.net.renewals import Renewals
from kvlease.worker import sources
from kvlease.worker.agent import AgentError, ReadState
from kvlease.worker.open_loads import OpenLoads
from kvlease.worker.outbox import Outbox
from kvlease.worker.puller import Puller
from kvlease.worker.pulls import Pull, PulledBytes

Make = Callable[[Any], Any]


@dataclass(frozen=True)
class Mutant:
    """``patch`` plants the fault while it is entered; ``description`` says what the code does then."""

    description: str
    patch: Callable[[], AbstractContextManager[Any]]


MUTANTS: dict[str, Mutant] = {}


def _mutant(name: str, description: str, owner: Any, attribute: str) -> Callable[[Make], Make]:
    """List a mutant in which ``owner.attribute`` is what the decorated function makes of the real one.

    A second one of the same name is planted together with the first.
    """

    def enlist(make: Make) -> Make:
        before = MUTANTS.get(name)

        @contextmanager
        def planted() -> Iterator[None]:
            faulty = make(getattr(owner, attribute))
            with before.patch() if before else nullcontext(), patch.object(owner, attribute, faulty):
                yield

        MUTANTS[name] = Mutant(description, planted)
        return make

    return enlist


# The worker half


@_mutant("no commit", "reports a load as good when its reads have ended", Puller, "_commit_if_read")
def _done_after_reads(real: Any) -> Any:
    def commit_if_read(self: Puller, pull: Pull, now: float) -> None:
        if pull.is_read:
            del self._loads.reading[pull]
            pull.happen(LoadEvent.READ)
            self._loads.committed(pull, now)

    return commit_if_read


@_mutant("clock as proof", "takes an unanswered commit for good while the lease should still live", OpenLoads, "fail")
def _clock_as_proof(real: Any) -> Any:
    """A commit that is not answered in time counts as Committed if it was sent less than the extension ago."""

    def fail(self: OpenLoads, pull: Pull, cause: FailureCause, text: str, now: float) -> None:
        if cause in (FailureCause.COMMIT_TIMEOUT, FailureCause.PEER_DEAD) and pull.state.value == "committing":
            self.committed(pull, now)
        else:
            real(self, pull, cause, text, now)

    return fail


@_mutant("gone is good", "uses the bytes although the commit was answered Gone", Puller, "_commit_answered")
def _gone_is_good(real: Any) -> Any:
    def commit_answered(self: Puller, pull: Pull, reply: Any, now: float) -> None:
        if isinstance(reply, Gone) and reply.why in (GoneReason.COMMITTED, GoneReason.EXPIRED):
            self._loads.committed(pull, now)
        else:
            real(self, pull, reply, now)

    return commit_answered


@_mutant("early commit", "commits when the last read is posted", Pull, "is_read")
def _early_commit(_: Any) -> Any:
    def is_read(self: Pull) -> bool:
        return self.state.value == "pulling" and not self.pages_left

    return property(is_read)


@_mutant("worker knows no quarantine", "does not say that reads are still busy", Outbox, "received")
def _no_quarantine_in_the_worker(real: Any) -> Any:
    def received(self: Outbox, load: Any, cause: Any = None, unsettled: bool = False) -> None:
        real(self, load, cause, False)

    return received


@_mutant("reports twice", "reports an aborted load once more", Outbox, "received")
def _twice(real: Any) -> Any:
    def received(self: Outbox, load: Any, cause: Any = None, unsettled: bool = False) -> None:
        real(self, load, cause, unsettled)
        if cause is FailureCause.ABORTED:
            self._late = load  # type: ignore[attr-defined]

    return received


@_mutant("reports twice", "reports an aborted load once more", Outbox, "take")
def _twice_later(real: Any) -> Any:
    def take(self: Outbox) -> Any:
        late, self._late = getattr(self, "_late", None), None  # type: ignore[attr-defined]
        reports = real(self)
        if late is not None and late not in reports.received:
            reports.received.add(late)
            reports.failed[late] = FailureCause.ABORTED
        elif late is not None:
            self._late = late  # type: ignore[attr-defined]
        return reports

    return take


@_mutant("failed is used", "reports a load as good although a read failed", Outbox, "received")
def _failed_is_used(real: Any) -> Any:
    def received(self: Outbox, load: Any, cause: Any = None, unsettled: bool = False) -> None:
        real(self, load, None if cause is FailureCause.TRANSFER else cause, unsettled)

    return received


@_mutant("release withdraws", "forgets the reads of a load that has ended", OpenLoads, "_end")
def _release_withdraws(real: Any) -> Any:
    """A load that has ended gives its reads back at once, as if that withdrew them."""

    def end(self: OpenLoads, pull: Pull, *args: Any) -> None:
        pull.source.busy_reads -= len(pull.posted)
        pull.posted.clear()
        real(self, pull, *args)

    return end


@_mutant("unknown is over", "takes a read that cannot be asked for as ended", Pull, "poll")
def _forgets_reads(real: Any) -> Any:
    """Whoever cannot say how a read goes is taken at its worst: the read is over."""

    def poll(self: Pull, agent: Any) -> PulledBytes:
        class Hasty:
            def state(self, read: Any) -> ReadState:
                try:
                    return agent.state(read)
                except AgentError:
                    return ReadState.ERROR

            def error(self, read: Any) -> str:
                return "it could not be asked for"

            def release(self, read: Any) -> None:
                if read.state is not ReadState.BUSY:
                    agent.release(read)

        return real(self, Hasty())

    return poll


@_mutant("any incarnation", "believes whoever answers at the address, who answers for others", Peer, "hear")
def _old_incarnation(real: Any) -> Any:
    """Replies of another incarnation are as good as any."""

    def hear(self: Peer, reply: Any, now: float) -> Any:
        if reply.incarnation != self.key.incarnation:
            fields = {name: getattr(reply, name) for name in reply.__struct_fields__}
            reply = type(reply)(**{**fields, "incarnation": self.key.incarnation})
        return real(self, reply, now)

    return hear


@_mutant("any incarnation", "believes whoever answers at the address, who answers for others", LeaseTable, "handle")
def _any_incarnation_here(real: Any) -> Any:
    """A producer answers whatever life of it is meant, and vouches for leases that it does not know."""

    def handle(self: LeaseTable, request: Any, now: float) -> Any:
        if request.to != self.incarnation and isinstance(request, Commit):
            return Committed(seq=request.seq, incarnation=request.to)
        return real(self, request, now)

    return handle


@_mutant("deaf to death", "ignores that a producer died", Puller, "_hear")
def _deaf_to_death(real: Any) -> Any:
    def hear(self: Puller, key: Any, event: Any, now: float) -> None:
        if type(event).__name__ != "PeerDied":
            real(self, key, event, now)

    return hear


@_mutant("no load timeout", "lets a load wait for its reads for ever", OpenLoads, "fail_late")
def _no_load_timeout(real: Any) -> Any:
    return lambda self, now: None


# The lease table


@_mutant("first commit ends", "ends the lease at the first reader's commit", LeaseTable, "_commit")
def _ends_at_first_commit(real: Any) -> Any:
    def commit(self: LeaseTable, request: Commit, now: float) -> Any:
        reply = real(self, request, now)
        lease = self._leases.get(request.lease)  # type: ignore[call-overload]
        if isinstance(reply, Committed) and lease is not None and lease.committed_at is not None:
            self._end(lease, LeaseEvent.RELEASE, GoneReason.COMMITTED, now)
        return reply

    return commit


@_mutant("one rank for all", "takes one rank's commit for all ranks'", LeaseTable, "_commit")
def _one_rank_for_all(real: Any) -> Any:
    def commit(self: LeaseTable, request: Commit, now: float) -> Any:
        fields = {name: getattr(request, name) for name in request.__struct_fields__}
        return real(self, Commit(**{**fields, "of_ranks": 1, "rank": 0}), now)

    return commit


@_mutant("vouches for the dead", "answers Committed for a lease that has expired", LeaseTable, "_commit")
def _vouches_for_the_dead(real: Any) -> Any:
    """Whoever shows the token of an ended lease hears Committed."""

    def commit(self: LeaseTable, request: Commit, now: float) -> Any:
        reply = real(self, request, now)
        if isinstance(reply, Gone) and reply.why in (GoneReason.EXPIRED, GoneReason.REVOKED):
            return Committed(seq=reply.seq, incarnation=reply.incarnation)
        return reply

    return commit


@_mutant("repeat refused", "answers a repeated commit Gone", LeaseTable, "_commit")
def _repeats_refused(real: Any) -> Any:
    def commit(self: LeaseTable, request: Commit, now: float) -> Any:
        reply = real(self, request, now)
        if isinstance(reply, Committed) and request.lease not in self._leases:
            before = getattr(self, "_answered", set())
            self._answered = before | {(request.lease, request.reader, request.rank)}  # type: ignore[attr-defined]
            if (request.lease, request.reader, request.rank) in before:
                return Gone(seq=reply.seq, incarnation=reply.incarnation, why=GoneReason.COMMITTED)
        return reply

    return commit


@_mutant("digest ignored", "does not compare prompts", LeaseTable, "_acquire")
def _digest_ignored(real: Any) -> Any:
    def acquire(self: LeaseTable, request: Acquire, now: float) -> Any:
        lease = self._leases.get(request.lease)  # type: ignore[call-overload]
        fields = {name: getattr(request, name) for name in request.__struct_fields__}
        digest = request.digest if lease is None else lease.grant.digest
        return real(self, Acquire(**{**fields, "digest": digest}), now)

    return acquire


@_mutant("never expires", "expires no lease", LeaseTable, "expire")
def _never_expires(real: Any) -> Any:
    def expire(self: LeaseTable, now: float) -> None:
        self._tombstones.expire(now)

    return expire


@_mutant("lives for ever", "renews a lease past its lifetime", LeaseTable, "_set_alarm")
def _lives_for_ever(real: Any) -> Any:
    def set_alarm(self: LeaseTable, lease: Lease, at: float) -> None:
        self._alarms.set(lease.grant.lease, None if at == math.inf else at)

    return set_alarm


@_mutant("renewal ignored", "expires a lease that was renewed", LeaseTable, "_renew")
def _renewal_ignored(real: Any) -> Any:
    """A lease is over ``lease_extension_s`` after it was acquired, whatever is renewed."""

    def renew(self: LeaseTable, request: Renew, now: float) -> Any:
        channel = self._channels.get(request.channel)  # type: ignore[call-overload]
        before = channel.deadline if channel else None
        reply = real(self, request, now)
        if channel is not None and before is not None and channel.held:
            channel.deadline = before
            self._channel_alarms.set(request.channel, channel.next_deadline())  # type: ignore[arg-type]
        return reply

    return renew


@_mutant("expires before inbox", "expires before it looks into the inbox", Loop, "turn")
def _expires_before_inbox(real: Any) -> Any:
    def turn(self: Loop) -> None:
        self.table.expire(self._clock())
        real(self)

    return turn


@_mutant(
    "release forgotten", "lets a Release that overtook its Acquire pass without a trace", LeaseTable, "_release_reader"
)
def _release_forgotten(real: Any) -> Any:
    def release_reader(self: LeaseTable, lease: Lease, reader: ReaderId, now: float) -> None:
        if reader in lease.readers:
            real(self, lease, reader, now)

    return release_reader


@_mutant("released reader returns", "forgets who released", LeaseTable, "_leave")
def _released_may_commit(real: Any) -> Any:
    def leave(self: LeaseTable, lease: Lease, reader_id: ReaderId, state: ReaderState, now: float) -> None:
        real(self, lease, reader_id, state, now)
        if state is ReaderState.RELEASED:
            del lease.readers[reader_id]

    return leave


@_mutant("no grace", "ends a lease before its late siblings join", LeaseTable, "_grace_end")
def _no_grace(real: Any) -> Any:
    return lambda self, lease: -math.inf


@_mutant("tombstone lost", "forgets a lease when it ends", tombstones.Tombstones, "add")
def _tombstone_lost(real: Any) -> Any:
    return lambda self, lease, stone: None


@_mutant("tombstones for ever", "forgets no tombstone", tombstones.Tombstones, "expire")
def _tombstones_for_ever(real: Any) -> Any:
    return lambda self, now: None


def _same_name_same_lease(real: Any) -> Any:
    def grant(self: LeaseTable, grant: Any, now: float) -> None:
        stone = self._tombstones.get(grant.lease)
        real(self, grant, now)
        if stone is not None:
            self._tombstones.add(grant.lease, stone)

    return grant


@_mutant("answers after reset", "gives blocks back at a reset and still vouches for them", LeaseTable, "revoke_all")
def _answers_after_reset(real: Any) -> Any:
    """A reset says that every lease has ended, and keeps answering for them."""

    def revoke_all(self: LeaseTable, now: float) -> None:
        for lease in self._leases.values():
            self._ended.append(leases.Ended(lease.grant.lease, GoneReason.REVOKED, 0.0))

    return revoke_all


@_mutant("deaf lifeline", "vouches for pages of a worker that has gone", Loop, "_sever")
def _deaf_lifeline(real: Any) -> Any:
    def sever(self: Loop) -> None:
        self._hang_up()

    return sever


@_mutant("grants late", "applies a grant after the messages that wait", Loop, "_answer_batch")
def _grants_late(real: Any) -> Any:
    """Grants wait until the inbox is empty, so a quick consumer finds no lease."""

    def answer_batch(self: Loop) -> bool:
        obey = self._obey_orders
        self._obey_orders = lambda: None  # type: ignore[method-assign]
        try:
            return real(self)
        finally:
            self._obey_orders = obey  # type: ignore[method-assign]
            obey()

    return answer_batch


@_mutant("raises on junk", "lets a malformed message out of the endpoint's loop", Loop, "_answer")
def _raises_on_junk(real: Any) -> Any:
    def answer(self: Loop, frames: list[Any]) -> None:
        leases_module_decode(frames[-1].bytes)
        real(self, frames)

    return answer


def leases_module_decode(payload: bytes) -> None:
    """Decode without a net."""
    from kvlease.core.messages import decode_request

    decode_request(payload)


# The consumer's scheduler half


@_mutant("no quarantine", "gives blocks back that a read may still write to", ConsumerHalf, "_hold")
def _no_quarantine(real: Any) -> Any:
    return lambda self, load_id, ranks: None


@_mutant("quarantine for ever", "keeps blocks although their reads have ended", ConsumerHalf, "_let_go")
def _quarantine_for_ever(real: Any) -> Any:
    return lambda self, load_id, ranks: None


@_mutant(
    "claim names reused", "calls the claim of a request that comes again by the old name", ConsumerHalf, "__init__"
)
def _claim_names_reused(real: Any) -> Any:
    def init(self: ConsumerHalf, *args: Any, **kwargs: Any) -> None:
        real(self, *args, **kwargs)
        self._claim_numbers = iter(lambda: 0, 1)  # type: ignore[assignment]

    return init


@_mutant("release unsaid", "does not tell the producer that a load will not read", Claims, "_let_go")
def _forgets_release(real: Any) -> Any:
    """A failed load does not tell the producer."""

    def let_go(self: Claims, claim: Any, *, release: bool) -> None:
        if claim is not None:
            del self._claims[claim.reader]

    return let_go


@_mutant("heartbeats stop", "renews nothing", Renewals, "tick")
def _renews_stop(real: Any) -> Any:
    def tick(self: Renewals) -> None:
        self._beats.take_due(self._clock())

    return tick


@_mutant("additions lost", "sends full lists that lack what was just acquired", Holdings, "_make_full")
def _additions_lost(real: Any) -> Any:
    """Every list is full, and names only what was confirmed when the one before was made."""

    def make_full(self: Holdings) -> Any:
        held = self._held
        self._held = {name: one for name, one in held.items() if one.listed}
        try:
            return real(self)
        finally:
            self._held = held
            self._full = True

    return make_full


@_mutant("leased and freed", "frees blocks that it has just leased", ProducerHalf, "grant")
def _frees_when_asked(real: Any) -> Any:
    """A finished request's blocks are freed although they are leased."""

    def finish(self: ProducerHalf, request: Any, block_ids: Any) -> Any:
        handoff = real(self, request, block_ids)
        if handoff is not None:
            self._endpoint._ledger.report_revoked(request.request_id)  # type: ignore[attr-defined]
        return handoff

    return finish


@_mutant("waits for ever", "gives no call up", Calls, "start")
def _waits_for_ever(real: Any) -> Any:
    """An acquire that nobody answers is not given up."""

    def start(self: Calls, call: Any, factory: Any, to: Any, now: float, timeout_s: float, resend: bool) -> Any:
        return real(self, call, factory, to, now, 1e9, resend)

    return start


@_mutant("never dead", "takes no silence for death", Watch, "dead_at")
def _never_dead(real: Any) -> Any:
    return lambda self: None


@_mutant("sources kept", "keeps connections that nobody needs", sources.Source, "is_stale")
def _peers_kept(real: Any) -> Any:
    return lambda self, now: False


@_mutant("token ignored", "takes any token", leases, "hmac")
def _any_token(real: Any) -> Any:
    return SimpleNamespace(compare_digest=lambda ours, theirs: True)
