"""The channel over real sockets: lost, late, wrong and foreign replies, addresses that lead nowhere, and many peers."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack

import pytest

from kvlease.core.ids import EngineId, Incarnation, PeerKey
from kvlease.core.messages import AnyRequest, Ping, Release
from kvlease.core.peers import Answered, Event, PeerBack, PeerDied, PeerForgotten, PeerState, TooManyPeers, Unanswered
from kvlease.core.silence import PeerTiming
from kvlease.net.channel import Channel
from kvlease.net.sockets import BATCH_MAX
from kvlease.testing import FakeClock
from tests.net.router import Heard, Router, black_hole, drive, free_port

TIMING = PeerTiming(peer_timeout_s=2.0, ping_interval_s=0.5)


def ask(seq: int, to: Incarnation) -> Ping:
    return Ping(seq=seq, to=to)


@pytest.fixture
def channel(clock: FakeClock) -> Iterator[Channel]:
    channel = Channel(TIMING, clock)
    yield channel
    channel.close()


class Ears:
    """What a channel's owner learned."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.events: list[tuple[PeerKey, Event]] = []

    def step(self, timeout_s: float = 0.02) -> None:
        self.channel.poll(timeout_s)
        self.events += self.channel.take_events()

    def until(self, done: Callable[[], bool]) -> None:
        drive(self.step, done)

    def ended(self, call: Hashable) -> bool:
        return any(isinstance(event, Answered | Unanswered) and event.call == call for _, event in self.events)

    def unanswered(self) -> dict[Hashable, str]:
        return {event.call: event.cause for _, event in self.events if isinstance(event, Unanswered)}


@pytest.fixture
def ears(channel: Channel) -> Ears:
    return Ears(channel)


def call(channel: Channel, key: PeerKey, name: Hashable, clock: Callable[[], float], timeout_s: float = 2.0) -> None:
    channel.peer(key).call(name, ask, clock(), timeout_s)


def heard(ears: Ears, router: Router, at_least: int = 1) -> None:
    def step() -> None:
        ears.step()
        router.pump()

    drive(step, lambda: len(router.heard) >= at_least)


def ask_and_hear(channel: Channel, ears: Ears, router: Router, clock: FakeClock, name: Hashable = "a") -> Heard:
    """A call, as the producer hears it."""
    call(channel, router.key, name, clock)
    heard(ears, router)
    (request,) = router.take()
    return request


# One peer


def test_a_question_and_its_answer(channel: Channel, ears: Ears, router: Router, clock: FakeClock) -> None:
    request = ask_and_hear(channel, ears, router, clock)
    assert request.request.to == router.incarnation
    router.pong(request)
    ears.until(lambda: ears.ended("a"))
    assert isinstance(ears.events[0][1], Answered)
    assert ears.events[0][0] == router.key
    assert channel.stats() == {"opened": 1, "sent": 1, "received": 1, "peers": 1}


def test_the_first_reply_is_lost(channel: Channel, ears: Ears, router: Router, clock: FakeClock) -> None:
    lost = ask_and_hear(channel, ears, router, clock)
    clock.advance(0.2)
    heard(ears, router)
    (again,) = router.take()
    assert again.request == lost.request
    router.pong(again)
    ears.until(lambda: ears.ended("a"))


def test_a_late_second_reply_is_counted_and_changes_nothing(
    channel: Channel, ears: Ears, router: Router, clock: FakeClock
) -> None:
    request = ask_and_hear(channel, ears, router, clock)
    router.pong(request)
    router.pong(request)
    ears.until(lambda: channel.stats().get("unknown_seq") == 1)
    assert [event for _, event in ears.events if isinstance(event, Answered)] == [ears.events[0][1]]


def test_a_wrong_seq_answers_nobody(channel: Channel, ears: Ears, router: Router, clock: FakeClock) -> None:
    request = ask_and_hear(channel, ears, router, clock)
    router.pong(request, seq=4711)
    ears.until(lambda: channel.stats().get("unknown_seq") == 1)
    assert not ears.ended("a")
    router.pong(request)
    ears.until(lambda: ears.ended("a"))


