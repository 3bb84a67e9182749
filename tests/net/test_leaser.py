"""The leaser over real sockets, against producers that lose, delay, refuse, restart and die."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import pytest

from kvlease.config import Settings
from kvlease.core.digest import PromptIdentity, prompt_digest
from kvlease.core.ids import ChannelId, EngineId, Incarnation, LeaseId, LeaseToken, LoadId, PeerKey
from kvlease.core.leases import Grant, LeaseTable, LeaseTiming
from kvlease.core.loads import FailureCause
from kvlease.core.messages import (
    ID_CHARS_MAX,
    RENEW_LIST_MAX,
    Acquire,
    AnyRequest,
    Commit,
    Committed,
    Gone,
    GoneHolding,
    GoneReason,
    Granted,
    Invalid,
    Release,
    Released,
    Renew,
    Renewed,
    Resend,
)
from kvlease.net.channel import Channel
from kvlease.net.leaser import AcquireFailed, AcquireGranted, LeaseGone, Leaser, Result
from kvlease.testing import FakeClock
from tests.net.router import Heard, Router, drive, free_port

CHANNEL = ChannelId("me")
TOKEN = LeaseToken(b"k" * 16)
SETTINGS = Settings()
PROMPT = PromptIdentity(token_ids=[1, 2, 3, 4], num_tokens=3, lora="adapter", cache_salt="salt", mm_hashes=("m",))

R = TypeVar("R", bound=AnyRequest)


@pytest.fixture
def leaser(clock: FakeClock) -> Iterator[Leaser]:
    leaser = Leaser(CHANNEL, SETTINGS, clock=clock)
    yield leaser
    leaser.close()


class Story:
    """A leaser, a producer, and the one thread that drives both."""

    def __init__(self, leaser: Leaser, router: Router, clock: FakeClock) -> None:
        self.leaser, self.router, self.clock = leaser, router, clock
        self.results: list[Result] = []

    def step(self) -> None:
        self.leaser.step(0.01)
        self.results += self.leaser.take_results()
        self.router.pump()

    def settle(self) -> None:
        """Let everything that is on its way arrive."""
        for _ in range(8):
            self.step()

    def until(self, done: Callable[[], bool]) -> None:
        drive(self.step, done)

    def acquire(self, name: str, lease: str = "lease", key: PeerKey | None = None) -> LoadId:
        load = LoadId(name)
        self.leaser.acquire(load, key or self.router.key, LeaseId(lease), TOKEN, PROMPT)
        return load

    def hear(self, kind: type[R]) -> tuple[Heard, R]:
        """The next request, which must be a ``kind``."""
        self.until(lambda: bool(self.router.heard))
        heard = self.router.heard.pop(0)
        assert isinstance(heard.request, kind)
        return heard, heard.request

    def grant(self, heard: Heard, ttl_s: float = 10.0) -> None:
        seq, me = heard.request.seq, self.router.incarnation
        self.router.reply(heard, Granted(seq=seq, incarnation=me, ttl_s=ttl_s, num_tokens=3, blocks=[[(0, 1)]]))

    def gone(self, heard: Heard, why: GoneReason) -> None:
        self.router.reply(heard, Gone(seq=heard.request.seq, incarnation=self.router.incarnation, why=why))

    def renewed(self, heard: Heard, *gone: GoneHolding, ttl_s: float = 10.0) -> None:
        seq, me = heard.request.seq, self.router.incarnation
        self.router.reply(heard, Renewed(seq=seq, incarnation=me, ttl_s=ttl_s, gone=list(gone)))

    def hold(self, name: str, lease: str = "lease", ttl_s: float = 10.0) -> LoadId:
        """Acquire and be granted."""
        load = self.acquire(name, lease)
        heard, _ = self.hear(Acquire)
        self.grant(heard, ttl_s)
        self.until(lambda: any(result.load == load for result in self.results))
        assert isinstance(self.results.pop(), AcquireGranted)
        return load

    def beat(self) -> tuple[Heard, Renew]:
        self.clock.advance(SETTINGS.heartbeat_interval_s)
        return self.hear(Renew)

    def counted(self, kind: str) -> float:
        return self.leaser.stats().get(f"channel_events|{kind}", 0.0)


@pytest.fixture
def story(leaser: Leaser, router: Router, clock: FakeClock) -> Story:
    return Story(leaser, router, clock)


# Acquiring


@pytest.mark.parametrize("has_siblings", [False, True])
def test_an_acquire_says_whether_others_may_follow(story: Story, has_siblings: bool) -> None:
    load = LoadId("r-1")
    story.leaser.acquire(load, story.router.key, LeaseId("lease"), TOKEN, PROMPT, has_siblings=has_siblings)
    assert story.hear(Acquire)[1].has_siblings is has_siblings


def test_an_acquire_carries_the_consumers_own_digest_and_is_granted(story: Story) -> None:
    load = story.acquire("r-1")
    heard, acquire = story.hear(Acquire)
    assert (acquire.lease, acquire.token, acquire.reader, acquire.channel) == ("lease", TOKEN, "me/r-1", "me")
    assert acquire.digest == prompt_digest([1, 2, 3], 3, "adapter", "salt", ["m"])
    assert acquire.has_siblings
    story.grant(heard)
    story.until(lambda: bool(story.results))
    (result,) = story.results
    assert isinstance(result, AcquireGranted)
    assert (result.load, result.granted.blocks) == (load, [[(0, 1)]])


def test_the_first_reply_is_lost_and_both_come_late(story: Story) -> None:
    story.acquire("r-1")
    heard, first = story.hear(Acquire)
    story.clock.advance(0.2)
    again, second = story.hear(Acquire)
    assert second == first
    story.grant(again)
    story.grant(heard)
    story.settle()
    assert len(story.results) == 1
    assert story.counted("unknown_seq") == 1


@pytest.mark.parametrize("why", list(GoneReason))
def test_a_refused_acquire_fails_with_its_reason_and_is_released_nowhere(story: Story, why: GoneReason) -> None:
    load = story.acquire("r-1")
    heard, _ = story.hear(Acquire)
    story.gone(heard, why)
    story.until(lambda: bool(story.results))
    story.leaser.release(load)
    story.settle()
    assert story.results == [AcquireFailed(load, FailureCause(f"gone_{why.value}"))]
    assert story.router.heard == []


@pytest.mark.parametrize("kind", [Released, Resend, Committed])
def test_a_nonsense_answer_fails_the_load_and_lets_go_at_the_producer(story: Story, kind: type[Released]) -> None:
    load = story.acquire("r-1")
    heard, _ = story.hear(Acquire)
    story.router.reply(heard, kind(seq=heard.request.seq, incarnation=story.router.incarnation))
    _, release = story.hear(Release)
    assert release.reader == "me/r-1"
    assert story.results == [AcquireFailed(load, FailureCause.PEER_CONFUSED)]


def test_an_invalid_request_fails_the_load(story: Story) -> None:
    load = story.acquire("r-1")
    heard, _ = story.hear(Acquire)
    story.router.reply(
        heard, Invalid(seq=heard.request.seq, incarnation=story.router.incarnation, reason="too_many_readers", text="")
    )
    story.until(lambda: bool(story.results))
    assert story.results == [AcquireFailed(load, FailureCause.PEER_CONFUSED)]


def test_a_silent_producer_fails_the_load_in_time_and_the_next_at_once(story: Story) -> None:
    load = story.acquire("r-1")
    story.hear(Acquire)
    story.clock.advance(SETTINGS.acquire_timeout_s)
    story.until(lambda: bool(story.results))
    assert story.results == [AcquireFailed(load, FailureCause.ACQUIRE_TIMEOUT)]
    second = story.acquire("r-2")
    story.until(lambda: len(story.results) == 2)
    assert story.results[1] == AcquireFailed(second, FailureCause.PEER_DEAD)


def test_another_incarnation_at_the_address(story: Story) -> None:
    load = story.acquire("r-1")
    heard, _ = story.hear(Acquire)
    story.router.reply(heard, Gone(seq=heard.request.seq, incarnation=b"n" * 16, why=GoneReason.UNKNOWN))
    story.until(lambda: bool(story.results))
    assert story.results == [AcquireFailed(load, FailureCause.PEER_RESTARTED)]


def test_an_address_that_leads_nowhere(story: Story) -> None:
    load = story.acquire("r-1", key=story.router.key._replace(host="not a host"))
    story.until(lambda: bool(story.results))
    assert story.results == [AcquireFailed(load, FailureCause.PEER_DEAD)]


@pytest.mark.parametrize(
    ("name", "lease"),
    [("r", "l" * (ID_CHARS_MAX + 1)), ("r" * ID_CHARS_MAX, "lease"), ("r", "\ud800"), ("\udfff", "lease")],
    ids=["long lease", "long load", "odd lease", "odd load"],
)
def test_names_that_cannot_travel_fail_their_own_load_and_no_other(story: Story, name: str, lease: str) -> None:
    load = story.acquire(name, lease)
    story.until(lambda: bool(story.results))
    assert story.results == [AcquireFailed(load, FailureCause.BAD_HANDOFF)]
    story.results.clear()
    story.hold("other")


def test_a_prompt_that_cannot_be_digested_fails_its_own_load(story: Story) -> None:
    bad = LoadId("bad")
    story.leaser.acquire(bad, story.router.key, LeaseId("l"), TOKEN, PromptIdentity(token_ids=[1], num_tokens=2))
    story.until(lambda: bool(story.results))
    assert story.results == [AcquireFailed(bad, FailureCause.INTERNAL)]
    assert story.counted("internal") == 1
    story.results.clear()
    story.hold("good")


def test_a_producer_that_there_is_no_room_for_fails_its_own_load(clock: FakeClock, router: Router) -> None:
    leaser = Leaser(CHANNEL, SETTINGS, clock=clock, make_channel=partial(Channel, max_peers=1))
    story = Story(leaser, router, clock)
    story.hold("good")
    load = story.acquire("bad", key=router.key._replace(port=free_port()))
    story.until(lambda: bool(story.results))
    assert story.results == [AcquireFailed(load, FailureCause.TOO_MANY_PEERS)]
    assert (story.counted("too_many_peers"), story.counted("internal")) == (1, 0)
    leaser.close()


def test_a_second_claim_for_the_same_load_does_not_disturb_the_first(story: Story) -> None:
    load = story.acquire("r-1")
    story.acquire("r-1")
    heard, _ = story.hear(Acquire)
    story.grant(heard)
    story.settle()
    assert [result.load for result in story.results] == [load]
    assert story.router.heard == []


# Letting go


def test_a_release_is_sent_until_it_is_answered(story: Story) -> None:
    load = story.hold("r-1")
    story.leaser.release(load)
    _, release = story.hear(Release)
    assert (release.lease, release.token, release.reader) == ("lease", TOKEN, "me/r-1")
    story.clock.advance(0.2)
    heard, again = story.hear(Release)
    assert again == release
    story.router.reply(heard, Released(seq=again.seq, incarnation=story.router.incarnation))
    story.settle()
    story.clock.advance(10.0)
    story.settle()
    assert story.router.heard == []


def test_a_finished_load_needs_no_release_and_no_heartbeat(story: Story) -> None:
    load = story.hold("r-1")
    story.leaser.finish(load)
    story.leaser.finish(load)
    story.leaser.release(load)
    story.settle()
    story.clock.advance(10.0)
    story.settle()
    assert story.router.heard == []
    assert story.results == []


def test_a_load_released_while_it_is_being_acquired_has_no_result(story: Story) -> None:
    load = story.acquire("r-1")
    heard, _ = story.hear(Acquire)
    story.leaser.release(load)
    story.hear(Release)
    story.grant(heard)
    story.settle()
    assert story.results == []


def test_a_load_released_before_anything_was_done_leaves_only_a_release(story: Story) -> None:
    load = story.acquire("r-1")
    story.leaser.release(load)
    story.hear(Release)
    story.settle()
    assert story.results == []
    assert story.router.heard == []


def test_an_end_that_comes_after_the_load_was_let_go_is_not_told(story: Story) -> None:
    story.acquire("r-1")
    story.hear(Acquire)
    story.clock.advance(SETTINGS.acquire_timeout_s)
    story.until(lambda: bool(story.results))
    story.results.clear()
    load = story.acquire("r-2")  # ends at once: the peer is dead
    story.leaser.release(load)
    story.settle()
    assert story.results == []
    assert story.counted("internal") == 0


def test_what_nobody_claimed_is_released_by_readers_of_its_own(story: Story) -> None:
    for lease in ("a", "b"):
        story.leaser.release_unclaimed(story.router.key, LeaseId(lease), TOKEN)
    releases = [story.hear(Release)[1] for _ in range(2)]
    assert [release.lease for release in releases] == ["a", "b"]
    assert len({release.reader for release in releases}) == 2
    assert all(release.reader and release.reader.startswith("me/") for release in releases)


# Heartbeats


def test_one_renewal_per_beat_however_many_leases(story: Story) -> None:
    for i in range(5):
        story.hold(f"r-{i}", lease=f"l-{i}")
    heard, renew = story.beat()
    assert (renew.channel, renew.full) == ("me", True)
    assert [holding.reader for holding in renew.added] == [f"me/r-{i}" for i in range(5)]
    story.renewed(heard)
    story.settle()
    assert story.router.heard == []
    heard, renew = story.beat()
    assert (renew.full, renew.added, renew.removed) == (False, [], [])
    assert story.results == []


def test_a_lost_acknowledgement_repeats_the_renewal_as_it_was(story: Story) -> None:
    story.hold("r-1")
    story.renewed(story.beat()[0])
    story.settle()
    story.hold("r-2")
    _, lost = story.beat()
    story.clock.advance(0.2)
    _, resent = story.hear(Renew)
    assert resent == lost
    story.router.heard.clear()
    story.clock.advance(2.0)
    story.settle()
    story.router.heard.clear()  # what was sent again meanwhile
    story.clock.advance(1.0)
    heard, next_beat = story.hear(Renew)
    assert (next_beat.generation, next_beat.base) == (lost.generation, lost.base)
    assert next_beat.seq > lost.seq
    story.renewed(heard)


def test_a_full_list_is_sent_once_and_made_anew_when_it_is_lost(story: Story) -> None:
    story.hold("r-1")
    _, lost = story.beat()
    assert lost.full
    story.clock.advance(1.0)
    story.settle()
    assert story.router.heard == [], "a copy might put out a reader that came in between"
    story.clock.advance(1.0)
    story.settle()
    story.clock.advance(1.0)
    _, again = story.hear(Renew)
    assert again.full
    assert again.generation > lost.generation


def test_what_was_let_go_is_listed_until_it_is_acknowledged(story: Story) -> None:
    gone, stays = story.hold("r-1"), story.hold("r-2")
    story.renewed(story.beat()[0])
    story.settle()
    story.leaser.finish(gone)
    heard, renew = story.beat()
    assert renew.removed == [f"me/{gone}"]
    story.renewed(heard)
    story.settle()
    _, renew = story.beat()
    assert renew.removed == []
    assert stays


def test_a_resend_brings_the_whole_list_at_once_but_only_once_per_beat(story: Story) -> None:
    story.hold("r-1")
    story.renewed(story.beat()[0])
    story.settle()
    heard, delta = story.beat()
    assert not delta.full
    for _ in range(2):
        story.router.reply(heard, Resend(seq=heard.request.seq, incarnation=story.router.incarnation))
        story.settle()
        if story.router.heard:
            heard, full = story.hear(Renew)
            assert full.full
            assert [holding.reader for holding in full.added] == ["me/r-1"]
    assert story.router.heard == []
    assert story.counted("resends") == 2
    assert story.beat()[1].full


def test_a_nonsense_answer_to_a_renewal_is_survived(story: Story) -> None:
    story.hold("r-1")
    heard, _ = story.beat()
    story.gone(heard, GoneReason.UNKNOWN)
    story.settle()
    assert story.counted("confused") == 1
    assert story.beat()[1].full


def test_a_lost_lease_is_told_once_and_renewed_no_more(story: Story) -> None:
    lost, kept = story.hold("r-1"), story.hold("r-2")
    heard, _ = story.beat()
    listed = GoneHolding(reader="me/r-1", why=GoneReason.EXPIRED)
    story.renewed(heard, listed)
    story.until(lambda: bool(story.results))
    heard, renew = story.beat()
    assert renew.removed == ["me/r-1"]
    story.renewed(heard, listed, GoneHolding(reader="me/stranger", why=GoneReason.EXPIRED))
    story.settle()
    assert story.results == [LeaseGone(lost, GoneReason.EXPIRED)]
    story.leaser.release(lost)
    story.leaser.finish(kept)
    story.settle()
    assert story.router.heard == []


def test_a_reader_that_has_committed_has_lost_nothing(story: Story) -> None:
    load = story.hold("r-1")
    heard, _ = story.beat()
    story.renewed(heard, GoneHolding(reader="me/r-1", why=GoneReason.COMMITTED))
    story.settle()
    story.leaser.finish(load)
    story.settle()
    assert story.results == []


def test_old_news_does_not_end_a_newer_grant(story: Story) -> None:
    story.hold("r-1")
    heard, _ = story.beat()
    story.clock.advance(0.1)
    story.hold("r-2")
    story.renewed(heard, GoneHolding(reader="me/r-2", why=GoneReason.UNKNOWN))
    story.settle()
    assert story.results == []


def test_another_producer_cannot_end_a_lease(story: Story) -> None:
    story.hold("r-1")
    other = Router(b"o" * 16)
    load = LoadId("r-2")
    story.leaser.acquire(load, other.key, LeaseId("l"), TOKEN, PROMPT)
    story.until(other.has_heard)
    heard = other.take()[0]
    other.reply(
        heard, Granted(seq=heard.request.seq, incarnation=other.incarnation, ttl_s=10.0, num_tokens=3, blocks=[])
    )
    story.until(lambda: bool(story.results))
    story.results.clear()
    story.clock.advance(3.0)
    story.until(other.has_heard)
    heard = other.take()[0]
    bogus = [GoneHolding(reader="me/r-1", why=GoneReason.EXPIRED)]
    other.reply(heard, Renewed(seq=heard.request.seq, incarnation=other.incarnation, ttl_s=10.0, gone=bogus))
    story.settle()
    assert story.results == []
    other.close()


def test_shorter_leases_are_renewed_more_often_and_absurd_ones_not_without_end(story: Story) -> None:
    story.hold("r-1", ttl_s=3.0)
    story.clock.advance(1.0)
    heard, _ = story.hear(Renew)
    story.renewed(heard, ttl_s=0.0)
    story.settle()
    story.clock.advance(0.29)
    story.settle()
    assert story.router.heard == []
    story.clock.advance(0.02)
    heard, _ = story.hear(Renew)
    story.renewed(heard, ttl_s=float("nan"))
    story.settle()
    story.clock.advance(2.9)
    story.settle()
    assert story.router.heard == []
    story.clock.advance(0.2)
    story.hear(Renew)


def test_a_restarted_producer_takes_its_leases_with_it(story: Story) -> None:
    held = story.hold("r-1")
    waiting = story.acquire("r-2")
    heard, _ = story.hear(Acquire)
    story.router.reply(heard, Gone(seq=heard.request.seq, incarnation=b"n" * 16, why=GoneReason.UNKNOWN))
    story.until(lambda: len(story.results) == 2)
    assert set(story.results) == {
        LeaseGone(held, GoneReason.UNKNOWN),
        AcquireFailed(waiting, FailureCause.PEER_RESTARTED),
    }
    story.clock.advance(30.0)
    story.settle()
    assert story.router.heard == []


def test_a_producer_that_freezes_is_renewed_soon_after_it_is_back(story: Story) -> None:
    story.hold("r-1")
    story.renewed(story.beat()[0])
    story.settle()
    story.beat()
    story.clock.advance(2.0)
    story.settle()
    story.router.heard.clear()
    assert story.counted("renewals_lost") == 1
    waited_s = 0.0
    while not story.router.heard:
        story.clock.advance(0.25)
        waited_s += 0.25
        story.settle()
    assert waited_s <= 1.5
    heard, _ = story.hear(Renew)
    story.renewed(heard)
    story.settle()
    assert story.results == []


# With a real lease table on the other side


class Table:
    """A producer: the real lease table behind the ROUTER of a story."""

    def __init__(self, story: Story) -> None:
        timing = LeaseTiming(
            lease_duration_s=30.0,
            lease_extension_s=10.0,
            max_lease_lifetime_s=600.0,
            sibling_grace_s=0.0,
            tombstone_ttl_s=600.0,
            tombstone_max=100_000,
        )
        self.table = LeaseTable(story.router.incarnation, timing)
        self.story, self.router, self.clock = story, story.router, story.clock

    def grant(self, lease: str) -> None:
        digest = PROMPT.digest()
        self.table.grant(Grant(LeaseId(lease), TOKEN, digest, 3, [[(0, 1)]]), self.clock())

    def serve(self) -> None:
        for heard in self.router.take():
            request = heard.request
            assert isinstance(request, Acquire | Renew | Commit | Release)
            self.router.reply(heard, self.table.handle(request, self.clock()))  # type: ignore[arg-type]
        self.table.expire(self.clock())

    def step(self) -> None:
        self.story.step()
        self.serve()


def test_thousands_of_leases_live_through_a_minute_and_all_are_let_go(story: Story) -> None:
    producer = Table(story)
    loads = [LoadId(f"r-{i}") for i in range(RENEW_LIST_MAX + 500)]
    for load in loads:
        producer.grant(f"lease-{load}")
        story.acquire(load, lease=f"lease-{load}")
    drive(producer.step, lambda: len(story.results) == len(loads))
    assert all(isinstance(result, AcquireGranted) for result in story.results)
    story.results.clear()
    for _ in range(60):
        story.clock.advance(1.0)
        for _ in range(6):
            producer.step()
    assert len(producer.table) == len(loads)
    assert story.results == []
    for load in loads[::2]:
        story.leaser.release(load)
    drive(producer.step, lambda: len(producer.table) == len(loads) // 2)
    story.leaser.close()
    for _ in range(20):
        producer.serve()
    assert len(producer.table) <= len(loads) // 2
    story.clock.advance(10.0)
    producer.serve()
    assert len(producer.table) == 0


def test_a_release_that_was_lost_is_mended_by_the_next_renewal(story: Story) -> None:
    producer = Table(story)
    for name in ("a", "b"):
        producer.grant(name)
        story.acquire(name, lease=name)
    drive(producer.step, lambda: len(story.results) == 2)
    story.leaser.release(LoadId("a"))
    story.until(lambda: bool(story.router.heard))
    story.router.heard.clear()  # lost, and so are its copies
    for _ in range(4):
        story.clock.advance(0.5)
        story.settle()
        story.router.heard = [heard for heard in story.router.heard if not isinstance(heard.request, Release)]
    assert len(producer.table) == 2
    for _ in range(3):
        story.clock.advance(2.0)
        story.settle()
        story.router.heard = [heard for heard in story.router.heard if not isinstance(heard.request, Release)]
        producer.serve()
        story.settle()
    assert len(producer.table) == 1


def test_expiry_at_the_producer_reaches_the_load(story: Story) -> None:
    producer = Table(story)
    producer.grant("a")
    load = story.acquire("a", lease="a")
    drive(producer.step, lambda: len(story.results) == 1)
    producer.table.revoke_all(story.clock())
    story.clock.advance(3.0)
    drive(producer.step, lambda: len(story.results) == 2)
    assert story.results[1] == LeaseGone(load, GoneReason.REVOKED)


# The thread


def test_the_thread_answers_and_closing_releases_what_is_held(router: Router) -> None:
    leaser = Leaser(CHANNEL, SETTINGS)
    leaser.start()
    assert leaser.is_alive
    results: list[Result] = []
    load = LoadId("r-1")
    leaser.acquire(load, router.key, LeaseId("lease"), TOKEN, PROMPT)

    def step() -> None:
        router.pump()
        results.extend(leaser.take_results())
        threading.Event().wait(0.005)

    drive(step, lambda: bool(router.heard))
    heard = router.take()[0]
    router.reply(
        heard, Granted(seq=heard.request.seq, incarnation=router.incarnation, ttl_s=10.0, num_tokens=3, blocks=[])
    )
    drive(step, lambda: bool(results))
    closer = threading.Thread(target=leaser.close)
    closer.start()
    drive(step, lambda: bool(router.heard))
    (released,) = router.take()
    assert isinstance(released.request, Release)
    router.reply(released, Released(seq=released.request.seq, incarnation=router.incarnation))
    closer.join()
    assert not leaser.is_alive
    leaser.close()
    leaser.acquire(LoadId("late"), router.key, LeaseId("lease"), TOKEN, PROMPT)
    assert leaser.take_results() == []


def test_whoever_waits_for_results_is_woken_by_one(router: Router) -> None:
    leaser = Leaser(CHANNEL, SETTINGS)
    assert not leaser.wait(60.0), "nobody would bring one"
    leaser.start()
    assert not leaser.wait(0.001)
    bad = PromptIdentity(token_ids=[1], num_tokens=2)
    leaser.acquire(LoadId("r-1"), router.key, LeaseId("l"), TOKEN, bad)
    assert leaser.wait(60.0)
    assert leaser.wait(60.0), "until it is taken"
    assert [result.load for result in leaser.take_results()] == ["r-1"]
    leaser.close()


def test_closing_does_not_wait_for_the_dead() -> None:
    leaser = Leaser(CHANNEL, SETTINGS)
    leaser.start()
    key = PeerKey(EngineId("N"), Incarnation(b"n" * 16), "127.0.0.1", free_port())
    leaser.acquire(LoadId("r-1"), key, LeaseId("lease"), TOKEN, PROMPT)
    leaser.close()
    assert not leaser.is_alive


@dataclass(frozen=True)
class Explosive(PromptIdentity):
    def digest(self) -> bytes:
        raise SystemError("boom")


def test_its_numbers_are_the_same_object_until_something_was_counted(story: Story) -> None:
    before = story.leaser.stats()
    assert story.leaser.stats() is before
    story.hold("r")
    after = story.leaser.stats()
    assert (before, after["channel_events|acquires"]) == ({}, 1)
    assert story.leaser.stats() is after


def test_an_error_in_one_command_ends_neither_the_thread_nor_the_others(router: Router) -> None:
    leaser = Leaser(CHANNEL, SETTINGS)
    leaser.start()
    bad = LoadId("bad")
    leaser.acquire(bad, router.key, LeaseId("l"), TOKEN, Explosive(token_ids=[], num_tokens=0))
    leaser.acquire(LoadId("good"), router.key, LeaseId("l"), TOKEN, PROMPT)

    def step() -> None:
        router.pump()
        threading.Event().wait(0.005)

    drive(step, lambda: bool(router.heard))
    assert leaser.take_results() == [AcquireFailed(bad, FailureCause.INTERNAL)]
    assert leaser.is_alive
    assert leaser.stats()["channel_events|internal"] == 1
    leaser.close()
