"""What is compared before a load is used: right bytes go on to the commit, and whatever else happens fails the load."""

from __future__ import annotations

import logging

import pytest

from kvlease.config import Settings
from kvlease.core.checksums import SAMPLE_BLOCKS
from kvlease.core.loads import FailureCause
from kvlease.core.messages import Checksum, Checksums, Commit, Gone, GoneReason, Hello, Ping, Pong
from kvlease.testing import Fate

from .conftest import BLOCKS, PAGE, REGIONS, World
from .test_puller import done, failed

PAIRS = {3: 20, 4: 21, 9: 5}
MANY = {i: BLOCKS - i for i in range(1, BLOCKS)}


def checking(extent: str = "full", **knobs: object) -> World:
    return World(Settings(chunk_bytes=2 * PAGE, kv_checksum=extent, **knobs))


def flip(world: World, block: int, region: int = 1) -> None:
    """What somebody did to one of our bytes."""
    world.memory.pages[region, block, 7] ^= 1


class TestRightBytes:
    @pytest.mark.parametrize("extent", ["sampled", "full"])
    def test_are_compared_and_committed(self, extent: str) -> None:
        world = checking(extent)
        world.take(world.order("load", PAIRS))
        world.step(20)
        assert world.reports() == done("load")
        assert world.holds(PAIRS)
        (question,) = world.producer.heard_of(Checksum)
        assert (question.lease, question.reader, question.rank) == ("lease-of-load", "channel/load", 0)
        assert question.positions == [[(0, 3)]]
        stats = world.puller.stats()
        assert (stats["checksums|equal"], stats["bytes_checked"]) == (1, 3 * REGIONS * PAGE)

    def test_are_asked_for_while_they_are_read_and_committed_after_all(self) -> None:
        world = checking()
        world.agent.script.append(Fate.HANG)
        world.take(world.order("load", {1: 2}))
        world.step(10)
        assert len(world.producer.heard_of(Checksum)) == 1
        assert world.hasher.jobs == []
        assert world.producer.heard_of(Commit) == []
        world.agent.finish()
        world.step(10)
        assert world.reports() == done("load")

    def test_a_sample_is_a_few_blocks(self) -> None:
        world = checking("sampled")
        world.take(world.order("load", MANY))
        world.step(80)
        assert world.reports() == done("load")
        (question,) = world.producer.heard_of(Checksum)
        assert sum(count for _, count in question.positions[0]) == SAMPLE_BLOCKS < len(MANY)

    def test_a_part_of_a_lease_is_compared_with_that_part(self) -> None:
        world = checking()
        world.take(world.order("load", PAIRS, start_token=5))
        world.step(20)
        assert world.reports() == done("load")
        assert world.producer.heard_of(Checksum)[0].positions == [[(1, 2)]]

    def test_that_are_none_are_only_committed(self) -> None:
        world = checking()
        world.take(world.order("load", {}))
        world.step(3)
        assert world.reports() == done("load")
        assert world.producer.heard_of(Checksum) == []

    def test_an_answer_after_our_own_bytes_is_waited_for(self) -> None:
        world = checking()
        world.producer.say[Checksum] = lambda request: None
        world.take(world.order("load", PAIRS))
        world.step(10)
        assert world.puller.stats()["loads_open"] == 1
        del world.producer.say[Checksum]
        world.run_for(0.5)
        assert world.reports() == done("load")


class TestABlockThatMayStillBeWrittenTo:
    def test_is_left_out(self) -> None:
        world = checking()
        world.producer.is_settled = False
        order = world.order("load", PAIRS)
        world.agent.script.append(Fate.HANG)
        world.take(order)
        world.step(10)
        world.producer.memory.pages[:, 5] ^= 1  # the engine, behind the last token
        world.agent.finish()
        world.step(10)
        assert world.reports() == done("load")
        assert world.puller.stats()["bytes_checked"] == 2 * REGIONS * PAGE

    def test_alone_leaves_nothing_to_compare(self) -> None:
        world = checking()
        world.producer.is_settled = False
        world.take(world.order("load", {1: 2}))
        world.step(10)
        assert world.reports() == done("load")
        assert world.puller.stats()["checksums|left_out"] == 1
        assert world.hasher.jobs == []


class TestWrongBytes:
    def test_fail_the_load_and_are_told_with_both_checksums(self, caplog: pytest.LogCaptureFixture) -> None:
        world = checking()
        world.hasher.is_slow = True
        world.take(world.order("load", PAIRS))
        world.step(10)
        flip(world, block=4)
        with caplog.at_level(logging.WARNING):
            world.hasher.finish()
            world.step(5)
        assert world.reports() == failed(FailureCause.CHECKSUM)
        assert world.producer.heard_of(Commit) == []
        assert world.puller.stats()["checksums|differ"] == 1
        assert world.puller.stats()["loads_failed|checksum"] == 1
        blocks = world.hasher.jobs[0].blocks
        ours, theirs = world.memory.sums(blocks)[1], world.producer.memory.sums([blocks[0] * 0 + [20, 21, 5]])[1]
        (line,) = caplog.messages
        assert "rank 0: the checksums of 1 of 3 regions differ over 3 blocks" in line
        assert f"region 1: {ours:08x} here, {theirs:08x} at the producer" in line

    @pytest.mark.parametrize("extent", ["sampled", "full"])
    def test_everywhere_are_seen_by_any_sample(self, extent: str) -> None:
        world = checking(extent)
        world.hasher.is_slow = True
        world.take(world.order("load", MANY))
        world.step(80)
        world.memory.pages[2] ^= 128
        world.hasher.finish()
        world.step(5)
        assert world.reports() == failed(FailureCause.CHECKSUM)

    def test_of_one_load_are_no_other_loads_failure(self) -> None:
        world = checking()
        world.hasher.is_slow = True
        world.take(world.order("bad", {1: 1}))
        world.step(10)
        flip(world, block=1)
        world.hasher.finish()
        world.hasher.is_slow = False
        world.take(world.order("good", {2: 2}))
        world.step(20)
        reports = world.reports()
        assert (reports.received, reports.failed) == ({"bad", "good"}, {"bad": FailureCause.CHECKSUM})

    def test_a_producer_with_fewer_regions_differs(self) -> None:
        world = checking()
        world.producer.say[Checksum] = lambda request: Checksums(
            seq=request.seq, incarnation=world.producer.incarnation, sums=[]
        )
        world.take(world.order("load", {1: 1}))
        world.step(10)
        assert world.reports() == failed(FailureCause.CHECKSUM)


