"""Reports are handed over once, in a form the scheduler can trust."""

import threading

from kvlease.core.ids import LeaseId, LoadId
from kvlease.core.loads import FailureCause
from kvlease.core.orders import Reports
from kvlease.worker.outbox import Outbox

A, B = LoadId("a"), LoadId("b")


def test_everything_is_taken_once() -> None:
    outbox = Outbox()
    outbox.sent(LeaseId("lease"))
    outbox.received(A)
    outbox.received(B, FailureCause.TRANSFER)
    assert outbox.take() == Reports(sent={LeaseId("lease")}, received={A, B}, failed={B: FailureCause.TRANSFER})
    assert outbox.take() == Reports()


def test_a_load_may_settle_long_after_its_report() -> None:
    outbox = Outbox()
    outbox.received(A, FailureCause.PEER_DEAD, unsettled=True)
    assert outbox.take() == Reports(received={A}, failed={A: FailureCause.PEER_DEAD}, unsettled={A})
    outbox.settled(A)
    assert outbox.take() == Reports(settled={A})


def test_a_load_that_settled_before_its_report_was_taken_settles_with_the_next() -> None:
    outbox = Outbox()
    outbox.received(A, FailureCause.PEER_DEAD, unsettled=True)
    outbox.settled(A)
    assert outbox.take() == Reports(received={A}, failed={A: FailureCause.PEER_DEAD}, unsettled={A})
    assert outbox.take() == Reports(settled={A})


def test_the_end_of_an_older_load_of_that_name_does_not_settle_the_new_one() -> None:
    outbox = Outbox()
    outbox.received(A, FailureCause.PEER_DEAD, unsettled=True)
    assert outbox.take().unsettled == {A}
    outbox.received(A, FailureCause.PEER_DEAD, unsettled=True)
    outbox.settled(A)  # the first one
    assert outbox.take() == Reports(received={A}, failed={A: FailureCause.PEER_DEAD}, unsettled={A})
    outbox.settled(A)
    assert [outbox.take(), outbox.take(), outbox.take()] == [Reports(settled={A}), Reports(settled={A}), Reports()]


def test_two_loads_of_one_name_that_settle_at_once_are_told_of_one_after_the_other() -> None:
    outbox = Outbox()
    for _ in range(2):
        outbox.received(A, FailureCause.PEER_DEAD, unsettled=True)
        outbox.take()
    outbox.settled(A)
    outbox.settled(A)
    outbox.settled(B)
    assert [outbox.take(), outbox.take()] == [Reports(settled={A, B}), Reports(settled={A})]


def test_waiting_ends_with_a_report_and_only_with_one_that_was_not_taken() -> None:
    outbox = Outbox()
    outbox.received(A)
    assert outbox.wait(10.0)
    outbox.take()
    outbox.sent(LeaseId("lease"))
    outbox.settled(A)
    assert not outbox.wait(0.001)
    threading.Timer(0.01, outbox.received, [B]).start()
    assert outbox.wait(10.0)


def test_numbers_are_those_last_published() -> None:
    outbox = Outbox()
    assert outbox.stats() == {}
    outbox.publish({"pulls": 1.0})
    taken = outbox.stats()
    outbox.publish({"pulls": 2.0})
    assert (taken, outbox.stats()) == ({"pulls": 1.0}, {"pulls": 2.0})
