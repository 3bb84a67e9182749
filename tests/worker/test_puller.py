"""A load from order to its one report, with every way it can end."""

from __future__ import annotations

import logging

import pytest

from kvlease.config import Settings
from kvlease.core.ids import Incarnation, LoadId, PeerKey
from kvlease.core.loads import FailureCause
from kvlease.core.messages import (
    Commit,
    Committed,
    Difference,
    Gone,
    GoneReason,
    Hello,
    Invalid,
    Ping,
    Pong,
    RankInfo,
    Refused,
    Welcome,
)
from kvlease.core.orders import Orders, Reports
from kvlease.core.peers import Peer, PeerState, TooManyPeers
from kvlease.testing import FakeClock, Fate
from kvlease.worker.known_sources import EARLY_MAX
from kvlease.worker.open_loads import SETTLE_S
from kvlease.worker.puller import CHUNKS_AHEAD, POST_BUDGET_S, READS_MAX
from kvlease.worker.pulls import READS_PER_PULL
from kvlease.worker.sources import IDLE_OTHER_S, IDLE_READY_S

from .conftest import World

BLOCKS = {3: 20, 4: 21, 9: 5}


def failed(cause: FailureCause, load: str = "load") -> Reports:
    return Reports(received={LoadId(load)}, failed={LoadId(load): cause})


def done(*loads: str) -> Reports:
    return Reports(received={LoadId(load) for load in loads})


class SlowClock(FakeClock):
    """Every look at it takes a while."""

    def __init__(self, look_s: float) -> None:
        super().__init__()
        self.look_s = look_s

    def __call__(self) -> float:
        return self.advance(self.look_s)


def read_of(world: World, at: int) -> str:
    """Which load the ``at``-th read is of: short ones have blocks from 30 on."""
    to, _, _ = world.agent.reads[at].pieces[0]
    block = (to - world.memory.pages.ctypes.data) // world.memory.pages[0, 0].nbytes % len(world.memory.pages[0])
    return "short" if block >= 30 else "long"


class TestAGoodLoad:
    def test_is_greeted_read_committed_and_reported_once(self, world: World) -> None:
        world.take(world.order("load", BLOCKS))
        world.step(20)
        assert world.reports() == done("load")
        assert world.holds(BLOCKS)
        assert world.reports() == Reports()
        assert world.puller.is_idle

    def test_commits_after_its_last_byte_and_says_who_it_is(self, world: World) -> None:
        world.agent.polls = 3
        world.producer.say[Commit] = lambda request: (
            Committed(seq=request.seq, incarnation=world.producer.incarnation) if world.holds(BLOCKS) else None
        )
        world.take(world.order("load", BLOCKS))
        world.step(30)
        assert world.reports() == done("load")
        (commit,) = world.producer.heard_of(Commit)
        assert (commit.lease, commit.reader, commit.rank, commit.of_ranks) == ("lease-of-load", "channel/load", 0, 1)

    def test_greets_a_producer_once_for_all_loads(self, world: World) -> None:
        world.take(world.order("a", {1: 1}), world.order("b", {2: 2}))
        world.step(20)
        world.take(world.order("c", {3: 3}))
        world.step(20)
        assert world.reports() == done("a", "b", "c")
        (hello,) = world.producer.heard_of(Hello)
        assert (hello.fingerprint, hello.factors, hello.ranks) == ("print", {"kv": "bf16"}, [0])

    def test_without_tokens_is_only_committed(self, world: World) -> None:
        world.take(world.order("load", {}))
        world.step(3)
        assert world.reports() == done("load")
        assert world.agent.reads == []

    def test_is_counted(self, world: World) -> None:
        world.take(world.order("load", BLOCKS))
        world.step(20)
        stats = world.puller.stats()
        assert stats["loads_done"] == 1
        assert stats["bytes_pulled"] == 3 * 3 * 64
        assert stats["descriptors_pulled"] == 9
        assert stats["pulls"] == 6
        assert stats["peers|ready"] == 1

    def test_gives_every_read_back(self, world: World) -> None:
        world.take(world.order("load", BLOCKS))
        world.step(20)
        assert all(read.released for read in world.agent.reads)


