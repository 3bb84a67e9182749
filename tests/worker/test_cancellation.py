"""Aborts: each load is still reported exactly once, and its blocks are vouched for only when nobody writes to them."""

from __future__ import annotations

import pytest

from kvlease.core.ids import LoadId
from kvlease.core.loads import FailureCause
from kvlease.core.messages import Commit, Committed
from kvlease.core.orders import Reports
from kvlease.testing import Fate
from kvlease.worker.open_loads import SETTLE_S
from kvlease.worker.pulls import READS_PER_PULL

from .conftest import World

BLOCKS = {3: 20, 4: 21, 9: 5}
LOAD = LoadId("load")
ABORTED = Reports(received={LOAD}, failed={LOAD: FailureCause.ABORTED})


def test_an_abort_before_the_handshake_is_reported_and_nothing_is_read(world: World) -> None:
    world.take(world.order("load", BLOCKS))
    world.take(aborts=("load",))
    assert world.reports() == ABORTED
    world.step(9)
    assert world.agent.reads == []
    assert world.reports() == Reports()


def test_an_abort_in_the_same_step_as_the_order_is_reported_once(world: World) -> None:
    world.take(world.order("load", BLOCKS), aborts=("load",))
    world.step(9)
    assert world.reports() == ABORTED


def test_an_abort_while_reading_posts_no_more_and_waits_for_what_is_posted(world: World) -> None:
    world.agent.script.extend([Fate.HANG] * 9)
    world.take(world.order("load", BLOCKS))
    world.step(3)
    world.take(aborts=("load",))
    world.step(3)
    assert world.reports() == Reports()
    world.agent.finish()
    world.step()
    assert world.reports() == ABORTED
    assert len(world.agent.reads) == READS_PER_PULL
    assert world.producer.heard_of(Commit) == []


def test_an_abort_with_a_read_that_does_not_end_is_reported_unsettled_and_later_settled(world: World) -> None:
    world.agent.script.extend([Fate.HANG] * 9)
    world.take(world.order("load", BLOCKS))
    world.step(3)
    world.take(aborts=("load",))
    world.clock.advance(SETTLE_S)
    world.step()
    assert world.reports() == Reports(received={LOAD}, failed={LOAD: FailureCause.ABORTED}, unsettled={LOAD})
    assert world.puller.stats()["loads_unsettled"] == 1
    world.run_for(60)
    assert world.reports() == Reports()
    world.agent.fail()
    world.step()
    assert world.reports() == Reports(settled={LOAD})
    assert world.puller.is_idle


def test_a_read_whose_state_cannot_be_asked_keeps_its_blocks_out_of_use(world: World) -> None:
    world.agent.script.extend([Fate.LOST, Fate.DONE])
    world.take(world.order("load", BLOCKS))
    world.run_for(0.5)
    assert world.reports() == Reports(received={LOAD}, failed={LOAD: FailureCause.TRANSFER}, unsettled={LOAD})
    world.agent.finish()
    world.step()
    assert world.reports() == Reports(settled={LOAD})


def test_new_loads_are_refused_while_reads_of_before_an_error_are_busy(world: World) -> None:
    world.agent.script.extend([Fate.HANG, Fate.REFUSED])
    world.take(world.order("load", BLOCKS))
    world.step(3)
    world.take(world.order("next", {1: 1}))
    world.step(3)
    assert world.reports().failed == {"next": FailureCause.TRANSFER}
    world.agent.finish()
    world.step()
    world.take(world.order("third", {1: 1}))
    world.step(9)
    assert world.reports().received == {"load", "third"}


def test_an_abort_while_committing_takes_the_commit_back(world: World) -> None:
    world.producer.say[Commit] = lambda request: None
    world.take(world.order("load", BLOCKS))
    world.step(9)
    world.take(aborts=("load",))
    assert world.reports() == ABORTED
    del world.producer.say[Commit]
    world.run_for(3)
    assert world.reports() == Reports()
    assert len(world.producer.heard_of(Commit)) == 1


def test_an_abort_after_the_answer_was_received_but_before_it_was_taken_wins(world: World) -> None:
    world.take(world.order("load", {1: 1}))
    world.step()
    world.link.poll(0)
    world.take(aborts=("load",))
    world.step(3)
    assert world.reports() == ABORTED


@pytest.mark.parametrize("times", [1, 2])
def test_aborts_of_reported_loads_are_ignored(world: World, times) -> None:
    world.take(world.order("load", BLOCKS))
    world.step(9)
    for _ in range(times):
        world.take(aborts=("load",))
        world.step()
    assert world.reports() == Reports(received={LOAD})
    assert world.reports() == Reports()


def test_aborts_of_unknown_loads_are_ignored(world: World) -> None:
    world.take(aborts=("nobody",))
    world.step()
    assert world.reports() == Reports()


def test_a_second_abort_changes_nothing(world: World) -> None:
    world.agent.script.extend([Fate.HANG] * 9)
    world.take(world.order("load", BLOCKS))
    world.step(3)
    world.take(aborts=("load",))
    world.take(aborts=("load",))
    world.agent.finish()
    world.step()
    assert world.reports() == ABORTED


def test_an_abort_of_one_load_disturbs_no_other_of_the_producer(world: World) -> None:
    world.agent.polls = 2
    world.take(world.order("load", {1: 1}), world.order("other", {2: 2}))
    world.step(2)
    world.take(aborts=("load",))
    world.step(9)
    reports = world.reports()
    assert reports.received == {"load", "other"}
    assert reports.failed == {"load": FailureCause.ABORTED}
    assert world.holds({2: 2})


def test_a_failure_after_an_abort_keeps_the_abort_as_its_cause(world: World) -> None:
    world.agent.script.append(Fate.HANG)
    world.take(world.order("load", {1: 1}))
    world.step(3)
    world.take(aborts=("load",))
    world.agent.fail()
    world.step()
    assert world.reports() == ABORTED


def test_a_committed_load_is_done_even_when_the_abort_comes_one_moment_later(world: World) -> None:
    world.producer.say[Commit] = lambda request: Committed(seq=request.seq, incarnation=world.producer.incarnation)
    world.take(world.order("load", {1: 1}))
    world.step(9)
    assert world.reports() == Reports(received={LOAD})
    world.take(aborts=("load",))
    world.step()
    assert world.reports() == Reports()
