"""The lease table under whatever comes in whatever order, against the few sentences that must hold for all of it."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvlease.core.ids import Incarnation, LeaseId, LeaseToken
from kvlease.core.leases import Ended, Grant, LeaseTable, LeaseTiming
from kvlease.core.messages import (
    Acquire,
    Commit,
    Committed,
    GoneReason,
    Granted,
    Holding,
    Release,
    Renew,
    Renewed,
    Reply,
)

US = Incarnation(b"producer-life-01")
TOMBSTONES_MAX = 2
READERS = ["c/0", "c/1", "d/0"]

names, readers, ranks = st.sampled_from(["L0", "L1", "L2"]), st.sampled_from(READERS), st.integers(0, 1)


class Lent:
    """What the model knows of one grant.

    ``promised``: until when each reader that acquired was told that its pages stay. ``out``: those that are out for
    sure. Readers that may be out (the producer held them no more when they were removed) are in neither.
    """

    def __init__(self, number: int, now: float) -> None:
        self.token = LeaseToken(number.to_bytes(16, "little"))
        self.granted_at = now
        self.ended: Ended | None = None
        self.ended_at, self.end_number = 0.0, 0
        self.acquired: set[str] = set()
        self.promised: dict[str, float] = {}
        self.out: set[str] = set()
        self.committed: set[tuple[str, int]] = set()

    def has_read(self, reader: str) -> bool:
        return {(reader, 0), (reader, 1)} <= self.committed

    def put_out(self, reader: str) -> None:
        self.promised.pop(reader, None)
        self.out.add(reader)


class LeasesUnderFire(RuleBasedStateMachine):
    @initialize(grace_s=st.sampled_from([0.0, 0.5]))
    def begin(self, grace_s: float) -> None:
        self.timing = LeaseTiming(10.0, 4.0, 30.0, grace_s, 8.0, TOMBSTONES_MAX)
        self.table = LeaseTable(US, self.timing)
        self.now = 0.0
        self.lent: dict[str, Lent] = {}
        self.num_granted = self.num_ended = 0
        self.generation = {"c": 0, "d": 0}
        self.just_ended: list[Lent] = []

    def ask(self, kind: Any, **fields: Any) -> Reply:
        reply = self.table.handle(kind(seq=1, to=US, **fields), self.now)
        self.collect()
        return reply

    def collect(self) -> None:
        for ended in self.table.take_ended():
            lent = self.lent[ended.lease]
            assert lent.ended is None, "a lease ended twice"
            self.num_ended += 1
            lent.ended, lent.ended_at, lent.end_number = ended, self.now, self.num_ended
            self.just_ended.append(lent)

    def is_remembered(self, lent: Lent) -> bool:
        young = self.now < lent.ended_at + self.timing.tombstone_ttl_s
        return lent.ended is None or (young and self.num_ended < lent.end_number + TOMBSTONES_MAX)

    @rule(name=names)
    def grant(self, name: str) -> None:
        if name not in self.lent or self.lent[name].ended:
            self.num_granted += 1
            self.lent[name] = Lent(self.num_granted, self.now)
            self.table.grant(Grant(LeaseId(name), self.lent[name].token, b"prompt", 1, []), self.now)

    @rule(name=names, reader=readers, digest=st.sampled_from([b"prompt", b"prompt", b"prompt", b"another"]))
    def acquire(self, name: str, reader: str, digest: bytes) -> None:
        if name not in self.lent:
            return
        lent = self.lent[name]
        was_live = lent.ended is None
        fields = {"lease": name, "token": lent.token, "reader": reader, "channel": reader[0], "digest": digest}
        granted = isinstance(self.ask(Acquire, **fields), Granted)
        may = was_live and digest == b"prompt" and not lent.has_read(reader) and reader not in lent.out
        assert may or not granted
        assert granted or not may or reader not in lent.promised
        if granted:
            lent.acquired.add(reader)
            for other in self.lent.values():
                other.promised.pop(reader, None)
            lent.promised[reader] = self.now + self.timing.lease_extension_s

    @rule(name=names, reader=readers, rank=ranks)
    def commit(self, name: str, reader: str, rank: int) -> None:
        if name not in self.lent:
            return
        lent = self.lent[name]
        was_live, already, remembered = lent.ended is None, (reader, rank) in lent.committed, self.is_remembered(lent)
        reply = self.ask(Commit, lease=name, token=lent.token, reader=reader, rank=rank, of_ranks=2)
        if isinstance(reply, Committed):
            may = was_live and reader in lent.acquired and reader not in lent.out
            assert already or may, "unproven bytes were vouched for"
            lent.committed.add((reader, rank))
            if lent.has_read(reader):
                lent.promised.pop(reader, None)
        else:
            assert not (already and remembered), "a commit was forgotten"
            assert not (was_live and reader in lent.promised), "a reader of a live lease was turned away"

    @rule(name=names, reader=st.none() | readers)
    def release(self, name: str, reader: str | None) -> None:
        if name not in self.lent:
            return
        lent = self.lent[name]
        was_live = lent.ended is None
        self.ask(Release, lease=name, token=lent.token, reader=reader)
        if reader is None:
            assert not (was_live and lent.acquired and lent.ended), "a stranger ended a lease that somebody acquired"
        elif was_live and not lent.has_read(reader):
            lent.put_out(reader)

    @rule(channel=st.sampled_from("cd"), full=st.booleans(), more=st.booleans(), late=st.booleans(), data=st.data())
    def renew(self, channel: str, full: bool, more: bool, late: bool, data: Any) -> None:
        mine = [reader for reader in READERS if reader[0] == channel]
        removed = data.draw(st.lists(st.sampled_from(mine), max_size=1))
        reading = [(lent, name, r) for name, lent in self.lent.items() for r in mine if r in lent.promised]
        named = [(lent, name, r) for lent, name, r in reading if r not in removed]
        added = [Holding(lease=name, token=lent.token, reader=r) for lent, name, r in named]
        base = self.generation[channel]
        request = {"base": base, "generation": base + 1, "added": added, "removed": removed, "full": full, "more": more}
        for _ in range(1 + late):
            reply = self.ask(Renew, channel=channel, **request)
            if not isinstance(reply, Renewed):
                self.generation[channel] += 2
                return
            self.generation[channel] = base + 1
            for reader in removed:
                for lent in self.lent.values():
                    lent.promised.pop(reader, None)
            for lent, _, reader in named:
                lent.promised[reader] = self.now + self.timing.lease_extension_s

    @rule(seconds=st.sampled_from([0.0, 0.25, 2.0, 3.5, 8.0]))
    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.table.expire(self.now)
        self.collect()
        deadline = self.table.next_deadline()
        assert deadline is None or deadline > self.now

    @precondition(lambda self: self.now > 20)
    @rule()
    def revoke(self) -> None:
        self.table.revoke_all(self.now)
        self.collect()
        assert len(self.table) == 0

    @invariant()
    def each_lease_ends_exactly_once(self) -> None:
        assert self.num_granted == self.num_ended + len(self.table)
        assert self.table.num_tombstones <= TOMBSTONES_MAX

    @invariant()
    def no_reader_is_let_down(self) -> None:
        ended_now, self.just_ended = self.just_ended, []
        for lent in ended_now:
            why, age_s = lent.ended.why, lent.ended.age_s  # type: ignore[union-attr]
            waiting = [reader for reader, until in lent.promised.items() if self.now < until]
            too_old = age_s >= self.timing.max_lease_lifetime_s
            assert why is GoneReason.REVOKED or too_old or not waiting, f"{why} while {waiting} were reading"
            if why is GoneReason.EXPIRED and not lent.acquired:
                assert age_s >= self.timing.lease_duration_s

    def teardown(self) -> None:
        if hasattr(self, "table"):
            self.tick(31.0)
            self.tick(9.0)
            assert (len(self.table), self.table.num_tombstones, self.table.num_channels) == (0, 0, 0)
            assert self.table.next_deadline() is None
            assert self.num_granted == self.num_ended


LeasesUnderFire.TestCase.settings = settings(max_examples=200, stateful_step_count=60)
TestLeasesUnderFire = LeasesUnderFire.TestCase
