"""The world of the table checker: the real table, readers that do all that a reader may, and a ration of faults.

One producer, one lease, two readers of two ranks. A reader is only what it may do at most: acquire, read, commit with
each rank, be aborted. A world is one number, so that millions of them fit into a dict.
:mod:`tests.sim.exhaustive_table` explores what can be reached.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from kvlease.core.ids import ReaderId
from kvlease.core.leases import Grant, LeaseState, LeaseTable
from kvlease.core.messages import Acquire, Commit, Committed, Gone, GoneReason, Granted, Release, Released, Request
from tests.sim.exhaustive_machine import START, Machine, Part, Violation, freeze
from tests.sim.exhaustive_parts import INCARNATIONS, LEASE, RANKS, TIMING, TOKEN

READERS: Final = 2
DIGEST: Final = b"digest"
KINDS: Final = 2 + RANKS
ACQUIRE, RELEASE = 0, KINDS - 1
"""What one reader sends: its acquire, a commit for each rank, its release. A message is ``reader * KINDS + kind``."""

NO_MESSAGE: Final = READERS * KINDS


def _messages(has_siblings: bool) -> Iterator[Request]:
    for number in range(READERS):
        common: dict[str, Any] = {"seq": 0, "to": INCARNATIONS[0], "lease": LEASE, "token": TOKEN}
        reader = ReaderId(f"reader{number}")
        channel = f"channel{number}"
        yield Acquire(**common, reader=reader, channel=channel, digest=DIGEST, has_siblings=has_siblings)
        for rank in range(RANKS):
            yield Commit(**common, reader=reader, rank=rank, of_ranks=RANKS)
        yield Release(**common, reader=reader)


MESSAGES: Final = tuple(_messages(has_siblings=True))


# The table


@dataclass(frozen=True)
class TableFacts:
    """``jumps``: how many deadlines lie ahead; ``grace``: which of them ends only a grace (-1: none)."""

    life: int
    live: bool
    jumps: int
    grace: int
    due: bool


class TablePart(Part):
    """The real lease table and what it has said. Life 1 lends the same blocks by the same name, to nobody we know."""

    messages = MESSAGES

    def __init__(self, life: int) -> None:
        self.now = START
        self.life = life
        self.table = LeaseTable(INCARNATIONS[life], TIMING)
        self.ended = 0
        self.ended_at: float | None = None
        self.released: set[str] = set()
        self.vouched: set[tuple[str, int]] = set()
        self.table.grant(Grant(LEASE, TOKEN, DIGEST, 16, [[(3, 1)]]), self.now)

    def apply(self, event: Any) -> Any:
        """A message (its number), ``expire``, ``revoke``, or a jump to one of the deadlines ahead."""
        reply = None
        match event:
            case int():
                reply = self._handle(self.messages[event])
            case "expire":
                self.table.expire(self.now)
            case "revoke":
                self.table.revoke_all(self.now)
            case ("jump", which):
                self.now = self._ahead()[which]
        self._note_ended()
        return reply

    def _handle(self, request: Any) -> Any:
        before = freeze(self.table, self.now) if self.life else None
        reply = self.table.handle(request, self.now)
        if self.life and freeze(self.table, self.now) != before:
            raise Violation("S4: a message for the producer that died changes the leases of the one that lives")
        match request, reply:
            case Acquire(reader=reader), Granted():
                if self.life or self.ended:
                    raise Violation("S4: Granted, and the blocks were given back")
                if reader in self.released:
                    raise Violation("P1: Granted to a reader that has heard Released")
            case Commit(reader=reader, rank=rank), Committed():
                self._vouch(reader, rank)
            case Commit(reader=reader, rank=rank), _ if (reader, rank) in self.vouched and not self._is_forgotten():
                raise Violation("P1: a commit that was answered Committed is answered otherwise when it is repeated")
            case Release(reader=str() as reader), Released() if not self.ended:  # after that, nobody hears Granted
                self.released.add(reader)
        return reply

    def _vouch(self, reader: str, rank: int) -> None:
        if self.life:
            raise Violation("S1: a commit to the producer that died is answered Committed")
        if (reader, rank) not in self.vouched:
            if self.ended:
                raise Violation("S1: Committed, and the blocks were given back")
            if reader in self.released:
                raise Violation("P1: Committed to a reader that has heard Released")
        self.vouched.add((reader, rank))

    def _is_forgotten(self) -> bool:
        return self.ended_at is not None and self.now >= self.ended_at + TIMING.tombstone_ttl_s

    def _note_ended(self) -> None:
        for ended in self.table.take_ended():
            self.ended += 1
            self.ended_at = self.now
            if self.table.state_of(ended.lease) is not None:
                raise Violation("S4: the blocks are freed while their lease lives")
        if self.ended > 1:
            raise Violation("S4: the lease was reported as ended twice")
        if not self.ended and self.table.state_of(LEASE) is None:
            raise Violation("S4: the lease is over and was not reported")

    def _ahead(self) -> list[float]:
        """All deadlines to come; what happens at them comes only with ``expire``."""
        table = self.table
        deadlines = {*table._channel_alarms._at.values(), *table._alarms._at.values()}
        deadlines.add(table._tombstones.next_deadline() or math.inf)
        return sorted(at for at in deadlines if self.now < at < math.inf)

    def facts(self) -> TableFacts:
        ahead, next_at = self._ahead(), self.table.next_deadline()
        lease = self.table._leases.get(LEASE)
        lingers = lease is not None and lease.state is LeaseState.LINGERING
        grace_end = self.table._grace_end(lease) if lease is not None and lingers else None
        facts = TableFacts(
            life=self.life,
            live=not self.life and not self.ended,
            jumps=len(ahead),
            grace=ahead.index(grace_end) if grace_end in ahead else -1,
            due=next_at is not None and next_at <= self.now,
        )
        if facts.live:
            self._probe()
        self._drain()
        return facts

    def _probe(self) -> None:
        """S2: who has no right hears so while the lease lives; :meth:`core` is known, and the part is not used on."""
        acquire, commit, *_ = self.messages
        lies = [
            (acquire, {"token": b"?" * 16}, GoneReason.BAD_TOKEN),
            (commit, {"token": b"?" * 16}, GoneReason.BAD_TOKEN),
            (commit, {"reader": "stranger"}, GoneReason.UNKNOWN),
            (acquire, {"reader": "stranger", "digest": b"another"}, GoneReason.MISMATCH),
        ]
        for request, lie, why in lies:
            told = {name: getattr(request, name) for name in request.__struct_fields__} | lie
            reply = self.table.handle(type(request)(**told), self.now)  # type: ignore[arg-type]
            if not isinstance(reply, Gone) or reply.why is not why:
                raise Violation(f"S2: {type(request).__name__} with another {[*lie]} is answered {reply!r}")

    def _drain(self) -> None:
        """L1: time alone ends the lease once, and empties the table."""
        for _ in range(20):
            self.table.expire(self.now)
            self._note_ended()
            ahead = self._ahead()
            if not ahead:
                break
            self.now = ahead[0]
        left = len(self.table) + self.table.num_channels + self.table.num_tombstones
        if left or self.ended != 1:
            raise Violation(f"L1: when nobody says anything any more, {left} records stay; {self.ended} leases ended")

    def core(self) -> Any:
        return self.life, self.table, self.ended, self.released, self.vouched, self.ended_at


class LoneTablePart(TablePart):
    """Two readers that know nothing of each other: a lease that nobody reads does not linger."""

    messages = tuple(_messages(has_siblings=False))


# The readers

WAITS, YES, NO = range(3)
"""An acquire: not answered (whether it was sent or not), granted, refused. A release: under way, answered, not sent."""

IDLE, READS, SENT, SENT_DIRTY, GOOD, BAD = range(6)
"""A rank: has not begun, reads, has sent its commit, or has its answer. Dirty: the blocks were reused before its read
ended, so they were not the lease's at one end or at both. A read begins when it may, for that makes it the longest, and
one that is dirty has ended, for it can become no worse.
"""

_DIRTY: Final = {READS: SENT_DIRTY}


class Reader(NamedTuple):
    """All that the model knows of one reader."""

    acquire: int = WAITS
    release: int = NO
    ranks: tuple[int, ...] = (IDLE,) * RANKS

    def sends(self) -> list[int]:
        """The kinds of its unanswered messages."""
        kinds = [ACQUIRE] if self.acquire == WAITS else []
        kinds += [rank + 1 for rank, state in enumerate(self.ranks) if state in (SENT, SENT_DIRTY)]
        return kinds + ([RELEASE] if self.release == WAITS else [])

    def hears(self, kind: int, reply: Any) -> Reader:
        """The reader after the answer to its message."""
        if kind == ACQUIRE:
            granted = isinstance(reply, Granted)
            return self._replace(acquire=YES, ranks=(READS,) * RANKS) if granted else self._replace(acquire=NO)
        if kind == RELEASE:
            return self._replace(release=YES)
        if not isinstance(reply, Committed):
            return self.with_rank(kind - 1, BAD)
        if self.ranks[kind - 1] == SENT_DIRTY:
            raise Violation("S1: Committed for a read under which the blocks were reused")
        return self.with_rank(kind - 1, GOOD)

    def with_rank(self, rank: int, state: int) -> Reader:
        return self._replace(ranks=(*self.ranks[:rank], state, *self.ranks[rank + 1 :]))

    def dirtied(self) -> Reader:
        """The reader after the blocks were reused."""
        return self._replace(ranks=tuple(_DIRTY.get(state, state) for state in self.ranks))


# The rations: one number, of which each fault has its own bits

LOSS, DUPLICATE, EXPIRY, ABORT, CRASH, GRACE = 1, 4, 8, 16, 32, 64
FULL: Final = 2 * LOSS + DUPLICATE + EXPIRY + ABORT + CRASH + GRACE
"""Two losses, and one of everything else. The end of a grace is no fault, but rationed too."""

LEFT: Final = 128
"""How many rations there can be: one number is a world times this, plus what is left."""

_MASKS: Final = (3 * LOSS, DUPLICATE, EXPIRY, ABORT, CRASH, GRACE)


def _pay(left: int, cost: int) -> int:
    """What is left of the rations after ``cost``; -1 if that is too much."""
    return left - cost if all(left & mask >= cost & mask for mask in _MASKS) else -1


PAID: Final = [[_pay(left, cost) for cost in range(LEFT)] for left in range(LEFT)]
"""What is left after a cost (the second index), or -1."""


class Step(NamedTuple):
    """What can happen: what it costs, and what there is afterwards. ``copy``: a message that stays under way."""

    cost: int
    table: int
    readers: tuple[int, int]
    copy: int
    label: tuple[Any, ...]


Image = tuple[bool, tuple[bool, bool]]
"""An exchange of names: whether the readers change places, and before that, whether the ranks of each do."""

IMAGES: Final[list[Image]] = [
    (swap, (first, second)) for swap, first, second in itertools.product((False, True), repeat=3)
]


def _renamed(message: int, image: Image) -> int:
    if message == NO_MESSAGE:
        return message
    reader, kind = divmod(message, KINDS)
    if image[1][reader] and 0 < kind < RELEASE:
        kind = RELEASE - kind
    return (1 - reader if image[0] else reader) * KINDS + kind


RENAMED: Final = [tuple(_renamed(message, image) for message in range(NO_MESSAGE + 1)) for image in IMAGES]
"""What each message is called in each of the images."""


class Model:
    """All worlds: a table, two readers, a copy under way, and what is left of the rations, packed into one number."""

    SIZE: Final = 256

    def __init__(self, part: type[TablePart] = TablePart) -> None:
        self.tables: Machine[TablePart] = Machine(part)
        self.readers: list[Reader] = []
        self._numbers: dict[Reader, int] = {}
        self._steps: dict[tuple[int, int, int], list[Step]] = {}
        self._orbits: dict[int, tuple[int, list[int]]] = {}
        self._canonical: dict[tuple[int, int, int, int], int] = {}
        self._over: set[int] = set()
        self.attempt: tuple[Any, ...] = ()

    def first(self, left: int) -> int:
        reader = self._number(Reader())
        return self.world(self.tables.begin(0), (reader, reader), NO_MESSAGE) * LEFT + left

    def _number(self, reader: Reader) -> int:
        found = self._numbers.get(reader)
        if found is None:
            found = self._numbers[reader] = len(self.readers)
            self.readers.append(reader)
        return found

    # Symmetry

    def world(self, table: int, readers: tuple[int, int], copy: int) -> int:
        """The number of the smallest of all images of a world."""
        key = (table, *readers, copy)
        found = self._canonical.get(key)
        if found is None:
            smallest, images = self._smallest(table)
            first, second, message = min(self._seen(readers, copy, image) for image in images)
            found = ((smallest * self.SIZE + first) * self.SIZE + second) * (NO_MESSAGE + 1) + message
            self._canonical[key] = found
        return found

    def unpack(self, world: int) -> tuple[int, tuple[int, int], int]:
        world, copy = divmod(world, NO_MESSAGE + 1)
        world, second = divmod(world, self.SIZE)
        table, first = divmod(world, self.SIZE)
        return table, (first, second), copy

    def image_of(self, table: int, readers: tuple[int, int], copy: int) -> tuple[int, ...]:
        """Which image of a world is the smallest."""
        return RENAMED[min(self._smallest(table)[1], key=lambda image: self._seen(readers, copy, image))]

    def _seen(self, readers: tuple[int, int], copy: int, image: int) -> tuple[int, int, int]:
        swap, flips = IMAGES[image]
        first, second = (
            self._number(one._replace(ranks=one.ranks[::-1])) if flip else self._number(one)
            for one, flip in zip((self.readers[number] for number in readers), flips, strict=True)
        )
        return (second, first, RENAMED[image][copy]) if swap else (first, second, RENAMED[image][copy])

    def _smallest(self, table: int) -> tuple[int, list[int]]:
        """The smallest of all images of a table, and which of them that is."""
        found = self._orbits.get(table)
        if found is None:
            life, *events = self.tables.records[table].history
            images = [
                self.tables.replay((life, *(names[event] if isinstance(event, int) else event for event in events)))
                for names in RENAMED
            ]
            smallest = min(images)
            for way, image in enumerate(images):  # of each image, what else leads on to the smallest
                onward = [
                    RENAMED.index(tuple(RENAMED[to][RENAMED[way].index(at)] for at in range(NO_MESSAGE + 1)))
                    for to in range(len(images))
                    if images[to] == smallest
                ]
                self._orbits[image] = smallest, onward
            found = self._orbits[table]
        return found

    # What can happen

    def steps(self, world: int) -> Iterator[Step]:
        """All that can happen, whatever is left of the rations."""
        table, readers, copy = self.unpack(world)
        found = self._steps.get((table, *readers))
        if found is None:
            found = self._steps[table, *readers] = list(self._find_steps(table, readers))
        yield from found
        if copy != NO_MESSAGE:
            self.attempt = ("copy", copy)
            after, _ = self._ask(table, copy)
            yield self._step(0, table, after, readers, self.attempt)

    def _find_steps(self, table: int, readers: tuple[int, int]) -> Iterator[Step]:
        facts = self.tables.records[table].facts
        if not facts.live:
            self._see_end(table)
        for which, number in enumerate(readers):
            reader = self.readers[number]
            for kind in reader.sends():
                yield from self._message_steps(table, readers, which, kind)
            for label, cost, after in self._own(reader):
                both = _put(readers, which, self._number(after))
                yield self._step(cost, table, table, both, (label[0], which, *label[1:]))
        if facts.life:  # what nobody has a right to any more only passes; every state sees to that it does
            return
        if facts.due:
            yield self._producer_step(0, table, readers, "expire")
        for jump in range(facts.jumps):
            yield self._producer_step(GRACE if jump == facts.grace else EXPIRY, table, readers, ("jump", jump))
        yield self._producer_step(CRASH, table, readers, "revoke")
        yield self._step(CRASH, table, self.tables.begin(1), readers, ("crash",))

    def _see_end(self, table: int) -> None:
        """No message changes anything after the end, so from there on it is as good to lose or repeat none."""
        if table not in self._over:
            self._over.add(table)
            for message in range(NO_MESSAGE):
                self.attempt = ("handle", message)
                if self._ask(table, message)[0] != table:
                    raise Violation("S4: the blocks were given back, and a message changes what the table holds")

    def _message_steps(self, table: int, readers: tuple[int, int], which: int, kind: int) -> Iterator[Step]:
        """A message is handled: its answer comes or is lost, which leaves it under way; and so does its repetition."""
        message = which * KINDS + kind
        self.attempt = ("handle", message)
        after, reply = self._ask(table, message)
        heard = _put(readers, which, self._number(self.readers[readers[which]].hears(kind, reply)))
        name = type(reply).__name__
        for cost, end in ((0, heard), (LOSS, readers)):
            yield self._step(cost, table, after, end, ("handle", message, name, cost > 0, False))
            step = self._step(cost + DUPLICATE, table, after, end, ("handle", message, name, cost > 0, True))
            yield step._replace(copy=message)

    @staticmethod
    def _own(reader: Reader) -> Iterator[tuple[tuple[Any, ...], int, Reader]]:
        """What a reader does by itself."""
        for rank, state in enumerate(reader.ranks):
            if state == READS:
                yield ("end", rank), 0, reader.with_rank(rank, SENT)
        if reader.release == NO:
            yield ("abort",), ABORT, reader._replace(release=WAITS)

    def _producer_step(self, cost: int, table: int, readers: tuple[int, int], event: Any) -> Step:
        self.attempt = ("producer", event)
        after, _ = self.tables.step(table, event)
        return self._step(cost, table, after, readers, self.attempt)

    def _ask(self, table: int, message: int) -> tuple[int, Any]:
        """Let the table handle a message, and see that it makes no difference to handle it twice."""
        after, reply = self.tables.step(table, message)
        if after != table:
            again, repeated = self.tables.step(after, message)
            if again != after or repeated != reply:
                raise Violation(f"P1: {MESSAGES[message]!r}, repeated at once, is answered {repeated!r}, not {reply!r}")
        return after, reply

    def _step(self, cost: int, before: int, after: int, readers: tuple[int, int], label: tuple[Any, ...]) -> Step:
        """One step; the blocks are reused the moment the lease has ended, or the producer died."""
        records = self.tables.records
        if records[before].facts.live and not records[after].facts.live:
            first, second = (self._number(self.readers[number].dirtied()) for number in readers)
            readers = first, second
        return Step(cost, after, readers, NO_MESSAGE, label)

    def is_served(self, world: int) -> bool:
        """Every rank of both readers heard Committed."""
        return all(self.readers[number].ranks == (GOOD,) * RANKS for number in self.unpack(world)[1])


def _put(readers: tuple[int, int], which: int, number: int) -> tuple[int, int]:
    return (readers[0], number) if which else (number, readers[1])