class TestManyLoads:
    def test_take_turns_chunk_by_chunk(self, world: World) -> None:
        world.agent.script.extend([Fate.HANG] * 99)
        world.take(world.order("long", {i: i for i in range(30)}), world.order("short", {30: 30, 31: 31}))
        world.step()
        assert [read_of(world, at) for at in range(4)] == ["long", "short", "long", "short"]

    def test_a_short_load_gets_its_turn_while_long_ones_have_all_the_room(self, world: World) -> None:
        world.agent.script.extend([Fate.HANG] * 999)
        longs = [world.order(f"long-{number}", {i: i for i in range(30)}) for number in range(2 * CHUNKS_AHEAD)]
        world.take(*longs)
        world.step()
        assert len(world.agent.reads) == CHUNKS_AHEAD
        world.take(world.order("short", {30: 30, 31: 31}))
        for at in range(len(longs) + 1):
            assert read_of(world, at) == "long"
            world.agent.reads[at].fate = Fate.DONE
            world.step()
        assert "short" in [read_of(world, at) for at in range(len(world.agent.reads))]

    def test_only_so_many_chunks_of_a_load_are_posted_at_once(self, world: World) -> None:
        world.agent.script.extend([Fate.HANG] * 99)
        world.take(world.order("long", {i: i for i in range(30)}))
        world.step(9)
        assert len(world.agent.reads) == READS_PER_PULL

    def test_only_so_many_chunks_of_a_producer_are_posted_at_once(self) -> None:
        world = World(Settings(chunk_bytes=1 << 20))
        world.agent.script.extend([Fate.HANG] * 99)
        world.take(*(world.order(f"load-{number}", {1: 1}) for number in range(READS_MAX + 9)))
        world.step(9)
        assert len(world.agent.reads) == READS_MAX

    def test_posting_stops_for_peers_and_orders_when_it_has_taken_long(self) -> None:
        world = World(clock=SlowClock(POST_BUDGET_S / 4))
        world.take(world.order("long", {i: i for i in range(30)}))
        world.step()
        posted = len(world.agent.reads)
        assert 0 < posted < 45
        assert world.puller.has_work
        world.step()
        assert posted < len(world.agent.reads) < 45
        world.step(45)
        assert len(world.agent.reads) == 45
        assert not world.puller.has_work
        assert world.reports() == done("long")

    def test_a_producer_that_hangs_delays_no_other(self, world: World) -> None:
        frozen = world.new_producer("frozen")
        frozen.is_silent = True
        world.take(world.order("stuck", {1: 1}, frozen), world.order("load", {2: 2}))
        world.step(9)
        assert world.reports() == done("load")

    def test_the_same_load_twice_is_one_load(self, world: World) -> None:
        world.take(world.order("load", {1: 1}), world.order("load", {1: 1}))
        world.step(9)
        assert world.reports() == done("load")
        assert world.reports() == Reports()

    def test_of_a_frozen_producer_take_no_room_from_those_of_another(self, world):
        world.agent.script.extend([Fate.HANG] * CHUNKS_AHEAD)
        frozen = [f"frozen-{number}" for number in range(2 * CHUNKS_AHEAD)]
        world.take(*(world.order(name, {number: number, number + 15: 1}) for number, name in enumerate(frozen)))
        world.step(20)
        assert len(world.agent.reads) == CHUNKS_AHEAD
        assert not world.puller.has_work, "nothing can be posted, so there is no reason to look again at once"
        world.take(world.order("load", {31: 3}, world.new_producer("q")))
        world.step(20)
        assert world.reports() == done("load")


