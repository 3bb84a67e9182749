"""Unanswered calls: sent again with the same seq, given up in time, forgotten without a trace."""

from __future__ import annotations

import pytest

from kvlease.core.calls import Calls
from kvlease.core.ids import Incarnation
from kvlease.core.messages import Ping

TO = Incarnation(b"i" * 16)


def ping(seq: int, to: Incarnation) -> Ping:
    return Ping(seq=seq, to=to)


def start(calls: Calls, call: str, now: float = 0.0, timeout_s: float = 2.0, resend: bool = True) -> int:
    return calls.start(call, ping, TO, now, timeout_s, resend).seq


def seqs(calls: Calls) -> list[int]:
    return [request.seq for request in calls.take_outbox()]


def test_a_request_is_sent_at_once_and_again_with_doubling_waits_until_its_time_is_over() -> None:
    calls = Calls()
    seq = start(calls, "a")
    assert seqs(calls) == [seq]
    sent_at = []
    while (at := calls.next_deadline()) is not None:
        expired = calls.tick(at)
        if expired:
            break
        assert seqs(calls) == [seq]
        sent_at.append(round(at, 6))
    assert sent_at == [0.2, 0.6, 1.4]
    assert [pending.call for pending in expired] == ["a"]
    assert len(calls) == 0
    assert calls.next_deadline() is None


def test_a_request_that_may_be_sent_once_is_sent_once() -> None:
    calls = Calls()
    seq = start(calls, "a", resend=False)
    assert seqs(calls) == [seq]
    assert calls.next_deadline() == 2.0
    assert calls.tick(1.9) == []
    assert seqs(calls) == []
    assert len(calls.tick(2.0)) == 1


def test_an_answer_settles_the_call_and_a_second_one_finds_nobody() -> None:
    calls = Calls()
    seq = start(calls, "a")
    pending = calls.settle(seq)
    assert pending is not None
    assert pending.call == "a"
    assert seqs(calls) == [], "what was not sent yet is not sent any more"
    assert calls.settle(seq) is None
    assert calls.tick(10.0) == []


def test_a_call_that_waits_cannot_be_made_twice() -> None:
    calls = Calls()
    start(calls, "a")
    with pytest.raises(ValueError, match="still waiting"):
        start(calls, "a")
    assert len(calls) == 1
    assert "a" in calls


def test_forgetting_by_name() -> None:
    calls = Calls()
    start(calls, "a")
    assert calls.forget("b") is None
    forgotten = calls.forget("a")
    assert forgotten is not None
    assert "a" not in calls
    assert start(calls, "a") != forgotten.seq


def test_forgetting_all_empties_the_outbox_too() -> None:
    calls = Calls()
    start(calls, "a")
    start(calls, "b")
    calls.post(ping(calls.next_seq(), TO))
    assert calls.has_outbox
    assert [pending.call for pending in calls.forget_all()] == ["a", "b"]
    assert not calls.has_outbox
    assert calls.next_deadline() is None


def test_the_outbox_holds_each_request_once_however_long_nobody_takes_it() -> None:
    calls = Calls()
    first, second = start(calls, "a"), start(calls, "b")
    calls.tick(0.2)
    calls.tick(0.6)
    assert seqs(calls) == [first, second]


def test_a_factory_that_fails_leaves_nothing_behind() -> None:
    def broken(seq: int, to: Incarnation) -> Ping:
        raise RuntimeError("no")

    calls = Calls()
    with pytest.raises(RuntimeError):
        calls.start("a", broken, TO, 0.0, 2.0, True)
    assert len(calls) == 0
    assert not calls.has_outbox
