"""What the endpoint's thread does, turn by turn, on a scripted router and a clock that stands still unless told."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest

from kvlease.core.digest import prompt_digest
from kvlease.core.ids import Incarnation, LeaseId, LeaseToken
from kvlease.core.leases import LeaseTiming
from kvlease.core.messages import (
    Acquire,
    Granted,
    Hello,
    Invalid,
    Ping,
    Pong,
    Renew,
    Renewed,
    decode_reply,
    encode,
)
from kvlease.net.ledger import GrantItem, GrantRefusedError, Ledger, RevokeAll
from kvlease.net.loop import BATCH_MESSAGES, Loop

US = Incarnation(b"producer-life-01")
TOKEN = LeaseToken(b"token-of-lease-1")
TIMING = LeaseTiming(30.0, 10.0, 600.0, 0.2, 600.0, 100)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0
        self.step = 0.0

    def __call__(self) -> float:
        self.now += self.step
        return self.now


class Frame:
    def __init__(self, data: bytes) -> None:
        self.bytes = data

    def get(self, _: str) -> str:
        return "10.0.0.9"


class ScriptedRouter:
    """Each poll plays the next turn of the script: a function that fills the inbox or moves the clock."""

    def __init__(self, ledger: Ledger, *turns: Callable[[ScriptedRouter], None]) -> None:
        self.ledger = ledger
        self.turns = deque(turns)
        self.inbox: deque[list[Frame]] = deque()
        self.sent: list[Any] = []
        self.slept: list[float | None] = []
        self.is_full = False
        self.is_closed = False

    def put(self, *messages: Any) -> None:
        for message in messages:
            frames = message if isinstance(message, list) else [encode(message)]
            self.inbox.append([Frame(b"peer"), *map(Frame, frames)])

    def poll(self, timeout_s: float | None) -> list[int]:
        self.slept.append(timeout_s)
        if self.turns:
            self.turns.popleft()(self)
        elif not self.inbox:
            self.ledger.is_closing = True
        return []

    def try_receive(self) -> list[Frame] | None:
        return self.inbox.popleft() if self.inbox else None

    def send(self, routing_id: bytes, payload: bytes) -> bool:
        assert routing_id == b"peer"
        self.sent.append(decode_reply(payload))
        return not self.is_full

    def close(self) -> None:
        self.is_closed = True


class Stage:
    def __init__(self) -> None:
        self.clock = Clock()
        self.ledger = Ledger(self.clock)
        self.ledger.open()

    def play(self, *turns: Callable[[ScriptedRouter], None]) -> ScriptedRouter:
        router = ScriptedRouter(self.ledger, *turns)
        Loop(router, self.ledger, US, TIMING, self.clock).run()  # type: ignore[arg-type]
        return router

    def grant(self, lease: str = "L", **fields: Any) -> None:
        ours = {"token": TOKEN, "token_ids": [1, 2, 3], "num_tokens": 3, "lora": None, "cache_salt": None}
        ours |= {"mm_hashes": [], "block_ids": [[4, 5]]}
        self.ledger.grant(GrantItem(lease=LeaseId(lease), **(ours | fields)))

    def ended(self) -> list[tuple[str, str]]:
        return [(ended.lease, ended.why.value) for ended in self.ledger.take_ended()]


def acquire(lease: str = "L") -> Acquire:
    digest = prompt_digest([1, 2, 3], 3, None, None, [])
    return Acquire(seq=1, to=US, lease=lease, token=TOKEN, reader="c/1", channel="c", digest=digest)


def renew() -> Renew:
    return Renew(seq=2, to=US, channel="c", base=0, generation=0)


@pytest.fixture
def stage() -> Stage:
    return Stage()


def test_a_grant_is_applied_before_the_message_that_follows_it(stage: Stage) -> None:
    def both(router: ScriptedRouter) -> None:
        router.put(Ping(seq=5, to=US), acquire())
        stage.grant()

    router = stage.play(both)
    assert router.sent[0] == Pong(seq=5, incarnation=US)
    assert isinstance(router.sent[1], Granted)
    assert router.sent[1].blocks == [[(4, 2)]]


def test_it_sleeps_until_the_next_deadline_and_for_ever_without_one(stage: Stage) -> None:
    router = stage.play(lambda _: stage.grant(), lambda _: None)
    assert router.slept == [None, 30.0, 30.0]


def test_an_expiry_never_beats_a_message_that_lay_in_the_inbox(stage: Stage) -> None:
    def late(router: ScriptedRouter) -> None:  # it wakes up eleven seconds later, and the renewal is the last of many
        router.put(*[Ping(seq=n, to=US) for n in range(2 * BATCH_MESSAGES)], renew())
        stage.clock.now += 11

    seen: list[list[tuple[str, str]]] = []
    stage.grant()
    router = stage.play(lambda router: router.put(acquire()), late, lambda _: seen.append(stage.ended()))
    assert isinstance(router.sent[-1], Renewed)
    assert seen == [[]]


def test_a_flood_cannot_put_expiry_off_for_long(stage: Stage) -> None:
    ended: list[tuple[str, str]] = []
    left: list[int] = []

    def flood(router: ScriptedRouter) -> None:
        router.put(*[Ping(seq=n, to=US) for n in range(10_000)])
        stage.clock.now += 31
        stage.clock.step = 0.001

    def look(router: ScriptedRouter) -> None:
        ended.extend(stage.ended())
        left.append(len(router.inbox))

    stage.grant()
    stage.play(lambda _: None, flood, *[look] * 12)
    assert ended == [("L", "expired")]
    assert left[-1] > 5000


def test_closing_does_not_wait_for_a_flood_to_end(stage: Stage) -> None:
    def flood(router: ScriptedRouter) -> None:
        router.put(*[Ping(seq=n, to=US) for n in range(10_000)])
        stage.ledger.is_closing = True

    assert len(stage.play(flood).sent) == BATCH_MESSAGES


def test_what_cannot_be_read_is_answered_where_it_has_a_number(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    numbered = b"\x82\xa3seq\x07\xa4type\xa4Nope"
    router = stage.play(
        lambda router: router.put([b""], [b"\xc1" * 50], [numbered], [b"", b"x", b"y"], [b"", numbered])
    )
    assert [(reply.seq, reply.reason) for reply in router.sent] == [(7, "malformed"), (7, "malformed")]
    assert all(isinstance(reply, Invalid) for reply in router.sent)
    assert stage.ledger.snapshot.counters["invalid_malformed"] == 5
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 1, "one line for each kind of fault in ten seconds"
    assert "10.0.0.9" in lines[0]


def test_swallowed_lines_are_counted_in_the_next(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    def later(router: ScriptedRouter) -> None:
        stage.clock.now += 10
        router.put([b"x"])

    stage.play(lambda router: router.put([b"x"], [b"x"], [b"x"]), later)
    assert [record.getMessage().partition("(")[2] for record in caplog.records] == [
        "",
        "2 more like this since the last such line)",
    ]


def test_a_bug_in_answering_one_message_stops_nothing(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    stage.ledger.site = object()  # type: ignore[assignment]
    hello = Hello(seq=8, to=US, version=1, factors={}, fingerprint="", ranks=[])
    router = stage.play(lambda router: router.put(hello, Ping(seq=9, to=US)))
    assert [type(reply) for reply in router.sent] == [Invalid, Pong]
    assert (router.sent[0].seq, router.sent[0].reason) == (8, "internal")
    assert stage.ledger.snapshot.counters["invalid_internal"] == 1
    assert caplog.records[0].exc_info


def test_a_grant_that_cannot_be_carried_out_ends_as_revoked(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    stage.grant(num_tokens=4)
    stage.grant("M")
    router = stage.play(lambda router: router.put(acquire("M")))
    assert isinstance(router.sent[0], Granted)
    assert stage.ledger.snapshot.counters["grants_failed"] == 1
    assert dict(stage.ended()) == {"L": "revoked", "M": "revoked"}
    assert TOKEN.hex() not in caplog.text
    assert str(TOKEN) not in caplog.text


def test_revoking_ends_what_was_granted_before_and_not_what_comes_after(stage: Stage) -> None:
    seen = []

    def order(router: ScriptedRouter) -> None:
        stage.grant("L")
        stage.ledger.order(RevokeAll())
        stage.grant("M")
        router.put(acquire("M"))

    router = stage.play(order, lambda _: seen.extend(stage.ended()))
    assert seen == [("L", "revoked")]
    assert isinstance(router.sent[0], Granted)


def test_replies_that_cannot_be_sent_are_counted(stage: Stage) -> None:
    def full(router: ScriptedRouter) -> None:
        router.is_full = True
        router.put(Ping(seq=1, to=US), Ping(seq=2, to=US))

    stage.play(full, lambda _: None)
    assert stage.ledger.snapshot.counters["replies_dropped"] == 2


def test_a_broken_loop_ends_every_lease_once_and_refuses_grants(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    def breaks(_: ScriptedRouter) -> None:
        stage.grant("queued")
        raise RuntimeError("a bug")

    stage.grant("applied")
    router = stage.play(lambda router: router.put(acquire("applied")), breaks)
    assert router.is_closed
    assert sorted(stage.ended()) == [("applied", "revoked"), ("queued", "revoked")]
    assert stage.ended() == []
    assert stage.ledger.num_live == 0
    with pytest.raises(GrantRefusedError, match="has stopped"):
        stage.grant("another")
    assert [record.levelno for record in caplog.records] == [logging.CRITICAL]


def test_a_name_can_be_granted_again_only_after_its_end_was_fetched(stage: Stage) -> None:
    stage.grant()
    with pytest.raises(GrantRefusedError, match="has not ended"):
        stage.grant()
    stage.ledger.report_revoked(LeaseId("L"))
    with pytest.raises(GrantRefusedError, match="has not ended"):
        stage.grant()
    assert stage.ended() == [("L", "revoked")]
    stage.grant()
    assert stage.ledger.num_live == 1


def test_a_grant_never_shows_its_token_or_prompt(stage: Stage) -> None:
    item = GrantItem(LeaseId("L"), TOKEN, [123456], 1, None, "salt-of-a-tenant", [], [[1]])
    assert "token-of" not in repr(item)
    assert "123456" not in repr(item)
    assert "salt" not in repr(item).replace("cache_salt", "")
