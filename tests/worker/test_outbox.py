"""Reports are handed over once, in a form the scheduler can trust."""

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


def test_a_load_that_settled_before_its_report_was_taken_was_never_unsettled() -> None:
    outbox = Outbox()
    outbox.received(A, FailureCause.PEER_DEAD, unsettled=True)
    outbox.settled(A)
    assert outbox.take() == Reports(received={A}, failed={A: FailureCause.PEER_DEAD})


def test_numbers_are_those_last_published() -> None:
    outbox = Outbox()
    assert outbox.stats() == {}
    outbox.publish({"pulls": 1.0})
    taken = outbox.stats()
    outbox.publish({"pulls": 2.0})
    assert (taken, outbox.stats()) == ({"pulls": 1.0}, {"pulls": 2.0})