def test_garbage_is_counted_by_reason_and_dropped(
    channel: Channel, ears: Ears, router: Router, clock: FakeClock
) -> None:
    request = ask_and_hear(channel, ears, router, clock)
    for frames in ([b""], [b"\xc1"], [b"\x00" * 100_000], [b"\x91" * 50_000], [b"a", b"b", b"c"], [b"", b""]):
        router.send(request, *frames)
    ears.until(lambda: channel.stats().get("malformed") == 6)
    router.pong(request)
    ears.until(lambda: ears.ended("a"))
    assert channel.peers[router.key].state is PeerState.UNKNOWN


def test_another_incarnation_at_the_address(channel: Channel, ears: Ears, router: Router, clock: FakeClock) -> None:
    call(channel, router.key, "a", clock)
    heard(ears, router)
    router.pong(router.take()[0], incarnation=b"n" * 16)
    ears.until(lambda: ears.ended("a"))
    assert ears.events[0][1] == PeerDied("peer_restarted")
    call(channel, router.key, "b", clock)
    ears.until(lambda: ears.ended("b"))
    assert ears.unanswered() == {"a": "peer_restarted", "b": "peer_restarted"}


def test_silence_then_a_fresh_connection(channel: Channel, ears: Ears, router: Router, clock: FakeClock) -> None:
    before = ask_and_hear(channel, ears, router, clock)
    clock.advance(2.0)
    ears.until(lambda: ears.ended("a"))
    assert ears.unanswered() == {"a": "timeout"}
    clock.advance(0.5)
    after = ask_and_hear(channel, ears, router, clock, "b")
    assert after.identity != before.identity
    router.pong(after)
    ears.until(lambda: ears.ended("b"))
    assert (router.key, PeerBack()) in ears.events


def test_a_watched_peer_is_pinged_and_found_dead(
    channel: Channel, ears: Ears, router: Router, clock: FakeClock
) -> None:
    channel.peer(router.key).watch(clock())
    for _ in range(3):
        heard(ears, router)
        router.answer_pings()
        ears.until(lambda: channel.stats().get("received", 0) == len(router.history))
        clock.advance(0.5)
    for _ in range(4):
        ears.step()
        clock.advance(0.5)
    ears.until(lambda: (router.key, PeerDied("silent")) in ears.events)


# Addresses


@pytest.mark.parametrize(
    ("host", "port"),
    [
        ("", 5600),
        ("not a host", 5600),
        ("tcp://127.0.0.1", 5600),
        ("127.0.0.1:99", 5600),
        ("h" * 5000, 5600),
        ("höst", 5600),
        ("a\0b", 5600),
        ("[::1", 5600),
        ("127.0.0.1", 0),
        ("127.0.0.1", -1),
        ("127.0.0.1", 70000),
        ("no-such-name.invalid", 5600),
    ],
)
def test_an_address_that_leads_nowhere_is_an_answer_not_an_exception(host: str, port: int, clock: FakeClock) -> None:
    channel = Channel(TIMING, clock, lookup=lambda name: None)
    ears = Ears(channel)
    key = PeerKey(EngineId("P"), Incarnation(b"p" * 16), host, port)
    call(channel, key, "a", clock)
    ears.until(lambda: ears.ended("a"))
    assert ears.events == [(key, PeerDied("unreachable")), (key, Unanswered("a", "unreachable"))]
    call(channel, key, "b", clock)
    ears.until(lambda: ears.ended("b"))
    assert ears.unanswered()["b"] == "peer_dead"
    assert channel.stats()["unreachable"] == 1
    channel.close()


def test_names_are_looked_up_once_and_without_waiting_for_them(router: Router, clock: FakeClock) -> None:
    asked: list[str] = []
    gate = threading.Event()

    def lookup(name: str) -> str | None:
        asked.append(name)
        gate.wait(20)
        return "127.0.0.1"

    channel = Channel(TIMING, clock, lookup=lookup)
    ears = Ears(channel)
    named = router.key._replace(host="producer.example")
    twin = named._replace(incarnation=Incarnation(b"q" * 16))
    call(channel, named, "named", clock)
    call(channel, twin, "twin", clock)
    call(channel, router.key, "numeric", clock)
    heard(ears, router)
    router.answer_pings()
    ears.until(lambda: ears.ended("numeric"))
    assert not ears.ended("named")
    gate.set()
    heard(ears, router, 2)
    router.answer_pings()
    ears.until(lambda: ears.ended("named") and ears.ended("twin"))
    assert asked == ["producer.example"]
    assert ears.unanswered() == {"twin": "peer_restarted"}
    channel.close()


