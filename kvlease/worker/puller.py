"""All loads of one consumer rank, one step at a time: whom to greet, what to read next, what to commit, what to report.

Everything here happens in one thread, which calls :meth:`Puller.step` and sleeps in between; only the :class:`Outbox`
is read by another one. A load is reported as received after the producer's ``Committed`` and never otherwise;
whatever else happens to it, it is reported once, as failed, with the first cause.

Loads take turns, a chunk each, so a short load never waits behind a long one; a producer has a bounded number of bytes
under way, so what is posted next is not long in the queue; and the thread is away from its peers and its orders for as
long as :data:`POST_BUDGET_S` and one chunk.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvlease.config import Settings
from kvlease.core.ids import PeerKey
from kvlease.core.loads import FailureCause, LoadEvent, LoadState
from kvlease.core.messages import AnyReply, Commit, Committed, Gone
from kvlease.core.orders import LoadOrder, Orders
from kvlease.core.peers import Answered, Event, PeerDied, PeerForgotten, PeerState, TooManyPeers, Unanswered
from kvlease.core.plan import Limits, Pages, PlanError, load_bytes, plan
from kvlease.worker.agent import Agent, AgentError
from kvlease.worker.checks import Check, Checks, Hashing
from kvlease.worker.known_sources import KnownSources
from kvlease.worker.open_loads import OpenLoads
from kvlease.worker.outbox import Outbox
from kvlease.worker.pulls import Pull
from kvlease.worker.sources import Identity, Link, Source, SourceError

logger = logging.getLogger(__name__)

CHUNKS_AHEAD: Final = 8
"""A producer has as many bytes under way as that many chunks may have. Counted for each: a frozen producer takes no
room from the others.
"""

READS_MAX: Final = 64
"""Chunks of one producer that may be posted at once, however small."""

POST_BUDGET_S: Final = 0.002
"""Posting is cut short after this: where posting copies, peers and orders want to be heard meanwhile."""

_SWEEP_S: Final = 0.05

_UNANSWERED: Final = {
    "peer_dead": FailureCause.PEER_DEAD,
    "unreachable": FailureCause.PEER_DEAD,
    "peer_restarted": FailureCause.PEER_RESTARTED,
}


@dataclass(frozen=True)
class Local:
    """Our own pages, as targets: their layout, tokens per block by KV group, and the block id that holds nothing."""

    pages: Pages
    block_sizes: Sequence[int]
    prepared: Any
    null_block: int | None


class Puller:
    """See the module. ``clock`` only bounds a round of posting and times reads; deadlines use the ``now`` passed in."""

    def __init__(
        self,
        *,
        identity: Identity,
        settings: Settings,
        agent: Agent,
        link: Link,
        local: Local,
        outbox: Outbox,
        clock: Callable[[], float],
        hashing: Hashing | None = None,
    ) -> None:
        self._identity, self._settings, self._agent, self._link = identity, settings, agent, link
        self._local, self._clock = local, clock
        self._limits = Limits(settings.chunk_bytes, settings.chunk_descriptors)
        self._bytes_ahead = CHUNKS_AHEAD * settings.chunk_bytes
        self._loads = OpenLoads(outbox)
        self._checks = Checks(settings, identity.rank, local, self._loads, hashing, self._commit, link.wake)
        self._sources = KnownSources(identity, agent, link, local.pages)
        self._counts: Counter[str] = Counter()
        self._pull_seconds = 0.0
        self._sweep_at = 0.0
        self.has_work = False
        """Whether the last :meth:`step` had no time for something that may be posted."""

    def __repr__(self) -> str:
        return f"<Puller {self._loads!r} sources={len(self._sources)}>"

    @property
    def is_idle(self) -> bool:
        """Whether no load is open and every read has ended."""
        return not self._loads and not self._loads.num_unsettled

    @property
    def is_settled(self) -> bool:
        """Whether every read has ended."""
        return self._loads.is_settled

    @property
    def is_reading(self) -> bool:
        """Whether a load of ours waits for NIXL, so that every microsecond of sleep is one of latency."""
        return any(pull.posted for pull in reversed(self._loads.reading))

    def take(self, orders: Orders, now: float) -> None:
        """Begin loads, abort loads, greet producers; a load that fails to begin is reported and disturbs no other."""
        for order in orders.loads:
            try:
                self._begin(order, now)
            except TooManyPeers as error:
                self._loads.refuse(order, FailureCause.TOO_MANY_PEERS, str(error), now)
            except Exception as error:
                self._loads.crashed(f"load {order.load}", error, now)
                self._loads.give_up(order.load, FailureCause.INTERNAL)
        for load in orders.aborts:
            self._loads.abort(load, now)
        for key in orders.greet:
            try:
                self._sources.greet_early(key, now, self._settings.acquire_timeout_s)
            except Exception as error:
                self._loads.crashed(f"greeting {key}", error, now)

    def step(self, now: float) -> None:
        """Take what peers said, poll and post reads, and end what is over."""
        for key, event in self._link.take_events():
            self._hear(key, event, now)
        for pull in [pull for pull in self._loads.reading if pull.posted]:
            self._loads.guard(pull, self._poll, now)
        self._checks.step(now)
        until = self._clock() + POST_BUDGET_S
        while self._post_round(now, until):
            pass
        if now >= self._sweep_at:
            self._sweep_at = now + _SWEEP_S
            self._loads.fail_late(now)
            self._sources.sweep(now)
        self._loads.finish_ended(self._poll, now)

    def stop(self, now: float) -> None:
        """Fail every open load; :meth:`step` until :attr:`is_settled` lets their reads end."""
        self._loads.fail_all(FailureCause.SHUTDOWN, "the engine shuts down", now)

    def close(self) -> None:
        """Forget every producer that no busy read needs."""
        self._sources.close()

    def stats(self) -> dict[str, float]:
        """Counters since the start, and gauges, by the names of the metrics."""
        peers = self._sources.count_by_state()
        return {
            **self._loads.counts,
            **self._counts,
            **self._checks.counts,
            "pull_seconds": self._pull_seconds,
            "loads_open": len(self._loads),
            "loads_unsettled": self._loads.num_unsettled,
            **{f"peers|{state.value}": peers[state] for state in PeerState},
        }

    # Beginning

    def _begin(self, order: LoadOrder, now: float) -> None:
        if order.load in self._loads:
            logger.error("load %s was ordered again while it is open; ignored", order.load)
            return
        if order.doomed is not None or order.peer is None:
            self._loads.give_up(order.load, order.doomed or FailureCause.INTERNAL)
            return
        source = self._sources.get(order.peer, now)
        len_bytes = load_bytes(self._local.pages, self._local.block_sizes, order.start_token, order.end_token)
        deadline = now + self._settings.load_budget_s(len_bytes)
        pull = Pull(order, source, deadline, len_bytes)
        self._loads.add(pull, now)
        self._loads.guard(pull, self._approach, now)

    def _approach(self, pull: Pull, now: float) -> None:
        """Start to read if hands were shaken, else shake them first."""
        try:
            if pull.source.is_ready:
                self._start(pull, now)
            else:
                pull.source.greet(now, self._settings.acquire_timeout_s)
        except SourceError as error:
            self._loads.fail(pull, error.cause, str(error), now)

    def _start(self, pull: Pull, now: float) -> None:
        self._sources.repair(pull.source)
        remote, order = pull.source.remote, pull.order
        if remote is None:
            raise SourceError(FailureCause.INTERNAL, "hands were shaken, and no pages are known")
        try:
            pull.plan = plan(
                self._local.pages,
                remote.pages,
                self._local.block_sizes,
                order.local_blocks,
                order.remote_blocks,
                order.start_token,
                order.end_token,
                self._limits,
                self._local.null_block,
            )
        except PlanError as error:
            raise SourceError(FailureCause.PEER_CONFUSED, str(error)) from error
        pull.happen(LoadEvent.DISPATCH)
        pull.since = self._clock()
        self._loads.reading[pull] = None
        self._checks.ask(pull, now)
        self._commit_if_read(pull, now)

    # Reading

    def _post_round(self, now: float, until: float) -> bool:
        """Post one chunk of each load that may; whether it was worth another round. Who posted goes to the end."""
        has_posted = self.has_work = False
        for pull in [*self._loads.reading]:
            if not pull.may_post or not self._has_room(pull.source):
                continue
            self._loads.reading.move_to_end(pull)
            self._loads.guard(pull, self._post, now)
            has_posted = True
            if self._clock() >= until:
                self.has_work = True
                return False
        return has_posted

    def _has_room(self, source: Source) -> bool:
        return source.busy_reads < READS_MAX and source.busy_bytes < self._bytes_ahead

    def _post(self, pull: Pull, now: float) -> None:
        try:
            chunk = pull.post(self._agent, self._local.prepared)
        except AgentError as error:
            pull.source.is_broken = True
            self._loads.fail(pull, FailureCause.TRANSFER, str(error), now)
            return
        self._counts["pulls"] += 1
        self._counts["descriptors_pulled"] += len(chunk)
        self._poll(pull, now)

    def _poll(self, pull: Pull, now: float) -> None:
        if not pull.posted:
            return
        found = pull.poll(self._agent)
        self._counts["bytes_pulled"] += found.len_bytes
        if found.error is not None:
            pull.source.is_broken = True
            if not pull.state.is_terminal:
                self._loads.fail(pull, FailureCause.TRANSFER, found.error, now)
        self._commit_if_read(pull, now)

    # Committing

    def _commit_if_read(self, pull: Pull, now: float) -> None:
        if not pull.is_read:
            return
        del self._loads.reading[pull]
        pull.happen(LoadEvent.READ)
        self._pull_seconds += self._clock() - pull.since
        if pull.check is not None:
            self._checks.read(pull.check, now)
        else:
            self._commit(pull, now)

    def _commit(self, pull: Pull, now: float) -> None:
        order, identity = pull.order, self._identity
        pull.source.peer.call(
            pull,
            lambda seq, to: Commit(
                seq=seq,
                to=to,
                lease=order.lease,
                token=order.token,
                reader=order.reader,
                rank=identity.rank,
                of_ranks=identity.of_ranks,
            ),
            now,
            self._settings.commit_timeout_s,
        )

    def _commit_answered(self, pull: Pull, reply: AnyReply, now: float) -> None:
        match reply:
            case Committed():
                self._loads.committed(pull, now)
            case Gone():
                self._loads.fail_gone(pull, reply, now)
            case _:
                text = f"answered the commit with {type(reply).__name__}"
                self._loads.fail(pull, FailureCause.PEER_CONFUSED, text, now)

    # What peers say

    def _hear(self, key: PeerKey, event: Event, now: float) -> None:
        match event:
            case Answered(call=Pull() as pull, reply=reply):
                if pull.state is LoadState.COMMITTING:
                    self._loads.guard(pull, lambda pull, now: self._commit_answered(pull, reply, now), now)
                return
            case Answered(call=Check(pull=pull) as check, reply=reply):
                self._loads.guard(pull, lambda _, now: self._checks.answered(check, reply, now), now)
                return
            case Unanswered(call=Check() as check, cause="timeout") if self._checks.ask_again(check, now):
                return
            case Unanswered(call=(Pull() as pull) | Check(pull=pull), cause=cause):
                text = f"no answer to the {'commit' if event.call is pull else 'question for checksums'}: {cause}"
                self._loads.fail(pull, _cause(cause, FailureCause.COMMIT_TIMEOUT), text, now)
                return
        source = self._sources.find(key)
        if source is None:
            return
        match event:
            case Answered(reply=reply):
                self._greeted(source, reply, now)
            case Unanswered(cause=cause):
                source.is_greeting = False
                text = f"no answer to the greeting: {cause}"
                self._fail_waiting(source, _cause(cause, FailureCause.HANDSHAKE_TIMEOUT), text, now)
            case PeerDied(cause=cause):
                self._fail_all(source, _cause(cause, FailureCause.PEER_DEAD), f"the producer died: {cause}", now)
            case PeerForgotten() if not source.open_loads:  # a load that has begun since then uses the peer again
                self._sources.drop(key)

    def _greeted(self, source: Source, reply: AnyReply, now: float) -> None:
        source.is_greeting = False  # whatever comes of the answer: else nobody would greet again
        try:
            self._sources.repair(source)
            source.greeted(reply)
        except SourceError as error:
            self._fail_waiting(source, error.cause, str(error), now)
            return
        except Exception as error:
            self._loads.crashed("the handshake", error, now)
            self._fail_waiting(source, FailureCause.INTERNAL, repr(error), now)
            return
        self._sources.forget_former_lives(source)
        for pull in self._loads.of(source):
            if pull.state is LoadState.GRANTED:
                self._loads.guard(pull, self._approach, now)

    def _fail_waiting(self, source: Source, cause: FailureCause, text: str, now: float) -> None:
        for pull in self._loads.of(source):
            if pull.state is LoadState.GRANTED:
                self._loads.fail(pull, cause, text, now)

    def _fail_all(self, source: Source, cause: FailureCause, text: str, now: float) -> None:
        for pull in self._loads.of(source):
            self._loads.fail(pull, cause, text, now)


def _cause(text: str, otherwise: FailureCause) -> FailureCause:
    return _UNANSWERED.get(text, otherwise)
