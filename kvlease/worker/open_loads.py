"""The loads of one consumer rank that are not over, and the one report that each of them gets.

::

    add --> open --committed | fail | abort--> ended --reads have ended--> reported
                                                 |
                                                 +--SETTLE_S have passed--> reported unsettled --reads ended--> settled

The first end stands: whatever happens to a load after it changes nothing. A load that ended while reads were posted is
reported when NIXL says that they have ended, because only then does nobody write to its blocks any more.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Final

from kvlease.core.ids import LoadId
from kvlease.core.loads import FailureCause, LoadEvent, LoadState
from kvlease.core.messages import Gone
from kvlease.core.orders import LoadOrder
from kvlease.logs import RateLimitedLog
from kvlease.worker.outbox import Outbox
from kvlease.worker.pulls import Pull
from kvlease.worker.sources import Source

logger = logging.getLogger(__name__)

SETTLE_S: Final = 0.1
"""How long the report of an ended load waits for its last reads; later it is reported as unsettled."""

_LINES_MAX: Final = 20
"""Failures of one cause that are logged in one interval: each is a request of its own."""


class OpenLoads:
    """See the module. ``reading`` are those in PULLING, whose turn it is first; ``counts`` only grow."""

    def __init__(self, outbox: Outbox) -> None:
        self.reading: OrderedDict[Pull, None] = OrderedDict()
        self.counts: Counter[str] = Counter()
        self._outbox = outbox
        self._pulls: dict[LoadId, Pull] = {}  # not reported yet
        self._leftover: list[Pull] = []  # reported, with reads that have not ended
        self._log = RateLimitedLog(logger, _LINES_MAX)

    def __repr__(self) -> str:
        return f"<OpenLoads {len(self._pulls)} reading={len(self.reading)} leftover={len(self._leftover)}>"

    def __len__(self) -> int:
        return len(self._pulls)

    def __contains__(self, load: LoadId) -> bool:
        return load in self._pulls

    @property
    def num_unsettled(self) -> int:
        """Loads that were reported although a read of theirs has not ended."""
        return len(self._leftover)

    @property
    def is_settled(self) -> bool:
        """Whether every read has ended."""
        return not self._leftover and not any(pull.posted for pull in self._pulls.values())

    def add(self, pull: Pull, now: float) -> None:
        """A load begins: its source has one more."""
        self._pulls[pull.order.load] = pull
        pull.source.enter(now)

    def of(self, source: Source) -> list[Pull]:
        """The loads that are not reported yet and read from ``source``."""
        return [pull for pull in self._pulls.values() if pull.source is source]

    def give_up(self, load: LoadId, cause: FailureCause) -> None:
        """Report a load that never began."""
        self._count_failed(cause)
        self._outbox.received(load, cause)

    def refuse(self, order: LoadOrder, cause: FailureCause, text: str, now: float) -> None:
        """As :meth:`give_up`, and logged."""
        words = "load %s of lease %s from %s could not begin: %s (%s)"
        self._log(cause.value, now, words, order.load, order.lease, order.peer, cause.value, text)
        self.give_up(order.load, cause)

    def committed(self, pull: Pull, now: float) -> None:
        """The producer vouches for what was read."""
        self._end(pull, LoadEvent.COMMIT, None, "committed", now)

    def abort(self, load: LoadId, now: float) -> None:
        """Nobody wants the load any more; ignored when it is over already, or unknown."""
        pull = self._pulls.get(load)
        if pull is not None and not pull.state.is_terminal:
            self._end(pull, LoadEvent.ABORT, FailureCause.ABORTED, "aborted", now)

    def fail(self, pull: Pull, cause: FailureCause, text: str, now: float) -> None:
        """Unless it is over already: the first cause stands."""
        if pull.state.is_terminal:
            return
        self._log(
            cause.value,
            now,
            "load %s of lease %s from %s failed while %s: %s (%s)",
            pull.order.load,
            pull.order.lease,
            pull.source.peer.key,
            pull.state.value,
            cause.value,
            text,
        )
        self._end(pull, LoadEvent.FAIL, cause, text, now)

    def fail_gone(self, pull: Pull, reply: Gone, now: float) -> None:
        """The producer says that the lease is not, or no longer, ours to read."""
        age = "" if reply.age_s is None else f", {reply.age_s:.1f} s ago"
        text = f"the lease is gone: {reply.why.value}{age}"
        self.fail(pull, FailureCause(f"gone_{reply.why.value}"), text, now)

    def fail_late(self, now: float) -> None:
        """Fail the loads whose time is over."""
        for pull in [pull for pull in self._pulls.values() if now >= pull.deadline]:
            self.fail(pull, FailureCause.LOAD_TIMEOUT, f"{pull!r} had its time", now)

    def fail_all(self, cause: FailureCause, text: str, now: float) -> None:
        """Fail every load that is not over."""
        for pull in list(self._pulls.values()):
            if not pull.state.is_terminal:
                self._end(pull, LoadEvent.FAIL, cause, text, now)

    def finish_ended(self, poll: Callable[[Pull, float], None], now: float) -> None:
        """Report ended loads whose reads have ended, too, or have had their time; tell of those that ended later.

        ``poll`` asks for a load's reads.
        """
        for pull in [pull for pull in self._pulls.values() if pull.report_at is not None]:
            self.guard(pull, poll, now)
            if not pull.posted or (pull.report_at is not None and now >= pull.report_at):
                self._report(pull)
        for pull in self._leftover:
            self.guard(pull, poll, now)
            if not pull.posted:
                self._outbox.settled(pull.order.load)
        self._leftover = [pull for pull in self._leftover if pull.posted]

    def guard(self, pull: Pull, act: Callable[[Pull, float], None], now: float) -> None:
        """Do ``act``; whatever it raises is this load's failure, and no other's."""
        try:
            act(pull, now)
        except Exception as error:
            self.crashed(f"load {pull.order.load}", error, now)
            self.fail(pull, FailureCause.INTERNAL, repr(error), now)

    def crashed(self, what: str, error: Exception, now: float) -> None:
        """Count and log a bug of ours."""
        self.counts["internal_errors"] += 1
        self._log("crashed", now, "%s: %r", what, error, level=logging.ERROR, trace=error)

    def _end(self, pull: Pull, event: LoadEvent, cause: FailureCause | None, text: str, now: float) -> None:
        """Make ``pull`` terminal. It is reported now or, with reads still busy, in :meth:`finish_ended`."""
        was = pull.state
        pull.happen(event)
        pull.cause = cause
        pull.plan = None
        if was is LoadState.PULLING:
            del self.reading[pull]
        if was is LoadState.COMMITTING:
            pull.source.peer.cancel(pull)
        if pull.check is not None:
            pull.check.drop()
        pull.source.leave(now)
        if cause is None:
            self.counts["loads_done"] += 1
        elif cause is FailureCause.ABORTED:
            self.counts["loads_aborted"] += 1
        else:
            self._count_failed(cause)
        pull.report_at = now + SETTLE_S
        if not pull.posted:
            self._report(pull)
        logger.debug("%r: %s", pull, text)

    def _count_failed(self, cause: FailureCause) -> None:
        self.counts[f"loads_failed|{cause.value}"] += 1

    def _report(self, pull: Pull) -> None:
        del self._pulls[pull.order.load]
        self._outbox.received(pull.order.load, pull.cause, unsettled=bool(pull.posted))
        if pull.posted:
            self._leftover.append(pull)