class TestNoAnswer:
    def test_in_time_fails_like_a_commit_without_one(self, caplog: pytest.LogCaptureFixture) -> None:
        world = checking()
        world.producer.say[Checksum] = lambda request: None
        world.take(world.order("load", PAIRS))
        with caplog.at_level(logging.WARNING):
            world.run_for(world.settings.commit_timeout_s + 0.2)
        assert world.reports() == failed(FailureCause.COMMIT_TIMEOUT)
        assert "no answer to the question for checksums: timeout" in caplog.text
        assert world.producer.heard_of(Commit) == []

    def test_is_counted_from_the_last_byte(self) -> None:
        world = checking()
        world.agent.script.append(Fate.HANG)
        world.producer.say[Checksum] = lambda request: None
        world.take(world.order("load", {1: 2}))
        world.run_for(5 * world.settings.commit_timeout_s)
        world.agent.finish()
        world.run_for(world.settings.commit_timeout_s - 0.2)
        assert world.puller.stats()["loads_open"] == 1
        world.run_for(0.4)
        assert world.reports() == failed(FailureCause.COMMIT_TIMEOUT)

    def test_more_bytes_have_more_time(self) -> None:
        gib_s = 1024.0**3
        world = checking(load_timeout_s_per_gib=gib_s / (3 * REGIONS * PAGE))  # a second for the three blocks
        world.producer.say[Checksum] = lambda request: None
        world.take(world.order("load", PAIRS))
        world.run_for(world.settings.commit_timeout_s + 0.5)
        assert world.puller.stats()["loads_open"] == 1
        world.run_for(1.0)
        assert world.reports() == failed(FailureCause.COMMIT_TIMEOUT)

    def test_but_that_the_lease_is_gone(self) -> None:
        world = checking()
        world.producer.say[Checksum] = lambda request: Gone(
            seq=request.seq, incarnation=world.producer.incarnation, why=GoneReason.EXPIRED, age_s=2.0
        )
        world.take(world.order("load", PAIRS))
        world.step(10)
        assert world.reports() == failed(FailureCause.GONE_EXPIRED)

    def test_but_an_odd_one(self) -> None:
        world = checking()
        world.producer.say[Checksum] = lambda request: Pong(seq=request.seq, incarnation=world.producer.incarnation)
        world.take(world.order("load", PAIRS))
        world.step(10)
        assert world.reports() == failed(FailureCause.PEER_CONFUSED)

    def test_of_our_own_hasher_is_our_failure(self) -> None:
        world = checking()
        world.hasher.error = "broken"
        world.take(world.order("load", PAIRS))
        world.step(10)
        assert world.reports() == failed(FailureCause.INTERNAL)


class TestALoadThatEnds:
    def test_before_the_answer_asks_no_more(self) -> None:
        world = checking()
        world.producer.say[Checksum] = lambda request: None
        world.take(world.order("load", PAIRS))
        world.step(10)
        world.take(aborts=("load",))
        asked = len(world.producer.heard_of(Checksum))
        world.run_for(1.0)
        assert world.reports() == failed(FailureCause.ABORTED)
        assert len(world.producer.heard_of(Checksum)) == asked

    def test_while_its_bytes_are_being_looked_at_is_not_committed(self) -> None:
        world = checking()
        world.hasher.is_slow = True
        world.take(world.order("load", PAIRS))
        world.step(10)
        world.take(aborts=("load",))
        world.step()
        assert not world.hasher.jobs[0].is_wanted
        world.hasher.finish()
        world.step(5)
        assert world.reports() == failed(FailureCause.ABORTED)
        assert world.producer.heard_of(Commit) == []


class TestAProducerThatComputesNone:
    def test_is_told_apart_at_the_handshake_in_words(self, caplog: pytest.LogCaptureFixture) -> None:
        world = checking()
        world.producer.checksum = ""  # another setting, or a version that knows of none
        world.take(world.order("load", PAIRS))
        with caplog.at_level(logging.WARNING):
            world.step(5)
        assert world.reports() == failed(FailureCause.INCOMPATIBLE)
        assert "computes no crc32 checksums of its pages" in caplog.text
        assert "set kv_checksum to 'sampled' or 'full' on the producer, too, or to 'off' here" in caplog.text
        assert world.agent.reads == []

    def test_or_computes_others_is_refused_as_well(self) -> None:
        world = checking()
        world.producer.checksum = "md5"
        world.take(world.order("load", PAIRS))
        world.step(5)
        assert world.reports() == failed(FailureCause.INCOMPATIBLE)


def test_off_nothing_is_asked_whatever_the_producer_can(world: World) -> None:
    world.producer.checksum = "crc32"
    world.take(world.order("load", PAIRS))
    world.step(20)
    assert world.reports() == done("load")
    assert {type(request) for request in world.producer.heard} == {Hello, Ping, Commit}