def test_an_answer_for_a_peer_that_wants_nothing_any_more_is_dropped(clock: FakeClock) -> None:
    gate = threading.Event()

    def lookup(name: str) -> str | None:
        gate.wait(20)
        return None

    channel = Channel(TIMING, clock, lookup=lookup)
    ears = Ears(channel)
    key = PeerKey(EngineId("P"), Incarnation(b"p" * 16), "slow.example", 1)
    call(channel, key, "a", clock)
    ears.step(0.0)
    channel.forget(key)
    gate.set()
    ears.step(0.5)
    ears.step(0.0)
    assert ears.unanswered() == {"a": "cancelled"}
    channel.close()


def test_an_ipv6_address(clock: FakeClock) -> None:
    try:
        router = Router(host="::1")
    except Exception:
        pytest.skip("no IPv6 here")
    channel = Channel(TIMING, clock)
    ears = Ears(channel)
    call(channel, router.key, "a", clock)
    heard(ears, router)
    router.answer_pings()
    ears.until(lambda: ears.ended("a"))
    channel.close()
    router.close()


# Many peers


def test_black_holes_do_not_delay_a_good_peer(router: Router) -> None:
    def latencies(channel: Channel, count: int) -> list[float]:
        ears = Ears(channel)
        found: list[float] = []

        def step() -> None:
            ears.step(0.001)
            router.answer_pings()

        for i in range(count):
            began = time.monotonic()
            call(channel, router.key, i, time.monotonic)
            drive(step, lambda: ears.ended(len(found)))
            found.append(time.monotonic() - began)
        return found

    channel = Channel(TIMING)
    alone = statistics.median(latencies(channel, 30))
    with ExitStack() as stack:
        holes = [stack.enter_context(black_hole()) for _ in range(4)]
        nobody = PeerKey(EngineId("N"), Incarnation(b"n" * 16), "127.0.0.1", free_port())
        for key in [*holes, nobody]:
            call(channel, key, "into the dark", time.monotonic)
        beside = latencies(channel, 30)
    assert statistics.median(beside) < 3 * alone + 0.005
    assert max(beside) < 1.0
    channel.close()


def test_a_flood_from_one_peer_comes_in_bounded_batches(
    channel: Channel, ears: Ears, router: Router, clock: FakeClock
) -> None:
    request = ask_and_hear(channel, ears, router, clock)
    for _ in range(3 * BATCH_MAX):
        router.pong(request, seq=999)
    most = 0

    def step() -> None:
        nonlocal most
        before = channel.stats().get("unknown_seq", 0)
        ears.step()
        most = max(most, int(channel.stats().get("unknown_seq", 0) - before))

    drive(step, lambda: channel.stats().get("unknown_seq") == 3 * BATCH_MAX)
    assert most <= BATCH_MAX


def test_idle_peers_are_forgotten_in_time_but_not_those_in_use(clock: FakeClock) -> None:
    channel = Channel(TIMING, clock, idle_s=100.0)
    ears = Ears(channel)
    keys = [PeerKey(EngineId(name), Incarnation(b"p" * 16), "127.0.0.1", 1) for name in ("idle", "pinned", "watched")]
    channel.peer(keys[1]).pinned = True
    channel.peer(keys[2]).watch(clock())
    channel.peer(keys[0])
    for _ in range(25):
        clock.advance(5.0)
        ears.step(0.0)
    assert set(channel.peers) == set(keys[1:])
    assert (keys[0], PeerForgotten()) in ears.events
    channel.close()