class TestBeginning:
    def test_a_doomed_load_fails_at_once_without_a_word_to_anybody(self, world: World) -> None:
        world.take(world.order("load", {}, peer=None, doomed=FailureCause.NO_PROOF))
        assert world.reports() == failed(FailureCause.NO_PROOF)
        world.step(3)
        assert world.producer.heard == []

    def test_an_unanswered_greeting_fails_its_loads_in_time(self, world: World) -> None:
        world.producer.say[Hello] = lambda request: None
        world.producer.say[Ping] = lambda request: Pong(seq=request.seq, incarnation=world.producer.incarnation)
        world.take(world.order("load", {1: 1}))
        world.run_for(2.1)
        assert world.reports() == failed(FailureCause.HANDSHAKE_TIMEOUT)

    def test_a_refusal_fails_its_loads_and_is_told_once_with_both_values(
        self, world: World, caplog: pytest.LogCaptureFixture
    ) -> None:
        differences = [Difference(name="kv_cache_dtype", ours="fp8", theirs="bf16")]
        world.producer.say[Hello] = lambda request: Refused(
            seq=request.seq, incarnation=world.producer.incarnation, why="other KV", differences=differences
        )
        with caplog.at_level(logging.ERROR):
            world.take(world.order("a", {1: 1}), world.order("b", {1: 1}))
            world.step(2)
            world.take(world.order("c", {1: 1}))
            world.step(2)
        assert world.reports().failed == dict.fromkeys(["a", "b", "c"], FailureCause.INCOMPATIBLE)
        assert len(world.producer.heard_of(Hello)) == 1
        (line,) = caplog.messages
        assert "kv_cache_dtype is 'fp8', ours is 'bf16'" in line

    def test_another_protocol_version_is_incompatible(self, world: World) -> None:
        world.producer.say[Hello] = lambda request: Welcome(
            seq=request.seq, incarnation=world.producer.incarnation, version=99, ranks=[world.producer.rank_info()]
        )
        world.take(world.order("load", {1: 1}))
        world.step(2)
        assert world.reports() == failed(FailureCause.INCOMPATIBLE)

    @pytest.mark.parametrize(
        ("info", "cause"),
        [
            (lambda info: RankInfo(1, info.agent_metadata, info.regions), FailureCause.PEER_CONFUSED),
            (lambda info: RankInfo(0, info.agent_metadata, []), FailureCause.PEER_CONFUSED),
            (lambda info: RankInfo(0, info.agent_metadata, info.regions, "TAPE"), FailureCause.PEER_CONFUSED),
            (lambda info: RankInfo(0, info.agent_metadata, [(-1, 64, 64, 32, 0, 0)] * 3), FailureCause.PEER_CONFUSED),
            (lambda info: RankInfo(0, info.agent_metadata, info.regions[:2]), FailureCause.INCOMPATIBLE),
            (lambda info: RankInfo(0, info.agent_metadata, [(4096, 64, 64, 32, 0, 0)] * 3), FailureCause.TRANSFER),
            (lambda info: RankInfo(0, b"?", info.regions), FailureCause.TRANSFER),
        ],
    )
    def test_pages_that_cannot_be_used_fail_the_load(self, world: World, info, cause) -> None:
        ranks = [info(world.producer.rank_info())]
        world.producer.say[Hello] = lambda request: Welcome(
            seq=request.seq, incarnation=world.producer.incarnation, version=1, ranks=ranks
        )
        world.take(world.order("load", {1: 1}))
        world.step(3)
        assert world.reports() == failed(cause)

    def test_an_odd_answer_to_the_greeting_fails_the_load(self, world: World) -> None:
        world.producer.say[Hello] = lambda request: Invalid(
            seq=request.seq, incarnation=world.producer.incarnation, reason="malformed", text="what?"
        )
        world.take(world.order("load", {1: 1}))
        world.step(2)
        assert world.reports() == failed(FailureCause.PEER_CONFUSED)

    def test_blocks_that_the_producer_does_not_have_are_never_read(self, world: World) -> None:
        world.take(world.order("load", {1: 32}))
        world.step(3)
        assert world.reports() == failed(FailureCause.PEER_CONFUSED)
        assert world.agent.reads == []

    def test_another_incarnation_at_the_address_fails_the_load(self, world: World) -> None:
        world.producer.incarnation = Incarnation(b"another life....")
        world.take(world.order("load", {1: 1}))
        world.step(2)
        assert world.reports() == failed(FailureCause.PEER_RESTARTED)

    def test_a_crash_of_ours_fails_that_load_only(self, world: World) -> None:
        world.take(world.order("broken", {1: 1}, local_blocks=None), world.order("load", {2: 2}))
        world.step(9)
        reports = world.reports()
        assert reports.received == {"broken", "load"}
        assert reports.failed == {"broken": FailureCause.INTERNAL}
        assert world.puller.stats()["internal_errors"] == 1

    def test_a_producer_that_there_is_no_room_for_fails_that_load_only(
        self, world: World, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def no_room(key: PeerKey) -> Peer:
            raise TooManyPeers("all 1 peers are in use")

        world.take(world.order("load", BLOCKS))
        stranger = world.new_producer("q")
        monkeypatch.setattr(world.link, "peer", no_room)
        world.take(world.order("refused", {1: 1}, stranger))
        world.step(20)
        reports = world.reports()
        assert reports.received == {"load", "refused"}
        assert reports.failed == {"refused": FailureCause.TOO_MANY_PEERS}
        assert "internal_errors" not in world.puller.stats()


class TestGreetingEarly:
    def greet(self, world: World, *keys: PeerKey) -> None:
        world.puller.take(Orders(greet=list(keys or [world.producer.key])), world.clock())

    def test_hands_are_shaken_before_the_first_load(self, world: World) -> None:
        self.greet(world)
        world.step(3)
        assert world.puller.stats()["peers|ready"] == 1
        world.producer.heard.clear()
        world.take(world.order("load", BLOCKS))
        world.step(20)
        assert world.reports() == done("load")
        assert world.holds(BLOCKS)
        assert world.producer.heard_of(Hello) == []

    def test_a_load_joins_a_greeting_that_is_under_way(self, world: World) -> None:
        self.greet(world)
        world.take(world.order("load", BLOCKS))
        self.greet(world)
        world.step(20)
        assert world.reports() == done("load")
        assert len(world.producer.heard_of(Hello)) == 1

    def test_a_producer_that_is_ready_is_not_greeted_again(self, world: World) -> None:
        for _ in range(3):
            self.greet(world)
            world.step(3)
        assert len(world.producer.heard_of(Hello)) == 1

    def test_silence_is_no_failure_of_anything_and_is_forgotten(self, world: World) -> None:
        world.producer.is_silent = True
        self.greet(world)
        world.run_for(3)
        assert world.reports() == Reports()
        assert world.puller.is_idle
        world.clock.advance(IDLE_OTHER_S)
        world.step()
        assert world.link.forgotten == [world.producer.key]

    def test_a_refusal_is_the_answer_to_the_first_load_and_to_nobody_before(self, world: World) -> None:
        world.producer.say[Hello] = lambda request: Refused(
            seq=request.seq, incarnation=world.producer.incarnation, why="no"
        )
        self.greet(world)
        world.step(3)
        self.greet(world)
        assert world.reports() == Reports()
        assert "internal_errors" not in world.puller.stats()
        world.take(world.order("load", BLOCKS))
        assert world.reports() == failed(FailureCause.INCOMPATIBLE)

    def test_handoffs_that_name_many_strangers_do_not_take_all_the_room(self, world: World) -> None:
        strangers = [world.producer.key._replace(port=port) for port in range(2, 3 * EARLY_MAX)]
        self.greet(world, *strangers)
        assert world.puller.stats()["peers|greeting"] == EARLY_MAX
        world.take(world.order("load", BLOCKS))
        world.step(20)
        assert world.reports() == done("load")

    def test_a_crash_disturbs_no_load_of_the_same_step(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        world.take(world.order("load", BLOCKS))
        monkeypatch.setattr(world.link, "peer", lambda key: 1 / 0)
        self.greet(world, world.new_producer("q").key)
        assert world.puller.stats()["internal_errors"] == 1
        world.step(20)
        assert world.reports() == done("load")


class TestReading:
    def test_a_read_that_nixl_refuses_fails_the_load_and_the_next_load_works(self, world: World) -> None:
        world.agent.script.append(Fate.REFUSED)
        world.take(world.order("load", BLOCKS))
        world.step(9)
        assert world.reports() == failed(FailureCause.TRANSFER)
        world.take(world.order("next", BLOCKS))
        world.step(9)
        assert world.reports() == done("next")
        assert world.holds(BLOCKS)

    def test_a_read_that_fails_fails_the_load_with_nothing_unsettled(self, world: World) -> None:
        world.agent.script.extend([Fate.DONE, Fate.ERROR])
        world.take(world.order("load", BLOCKS))
        world.step(9)
        assert world.reports() == failed(FailureCause.TRANSFER)
        assert world.producer.heard_of(Commit) == []

    def test_after_a_broken_link_the_producer_is_made_reachable_anew_for_the_next_load(self, world: World) -> None:
        add_peer, added = world.agent.add_peer, []
        world.agent.add_peer = lambda metadata: added.append(metadata) or add_peer(metadata)
        world.take(world.order("good", BLOCKS))
        world.step(9)
        assert len(added) == 1
        world.agent.script.append(Fate.ERROR)
        world.take(world.order("broken", BLOCKS))
        world.step(9)
        world.take(world.order("next", BLOCKS))
        world.step(9)
        assert world.reports() == Reports(
            received={LoadId("good"), LoadId("broken"), LoadId("next")},
            failed={LoadId("broken"): FailureCause.TRANSFER},
        )
        assert len(added) == 2

    def test_a_load_that_takes_too_long_fails(self, world: World) -> None:
        world.agent.script.append(Fate.HANG)
        world.take(world.order("load", {1: 1}))
        world.run_for(119)
        assert world.reports() == Reports()
        world.agent.finish()
        world.agent.script.append(Fate.HANG)
        world.run_for(1.2)
        assert world.reports().received == {"load"}

    def test_a_producer_that_falls_silent_fails_its_loads_within_the_timeout(self, world: World) -> None:
        other = world.new_producer("other")
        world.agent.script.extend([Fate.HANG, Fate.HANG])
        world.take(world.order("a", {1: 1}), world.order("b", {2: 2}, other))
        world.step(3)
        world.producer.is_silent = True
        world.run_for(2.3)
        reports = world.reports()
        assert reports.failed == {"a": FailureCause.PEER_DEAD}
        assert reports.unsettled == {"a"}
        world.agent.finish()
        world.step(3)
        assert world.reports() == Reports(received={LoadId("b")}, settled={LoadId("a")})

    def test_a_dead_producer_fails_new_loads_at_once_and_is_tried_again_later(self, world: World) -> None:
        world.producer.is_silent = True
        world.take(world.order("a", {1: 1}))
        world.run_for(2.2)
        world.take(world.order("b", {1: 1}))
        world.step(2)
        assert world.reports().failed == {
            "a": FailureCause.HANDSHAKE_TIMEOUT,
            "b": FailureCause.PEER_DEAD,
        }
        world.producer.is_silent = False
        world.run_for(1.0)
        world.take(world.order("c", {1: 1}))
        world.step(9)
        assert world.reports() == done("c")


class TestCommitting:
    @pytest.mark.parametrize("why", list(GoneReason))
    def test_gone_fails_the_load_with_its_reason(self, world: World, why) -> None:
        world.producer.say[Commit] = lambda request: Gone(
            seq=request.seq, incarnation=world.producer.incarnation, why=why, age_s=1.5
        )
        world.take(world.order("load", {1: 1}))
        world.step(9)
        assert world.reports() == failed(FailureCause(f"gone_{why.value}"))

    def test_no_answer_fails_the_load_in_time(self, world: World) -> None:
        world.producer.say[Commit] = lambda request: None
        world.take(world.order("load", {1: 1}))
        world.step(9)
        world.run_for(2.1)
        assert world.reports() == failed(FailureCause.COMMIT_TIMEOUT)
        assert len({commit.seq for commit in world.producer.heard_of(Commit)}) == 1
        assert len(world.producer.heard_of(Commit)) > 2

    def test_an_odd_answer_fails_the_load(self, world: World) -> None:
        world.producer.say[Commit] = lambda request: Pong(seq=request.seq, incarnation=world.producer.incarnation)
        world.take(world.order("load", {1: 1}))
        world.step(9)
        assert world.reports() == failed(FailureCause.PEER_CONFUSED)

    def test_a_producer_that_restarted_before_the_commit_fails_the_load(self, world: World) -> None:
        def restart(request):
            world.producer.incarnation = Incarnation(b"another life....")
            return Committed(seq=request.seq, incarnation=world.producer.incarnation)

        world.producer.say[Commit] = restart
        world.take(world.order("load", {1: 1}))
        world.step(9)
        assert world.reports() == failed(FailureCause.PEER_RESTARTED)


class TestKeepingHouse:
    def test_a_source_nobody_needs_is_closed_and_can_come_back(self, world: World) -> None:
        world.take(world.order("load", {1: 1}))
        world.step(9)
        world.clock.advance(IDLE_READY_S + 1)
        world.step()
        assert world.link.forgotten == [world.producer.key]
        assert world.puller.stats()["peers|ready"] == 0
        world.take(world.order("next", {1: 1}))
        world.step(9)
        assert world.reports() == done("load", "next")

    def test_a_new_life_at_an_address_makes_the_one_before_it_forgotten(self, world: World) -> None:
        lives = [world.new_producer(f"life-{number}", port=7) for number in range(3)]
        for producer in lives:
            world.take(world.order(f"load-{producer.key.engine_id}", {1: 1}, producer))
            world.step(9)
        assert world.link.forgotten == [producer.key for producer in lives[:2]]
        assert world.puller.stats()["peers|ready"] == 1
        assert world.reports() == done("load-life-0", "load-life-1", "load-life-2")

    def test_a_former_life_is_kept_while_a_read_from_it_is_posted(self, world: World) -> None:
        former, new = (world.new_producer(name, port=7) for name in ("former", "new"))
        world.agent.script.append(Fate.HANG)
        world.take(world.order("stuck", {1: 1}, former))
        world.step(9)
        world.take(world.order("load", {2: 2}, new))
        world.step(9)
        assert world.link.forgotten == []
        assert world.reports() == done("load")

    def test_another_producer_at_another_address_is_kept(self, world: World) -> None:
        other = world.new_producer("other")
        world.take(world.order("load", {1: 1}), world.order("more", {2: 2}, other))
        world.step(9)
        assert world.link.forgotten == []

    def test_a_producer_known_by_two_addresses_is_still_read_when_one_is_forgotten(self, world: World) -> None:
        elsewhere = world.also_at(world.producer, port=77)
        world.take(world.order("first", {1: 1}, peer=elsewhere))
        world.step(9)
        world.clock.advance(IDLE_READY_S / 2)
        world.take(world.order("second", {2: 2}))
        world.step(9)
        world.clock.advance(IDLE_READY_S / 2 + 1)
        world.step()
        assert world.link.forgotten == [elsewhere]
        world.take(world.order("third", {3: 3}))
        world.step(9)
        assert world.reports() == done("first", "second", "third")

    def test_after_an_error_a_producer_known_by_two_addresses_is_read_by_both(self, world: World) -> None:
        elsewhere = world.also_at(world.producer, port=77)
        world.take(world.order("a", {1: 1}, peer=elsewhere), world.order("b", {2: 2}))
        world.step(9)
        world.agent.script.append(Fate.ERROR)
        world.take(world.order("bad", {3: 3}))
        world.step(9)
        for load, more in (("c", {}), ("d", {"peer": elsewhere}), ("e", {})):
            world.take(world.order(load, {4: 4}, **more))
            world.step(9)
        reports = world.reports()
        assert reports.failed == {LoadId("bad"): FailureCause.TRANSFER}
        assert reports.received == {"a", "b", "bad", "c", "d", "e"}

    def test_a_source_that_never_answered_is_forgotten_sooner_but_after_its_back_off(self, world: World) -> None:
        world.producer.is_silent = True
        world.take(world.order("load", {1: 1}))
        world.run_for(3)
        assert world.link.forgotten == []
        world.clock.advance(IDLE_OTHER_S)
        world.step()
        assert world.link.forgotten == [world.producer.key]

    def test_a_peer_that_the_channel_let_go_is_opened_again_only_for_the_next_load(self, world: World) -> None:
        world.take(world.order("load", {1: 1}))
        world.step(9)
        world.link.let_go(world.producer.key)
        world.step()
        assert world.link.peers == {}
        assert world.puller.stats()["peers|ready"] == 0
        world.take(world.order("next", {1: 1}))
        world.step(9)
        assert world.reports() == done("load", "next")

    def test_a_load_that_begins_as_its_peer_is_let_go_goes_on(self, world: World) -> None:
        world.take(world.order("load", {1: 1}))
        world.step(9)
        world.link.let_go(world.producer.key)
        world.take(world.order("next", {1: 1}))
        world.step(9)
        assert world.reports() == done("load", "next")

    def test_a_watched_peer_is_no_longer_watched_when_its_loads_are_over(self, world: World) -> None:
        world.take(world.order("load", {1: 1}))
        world.step(9)
        before = len(world.producer.heard_of(Ping))
        world.run_for(9)
        assert len(world.producer.heard_of(Ping)) == before
        assert world.link.peer(world.producer.key).state is PeerState.READY

    def test_shutdown_fails_what_is_open_and_lets_reads_end(self, world: World) -> None:
        world.agent.script.append(Fate.HANG)
        world.take(world.order("load", BLOCKS))
        world.step(3)
        world.puller.stop(world.clock())
        assert not world.puller.is_settled
        world.agent.finish()
        world.step()
        assert world.puller.is_settled
        assert world.reports() == failed(FailureCause.SHUTDOWN)
        world.puller.close()
        world.agent.close()


def test_the_settle_time_is_short_beside_a_step() -> None:
    assert SETTLE_S <= 0.1
