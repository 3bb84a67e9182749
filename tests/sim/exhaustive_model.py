"""What can happen next in the exhaustive checker: consumers, the network between them and the producer, and the faults.

A consumer is its scheduler half and its ranks, each with the messages it has under way in either direction (which may
arrive in any order), the reports its ranks have ready, and a ghost for every read: what a read that may have seen a
reused page is worth. Consumers, like parts, are numbered, and what can happen to one is worked out once.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any, Final, NamedTuple

import msgspec

from kvlease.core.messages import AnyReply, AnyRequest
from tests.sim.exhaustive_machine import Machine, Violation, freeze
from tests.sim.exhaustive_parts import RANKS, ProducerPart, WorkerPart
from tests.sim.exhaustive_scheduler import SchedulerPart
from tests.sim.exhaustive_wire import at_consumer, at_wire, renamed_event

NO_READ, CLEAN, DIRTY, READ_CLEAN, READ_DIRTY, VERIFIED = range(6)
"""Ghosts: a read that is posted and has seen only leased blocks (or others), one that has ended so, one vouched for."""

DEAD: Final = -1

FAULTS: Final = ("loss", "duplicate", "expiry", "abort", "crash", "beat", "nudge")
LOSS, DUPLICATE, EXPIRY, ABORT, CRASH, BEAT, NUDGE = range(len(FAULTS))
FREE: Final = None

_SETTLING_STEPS: Final = 200
"""Many times what it takes."""


class End(NamedTuple):
    """One end of the wire: a part, and its messages under way (numbers of requests, and of replies)."""

    part: int
    requests: tuple[int, ...] = ()
    replies: tuple[int, ...] = ()
    ghosts: tuple[int, ...] = ()
    reports: tuple[int, ...] = ()


class Consumer(NamedTuple):
    """``scheduler`` is an :class:`End` without ghosts; ``ranks`` are in no order."""

    scheduler: End
    ranks: tuple[End, ...]


class Move(NamedTuple):
    """What can happen to one consumer: the consumer after it, whether its ranks changed places, and what it costs."""

    cost: int | None
    consumer: int
    swapped: bool
    label: tuple[Any, ...]
    is_hasty: bool = False


class Intern:
    """Numbers for things that are not hashable, by what they hold."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self.values: list[Any] = []

    def number(self, value: Any) -> int:
        key = freeze(value)
        found = self._numbers.get(key)
        if found is None:
            found = self._numbers[key] = len(self.values)
            self.values.append(value)
        return found