def test_one_peer_too_many_takes_the_place_of_the_longest_idle(clock: FakeClock) -> None:
    channel = Channel(TIMING, clock, max_peers=3)
    ears = Ears(channel)
    a, b, c, d, e = (PeerKey(EngineId(name), Incarnation(b"p" * 16), "127.0.0.1", 1) for name in "abcde")
    for key in (a, b, c):
        channel.peer(key)
    channel.peer(a).watch(clock())
    ears.step(0.0)  # a is used last now
    channel.peer(d)
    ears.step(0.0)
    assert set(channel.peers) == {c, a, d}
    assert (b, PeerForgotten()) in ears.events
    channel.peer(c).pinned = True
    channel.peer(d).pinned = True
    with pytest.raises(TooManyPeers, match="all 3 peers"):
        channel.peer(e)
    channel.close()


def test_a_peer_kept_by_its_owner_is_taken_up_again_when_it_is_used(
    channel: Channel, ears: Ears, router: Router, clock: FakeClock
) -> None:
    peer = channel.peer(router.key)
    channel.forget(router.key)
    peer.call("a", ask, clock(), 2.0)
    heard(ears, router)
    router.answer_pings()
    ears.until(lambda: ears.ended("a"))
    assert channel.peers[router.key] is peer


def test_where_there_is_no_room_for_it_its_calls_end(router: Router, clock: FakeClock) -> None:
    channel = Channel(TIMING, clock, max_peers=1)
    ears = Ears(channel)
    peer = channel.peer(router.key)
    channel.forget(router.key)
    channel.peer(router.key._replace(port=1)).pinned = True
    peer.call("a", ask, clock(), 2.0)
    ears.step(0.0)
    assert ears.unanswered() == {"a": "cancelled"}
    channel.close()


# Whatever else


def test_what_has_no_wire_form_fails_alone(channel: Channel, ears: Ears, router: Router, clock: FakeClock) -> None:
    def release(lease: str) -> Callable[[int, Incarnation], AnyRequest]:
        return lambda seq, to: Release(seq=seq, to=to, lease=lease, token=b"k" * 16)

    peer = channel.peer(router.key)
    peer.call("surrogate", release("\ud800"), clock(), 2.0)
    peer.call("huge", release("l" * (2 << 20)), clock(), 2.0)
    peer.call("fine", ask, clock(), 2.0)
    heard(ears, router)
    router.answer_pings()
    ears.until(lambda: ears.ended("fine"))
    assert ears.unanswered() == {"surrogate": "unsendable", "huge": "unsendable"}


def test_what_does_not_fit_into_the_queue_is_dropped_and_counted(
    channel: Channel, ears: Ears, clock: FakeClock
) -> None:
    key = PeerKey(EngineId("P"), Incarnation(b"p" * 16), "127.0.0.1", free_port())
    for i in range(5000):
        call(channel, key, i, clock)
    ears.step(0.0)
    stats = channel.stats()
    assert stats["dropped"] > 0
    assert stats["dropped"] + stats["sent"] == 5000


def test_forgetting_ends_the_calls_that_wait(channel: Channel, ears: Ears, router: Router, clock: FakeClock) -> None:
    call(channel, router.key, "a", clock)
    ears.step(0.0)
    channel.forget(router.key)
    channel.forget(router.key)
    ears.step(0.0)
    assert ears.events == [(router.key, Unanswered("a", "cancelled"))]
    assert channel.peers == {}


def test_another_thread_can_end_a_wait(channel: Channel) -> None:
    began = time.monotonic()
    waker = threading.Thread(target=channel.wake)
    waker.start()
    channel.poll(20.0)
    waker.join()
    assert time.monotonic() - began < 10.0


def test_wakes_do_not_pile_up(channel: Channel) -> None:
    for _ in range(100_000):
        channel.wake()
    for _ in range(100):
        channel.poll(0.0)
    began = time.monotonic()
    channel.poll(0.05)
    assert time.monotonic() - began > 0.02


def test_a_closed_channel_does_nothing(router: Router, clock: FakeClock) -> None:
    channel = Channel(TIMING, clock)
    call(channel, router.key, "a", clock)
    channel.poll(0.0)
    channel.close()
    channel.close()
    channel.wake()
    channel.poll(20.0)
    assert channel.take_events() == []