class Model:
    """Every state of producers and consumers that was seen, and the moves between them.

    ``loads``: by consumer, the requests that it gets. Consumers all begin alike.
    """

    def __init__(self, loads: tuple[str, ...]) -> None:
        self.loads = loads
        self.messages = Intern()
        self.reports = Intern()
        self.producers: Machine[ProducerPart] = Machine(ProducerPart)
        self.schedulers: Machine[SchedulerPart] = Machine(SchedulerPart)
        self.workers: Machine[WorkerPart] = Machine(WorkerPart)
        self._orders = Intern()
        self._requests = Intern()
        self._repeated: set[tuple[int, int]] = set()
        self._numbers: dict[Consumer, int] = {}
        self.consumers: list[Consumer] = []
        self._moves: dict[tuple[int, bool, bool, int], list[Move]] = {}
        self._asked: dict[tuple[int, int, int], tuple[int, int | None]] = {}
        self._answered: dict[tuple[int, int, int, int | None], tuple[int, bool]] = {}
        self._renamed: dict[tuple[int, bool, tuple[bool, bool]], int] = {}
        self._dirtied: dict[int, tuple[int, bool]] = {}
        self._quiet: dict[int, str] = {}
        self.attempt: tuple[Any, ...] = ()

    # Beginnings

    def first_producer(self, life: int) -> int:
        return self.producers.begin(life)

    def first_consumer(self) -> int:
        scheduler = self.schedulers.begin(self.loads)
        worker = End(self.workers.begin(self.loads), ghosts=(NO_READ,) * len(self.loads))
        first = SchedulerPart(self.loads).arrived
        requests = tuple(sorted(self.messages.number(request) for request in first.requests))
        return self._consumer(Consumer(End(scheduler, requests), (worker,) * RANKS))[0]

    # The producer

    def ask(self, producer: int, message: int, consumer: int, rank: int) -> tuple[int, int | None]:
        """Let the producer handle ``message`` of a consumer's ``rank`` (-1: its scheduler half): it, and its reply."""
        key = (producer, message, consumer * (RANKS + 1) + rank + 1)
        found = self._asked.get(key)
        if found is None:
            self.attempt = ("handle", rank, self.messages.values[message], None)
            request = at_wire(self.messages.values[message], consumer, rank)
            anonymous = msgspec.structs.replace(request, seq=0)
            name = self._requests.number(anonymous)
            after, reply = self.producers.step(producer, anonymous, name)
            if (producer, name) not in self._repeated:
                self._repeated.add((producer, name))
                self._repeat(producer, anonymous, after, reply)
            reply = at_consumer(msgspec.structs.replace(reply, seq=request.seq), consumer)
            found = self._asked[key] = after, self.messages.number(reply)
        return found

    def _repeat(self, producer: int, request: AnyRequest, after: int, reply: AnyReply) -> None:
        """Idempotence: the same request once more changes nothing, and is answered by what says the same."""
        again, repeated = self.producers.again(producer, request)
        if again != after:
            raise Violation(f"idempotence: {request!r}, repeated at once, changes something")
        if freeze(reply) != freeze(repeated):
            raise Violation(f"idempotence: {request!r}, repeated at once, is answered {repeated!r}, not {reply!r}")

    def rename(self, producer: int, swap_consumers: bool, swap_ranks: tuple[bool, bool]) -> int:
        """The producer after its consumers, and the ranks of each of them, have exchanged their names."""
        if not (swap_consumers or swap_ranks[0] or swap_ranks[1]):
            return producer
        key = (producer, swap_consumers, swap_ranks)
        found = self._renamed.get(key)
        if found is None:
            history = self.producers.records[producer].history
            renamed = tuple(renamed_event(event, swap_consumers, swap_ranks) for event in history)
            found = self._renamed[key] = self.producers.replay(renamed)
        return found

    # A consumer's moves

    def requests(self, consumer: int) -> Iterator[tuple[int, int]]:
        """The requests under way: from which rank (-1: the scheduler half), and which."""
        scheduler, ranks = self.consumers[consumer]
        for rank, end in enumerate((scheduler, *ranks), start=-1):
            for message in dict.fromkeys(end.requests):
                yield rank, message

    def answered(self, consumer: int, rank: int, message: int, reply: int | None) -> tuple[int, bool]:
        """The consumer after its request was taken from the network and ``reply`` put there."""
        key = (consumer, rank, message, reply)
        found = self._answered.get(key)
        if found is None:
            here = self.consumers[consumer]
            end = here.scheduler if rank < 0 else here.ranks[rank]
            end = end._replace(requests=without(end.requests, message))
            if reply is not None and end.part != DEAD:
                end = end._replace(replies=with_(end.replies, reply))
            found = self._answered[key] = self._consumer(put(here, rank, end))
        return found

    def dirtied(self, consumer: int) -> tuple[int, bool]:
        """The consumer after the producer's blocks were reused."""
        found = self._dirtied.get(consumer)
        if found is None:
            here = self.consumers[consumer]
            ranks = [
                end._replace(ghosts=tuple(DIRTY if ghost == CLEAN else ghost for ghost in end.ghosts))
                for end in here.ranks
            ]
            found = self._dirtied[consumer] = self._consumer(here._replace(ranks=tuple(ranks)))
        return found

    def moves(self, consumer: int, live: bool, crashed: bool, left: int) -> list[Move]:
        """All that can happen to a consumer beside its requests being handled.

        ``live``: the lease's blocks are its own. ``crashed``: the producer of the first life is no more. ``left``: a
        bit for each fault that may still happen.
        """
        key = (consumer, live, crashed, left)
        found = self._moves.get(key)
        if found is None:
            found = self._moves[key] = list(self._find_moves(self.consumers[consumer], live, crashed, left))
        return found

    def _find_moves(self, here: Consumer, live: bool, crashed: bool, left: int) -> Iterator[Move]:
        if here.scheduler.part != DEAD:
            hasty = self._haste(here, live, crashed, left)
            if hasty is not None:
                yield hasty._replace(is_hasty=True)
                return
            yield from self._scheduler_moves(here, left)
            done = set()
            for rank, end in enumerate(here.ranks):
                if end not in done:  # two ranks in one state do the same
                    done.add(end)
                    yield from self._rank_moves(here, rank, live, crashed, left)
            if left >> CRASH & 1:
                yield self._move(CRASH, self._dead(here), ("crash", "consumer"))
        yield from self._network_moves(here, left)

    def _haste(self, here: Consumer, live: bool, crashed: bool, left: int) -> Move | None:
        """A move that may be made at once and alone, because whatever else can happen meets it nowhere.

        It leads to the same states whether it happens before or after any other move that is possible until then:
        those of the other consumer, of the producer (a read that begins while the lease lives is as good as the lease
        is when it ends), and of this consumer's other parts. A reply is heard at once: one that comes after the end of
        its call is a lost one, and counts as one. What else an abort could meet waits while one may come, and so does
        what sends something while this consumer may crash.
        """
        facts = self.schedulers.records[here.scheduler.part].facts
        may_abort = bool(left >> ABORT & 1 and facts.abortable)
        for move in self._hasty(here, live, crashed, left, may_abort):
            if not left >> CRASH & 1 or sent_by(self.consumers[move.consumer]) == sent_by(here):
                return move
        return None

    def _hasty(self, here: Consumer, live: bool, crashed: bool, left: int, may_abort: bool) -> Iterator[Move]:
        for reply in here.scheduler.replies:
            yield self._hear(here, reply)
        for rank, end in enumerate(here.ranks):
            facts = self.workers.records[end.part].facts
            if end.reports and not may_abort:
                yield self._report(here, rank)
            for reply in end.replies:
                yield self._rank_hears(here, rank, reply, live)
            if facts.can_start and not may_abort:
                yield self._worked(FREE, here, rank, "start", live)
            if facts.busy and not live and not crashed and not may_abort and not left >> EXPIRY & 1:
                yield self._worked(FREE, here, rank, ("end", facts.busy[0], True), live)

    def _hear(self, here: Consumer, reply: int) -> Move:
        event = ("hear", self.messages.values[reply])
        return self._scheduled(FREE, here, event, ("hear", reply), replies=without(here.scheduler.replies, reply))

    def _rank_hears(self, here: Consumer, rank: int, reply: int, live: bool) -> Move:
        event = ("hear", self.messages.values[reply])
        replies = without(here.ranks[rank].replies, reply)
        return self._worked(FREE, here, rank, event, live, ("hear", reply), replies=replies)

    def _scheduler_moves(self, here: Consumer, left: int) -> Iterator[Move]:
        end = here.scheduler
        facts = self.schedulers.records[end.part].facts
        for reply in end.replies:
            yield self._hear(here, reply)
        if facts.calls - self._under_way(end):
            yield self._scheduled(FREE, here, "tick")
        if facts.beat and left >> BEAT & 1:
            yield self._scheduled(BEAT, here, "tick")
        if facts.calls and left >> EXPIRY & 1:
            yield self._scheduled(EXPIRY, here, "expire")
        if left >> ABORT & 1:
            for load in facts.abortable:
                yield self._scheduled(ABORT, here, ("abort", self.loads[load]))
        for load in facts.to_come:
            yield self._scheduled(FREE, here, ("arrive", self.loads[load]))

    def _rank_moves(self, here: Consumer, rank: int, live: bool, crashed: bool, left: int) -> Iterator[Move]:
        end = here.ranks[rank]
        facts = self.workers.records[end.part].facts
        for reply in end.replies:
            yield self._rank_hears(here, rank, reply, live)
        if facts.can_start:
            yield self._worked(FREE, here, rank, "start", live)
        for load in facts.busy:
            yield self._worked(FREE, here, rank, ("end", load, True), live)
            if crashed:
                yield self._worked(FREE, here, rank, ("end", load, False), live)
        if facts.calls - self._under_way(end) or facts.waits_to_report:
            yield self._worked(FREE, here, rank, "tick", live)
        if (facts.calls or facts.busy) and facts.open and left >> EXPIRY & 1:
            yield self._worked(EXPIRY, here, rank, "expire", live)
        if end.reports:
            yield self._report(here, rank)

    def _network_moves(self, here: Consumer, left: int) -> Iterator[Move]:
        """Requests are lost or repeated on their way; one that nobody waits for any more may as well stay there.

        Replies are lost when they are sent; repeated ones change nothing (:meth:`_sent` sees to it).
        """
        for rank, end in enumerate((here.scheduler, *here.ranks), start=-1):
            for message in dict.fromkeys(end.requests):
                label = (rank, self.messages.values[message])
                if left >> LOSS & 1 and self.messages.values[message].seq in self._calls(rank, end):
                    lost = end._replace(requests=without(end.requests, message))
                    yield self._move(LOSS, put(here, rank, lost), ("lose", *label))
                if left >> DUPLICATE & 1:
                    doubled = end._replace(requests=tuple(sorted((*end.requests, message))))
                    yield self._move(DUPLICATE, put(here, rank, doubled), ("duplicate", *label))

    def _calls(self, rank: int, end: End) -> frozenset[int]:
        if end.part == DEAD:
            return frozenset()
        calls: frozenset[int] = (self.schedulers if rank < 0 else self.workers).records[end.part].facts.calls
        return calls

    def _under_way(self, end: End) -> set[int]:
        """The numbers of the calls whose request or reply may still arrive."""
        return {self.messages.values[message].seq for message in (*end.requests, *end.replies)}

    def _dead(self, here: Consumer) -> Consumer:
        """The consumer is gone; what it sent may still arrive."""
        ranks = [End(DEAD, end.requests) for end in here.ranks]
        return Consumer(End(DEAD, here.scheduler.requests), tuple(ranks))

    def _scheduled(self, cost: int | None, here: Consumer, event: Any, key: Any = None, **changes: Any) -> Move:
        return self._move(cost, self._schedule(here, event, key, **changes), ("scheduler", event))

    def _schedule(self, here: Consumer, event: Any, key: Any = None, **changes: Any) -> Consumer:
        """Let the scheduler half do one thing, and its ranks take what it orders."""
        self.attempt = ("scheduler", event)
        end = here.scheduler._replace(**changes)
        part, out = self.schedulers.step(end.part, event, key)
        here = here._replace(scheduler=self._sent(end._replace(part=part), out.requests, self.schedulers))
        if out.orders is not None:
            key = ("orders", self._orders.number(out.orders))
            for rank in range(RANKS):
                here = self._work(here, rank, ("orders", out.orders), True, key)
        return here

    def _worked(
        self, cost: int | None, here: Consumer, rank: int, event: Any, live: bool, key: Any = None, **changes: Any
    ) -> Move:
        return self._move(cost, self._work(here, rank, event, live, key, **changes), ("rank", rank, event))

    def _work(self, here: Consumer, rank: int, event: Any, live: bool, key: Any = None, **changes: Any) -> Consumer:
        """Let one rank do one thing, and its ghosts see it."""
        self.attempt = ("rank", rank, event)
        end = here.ranks[rank]._replace(**changes)
        part, out = self.workers.step(end.part, event, key)
        ghosts = list(end.ghosts)
        if event[0] == "end":
            at = self.loads.index(event[1])
            ghosts[at] = {CLEAN: READ_CLEAN, DIRTY: READ_DIRTY}[ghosts[at]] if event[2] else NO_READ
        for load in out.started:
            ghosts[self.loads.index(load)] = CLEAN if live else DIRTY
        if out.report is not None:
            for load in out.report.received:
                at = self.loads.index(load)
                ghosts[at] = self._vouched(load, ghosts[at], load in out.report.failed)
            end = end._replace(reports=(*end.reports, self.reports.number(out.report)))
        end = self._sent(end._replace(part=part, ghosts=tuple(ghosts)), out.requests, self.workers)
        return put(here, rank, end)

    def _vouched(self, load: str, ghost: int, failed: bool) -> int:
        """What the ghost of a read becomes when its rank reports the load."""
        if failed:
            return ghost if ghost in (CLEAN, DIRTY) else NO_READ
        if ghost != READ_CLEAN:
            what = {NO_READ: "without a read", READ_DIRTY: "from pages that were reused under it"}
            raise Violation(f"S1: a rank reported {load} as received {what.get(ghost, 'while its read is busy')}")
        return VERIFIED

    def _report(self, here: Consumer, rank: int) -> Move:
        """The engine's step takes a rank's oldest report to the scheduler half."""
        end = here.ranks[rank]
        report = self.reports.values[end.reports[0]]
        here = put(here, rank, end._replace(reports=end.reports[1:]))
        here = self._schedule(here, ("report", report), ("report", end.reports[0]))
        for at, where in enumerate(self.schedulers.records[here.scheduler.part].facts.where):
            is_new = where == "done" and self.loads[at] in report.received
            if is_new and any(end.ghosts[at] != VERIFIED for end in here.ranks):
                raise Violation(f"S1: {self.loads[at]} is done, and not every rank's read was verified")
        return self._move(FREE, here, ("report", rank, report))

    def _sent(self, end: End, requests: tuple[AnyRequest, ...], machine: Machine[Any]) -> End:
        """``end`` after it has sent ``requests``: what is on its way already is not sent twice. Replies nobody can be
        waiting for any more are taken off the network: they change nothing, now or ever.
        """
        numbers = {self.messages.number(request) for request in requests}
        calls = machine.records[end.part].facts.calls
        replies = [
            reply
            for reply in end.replies
            if self.messages.values[reply].seq in calls
            or machine.step(end.part, ("hear", self.messages.values[reply]), ("hear", reply))[0] != end.part
        ]
        new = numbers.difference(end.requests)
        return end._replace(requests=tuple(sorted((*end.requests, *new))), replies=tuple(replies))

    def _move(self, cost: int | None, here: Consumer, label: tuple[Any, ...]) -> Move:
        number, swapped = self._consumer(here)
        return Move(cost, number, swapped, label)

    def _consumer(self, here: Consumer) -> tuple[int, bool]:
        """The number of a consumer with its ranks in their order, and whether they had to change places."""
        swapped = here.ranks[0] > here.ranks[1]
        if swapped:
            here = here._replace(ranks=(here.ranks[1], here.ranks[0]))
        number = self._numbers.get(here)
        if number is None:
            self._check(here)
            number = self._numbers[here] = len(self.consumers)
            self.consumers.append(here)
        return number, swapped

    # Rules

    def _check(self, here: Consumer) -> None:
        """S4: blocks are nobody else's, and no reader's that is served, while a read may write to them."""
        if here.scheduler.part == DEAD:
            return
        facts = self.schedulers.records[here.scheduler.part].facts
        for at, load in enumerate(self.loads):
            if any(end.ghosts[at] in (CLEAN, DIRTY) for end in here.ranks):
                if facts.reusable[at]:
                    raise Violation(f"S4: the consumer's blocks of {load} are free, and a read may still write to them")
                if facts.where[at] == "done":
                    raise Violation(f"S4: {load} is served from blocks that a read may still write to")

    def lasting(self, consumer: int) -> str:
        """What of a consumer would never end although nobody ever says anything to it again (L1); empty if all does."""
        found = self._quiet.get(consumer)
        if found is None:
            found = self._quiet[consumer] = self._settle(self.consumers[consumer])
        return found

    def _settle(self, here: Consumer) -> str:
        if here.scheduler.part == DEAD:
            return ""
        for _ in range(_SETTLING_STEPS):
            here = self.consumers[self._consumer(self._silent(here))[0]]
            moved = self._settling_step(here)
            if moved is None:
                break
            here = moved
        scheduler = self.schedulers.records[here.scheduler.part].facts
        ranks = [self.workers.records[end.part].facts.quiet for end in here.ranks]
        return "; ".join(text for text in (scheduler.quiet, *ranks) if text)

    def _settling_step(self, here: Consumer) -> Consumer | None:
        """The next thing to happen when nothing is heard: time passes, reports are taken, and reads end at last."""
        for rank, end in enumerate(here.ranks):
            facts = self.workers.records[end.part].facts
            if end.reports:
                return self.consumers[self._report(here, rank).consumer]
            if facts.can_start:
                return self._work(here, rank, "start", False)
            if facts.calls or facts.open:
                return self._work(here, rank, "tick" if facts.waits_to_report else "expire", False)
            if facts.busy:
                return self._work(here, rank, ("end", facts.busy[0], True), False)
        facts = self.schedulers.records[here.scheduler.part].facts
        for load in facts.to_come:
            return self._schedule(here, ("arrive", self.loads[load]))
        return self._schedule(here, "expire" if facts.calls else "tick") if facts.quiet else None

    @staticmethod
    def _silent(here: Consumer) -> Consumer:
        ranks = tuple(end._replace(requests=(), replies=()) for end in here.ranks)
        return Consumer(here.scheduler._replace(requests=(), replies=()), ranks)

    def lasting_lease(self, producer: int) -> str:
        """The same of a producer."""
        for _ in range(50):
            facts = self.producers.records[producer].facts
            if not facts.deadline:
                break
            producer, _ = self.producers.step(producer, "tick")
        return f"{facts.leases} records at the producer" if facts.leases else ""


def without(messages: tuple[int, ...], message: int) -> tuple[int, ...]:
    at = messages.index(message)
    return messages[:at] + messages[at + 1 :]


def with_(messages: tuple[int, ...], message: int) -> tuple[int, ...]:
    return messages if message in messages else tuple(sorted((*messages, message)))


def sent_by(here: Consumer) -> tuple[tuple[int, ...], ...]:
    return (here.scheduler.requests, *sorted(end.requests for end in here.ranks))


def put(here: Consumer, rank: int, end: End) -> Consumer:
    if rank < 0:
        return here._replace(scheduler=end)
    ranks = list(here.ranks)
    ranks[rank] = end
    return here._replace(ranks=tuple(ranks))
