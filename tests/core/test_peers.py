"""One peer: calls and their one end each, silence and death, the back-off, the greeting."""

from __future__ import annotations

from collections.abc import Hashable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlease.core.ids import EngineId, Incarnation, PeerKey
from kvlease.core.messages import (
    AnyReply,
    AnyRequest,
    Hello,
    Invalid,
    Ping,
    Pong,
    Refused,
    Released,
    Welcome,
)
from kvlease.core.peers import GREETING, Answered, Event, Peer, PeerBack, PeerDied, PeerState, Unanswered
from kvlease.core.silence import PeerTiming

ME = Incarnation(b"p" * 16)
OTHER = Incarnation(b"q" * 16)
KEY = PeerKey(EngineId("P"), ME, "127.0.0.1", 5600)
TIMING = PeerTiming(peer_timeout_s=2.0, ping_interval_s=0.5, backoff_s=0.5, backoff_max_s=2.0)


def ask(seq: int, to: Incarnation) -> Ping:
    return Ping(seq=seq, to=to)


def hello(seq: int, to: Incarnation) -> Hello:
    return Hello(seq=seq, to=to, version=1, factors={}, fingerprint="", ranks=[])


def welcome(seq: int) -> Welcome:
    return Welcome(seq=seq, incarnation=ME, version=1, ranks=[])


def refused(seq: int) -> Refused:
    return Refused(seq=seq, incarnation=ME, why="dtype")


def pong(seq: int, incarnation: Incarnation = ME) -> Pong:
    return Pong(seq=seq, incarnation=incarnation)


class Story:
    """A peer, a clock, and what went over the wire."""

    def __init__(self) -> None:
        self.now = 100.0
        self.touched = 0
        self.peer = Peer(KEY, TIMING, changed=self._touch)

    def _touch(self, peer: Peer) -> None:
        assert peer is self.peer
        self.touched += 1

    def call(self, name: Hashable, timeout_s: float = 2.0) -> int:
        """Call, and give the seq that was sent; 0 when nothing was."""
        self.peer.call(name, ask, self.now, timeout_s)
        sent = self.peer.take_requests()
        return sent[0].seq if sent else 0

    def greet(self) -> int:
        self.peer.greet(hello, self.now, 2.0)
        sent = self.peer.take_requests()
        return sent[0].seq if sent else 0

    def hear(self, reply: AnyReply) -> str | None:
        return self.peer.hear(reply, self.now)

    def until(self, now: float) -> list[AnyRequest]:
        """Let time pass, deadline by deadline; what was sent on the way."""
        sent = []
        while (at := self.peer.next_deadline()) is not None and at <= now:
            self.now = max(self.now, at)
            self.peer.tick(self.now)
            sent += self.peer.take_requests()
        self.now = now
        return sent

    def events(self) -> list[Event]:
        return self.peer.take_events()

    def die(self) -> None:
        self.call("fatal")
        self.until(self.now + 2.0)
        assert self.events() == [Unanswered("fatal", "timeout"), PeerDied("timeout")]


@pytest.fixture
def story() -> Story:
    return Story()


# Calls


def test_a_call_is_answered_once(story: Story) -> None:
    story.peer.call("a", ask, story.now, 2.0)
    assert story.peer.is_busy
    assert story.peer.wants_to_send
    (request,) = story.peer.take_requests()
    assert not story.peer.wants_to_send
    seq = request.seq
    story.now += 0.01
    assert story.hear(pong(seq)) is None
    assert story.events() == [Answered("a", pong(seq))]
    assert story.peer.rtt_s == pytest.approx(0.01)
    assert not story.peer.is_busy
    assert story.hear(pong(seq)) == "unknown_seq"
    assert story.events() == []


def test_a_lost_request_is_sent_again_as_it_was(story: Story) -> None:
    seq = story.call("a")
    assert [request.seq for request in story.until(100.7)] == [seq, seq]
    story.hear(pong(seq))
    assert story.events() == [Answered("a", pong(seq))]
    assert story.until(110.0) == []


def test_a_cancelled_call_has_no_end_and_its_reply_is_nobodys(story: Story) -> None:
    seq = story.call("a")
    story.peer.cancel("a")
    story.peer.cancel("never made")
    assert story.hear(pong(seq)) == "unknown_seq"
    story.until(110.0)
    assert story.events() == []


def test_whatever_has_no_wire_form_fails_alone(story: Story) -> None:
    a, b = story.call("a"), story.call("b")
    story.peer.unsendable(a)
    story.peer.unsendable(a)
    story.hear(pong(b))
    assert story.events() == [Unanswered("a", "unsendable"), Answered("b", pong(b))]
    assert story.peer.state is PeerState.UNKNOWN


def test_an_abandoned_peer_leaves_nobody_waiting(story: Story) -> None:
    story.call("a")
    story.greet()
    story.peer.abandon()
    assert story.events() == [Unanswered("a", "cancelled"), Unanswered(GREETING, "cancelled")]
    assert story.peer.state is PeerState.UNKNOWN


def test_the_owner_is_told_of_everything_it_did_not_poll_for(story: Story) -> None:
    story.call("a")
    story.peer.cancel("a")
    story.peer.watch(story.now)
    story.peer.unwatch(story.now)
    assert story.touched == 4
    Peer(KEY, TIMING).call("a", ask, 0.0, 1.0)  # nobody has to listen


# Death and return


def test_one_call_that_runs_out_while_others_are_answered_kills_nobody(story: Story) -> None:
    story.call("slow")
    story.now += 1.0
    story.hear(pong(story.call("fast")))
    story.until(102.0)
    assert story.events()[-1] == Unanswered("slow", "timeout")
    assert story.peer.state is PeerState.UNKNOWN


def test_a_call_that_runs_out_in_silence_kills_the_peer_and_every_call_with_it(story: Story) -> None:
    story.call("a")
    story.now += 1.0
    story.call("b")
    story.until(102.0)
    assert story.events() == [Unanswered("a", "timeout"), PeerDied("timeout"), Unanswered("b", "peer_dead")]
    assert story.peer.state is PeerState.DEAD
    assert "dead" in repr(story.peer)


def test_a_message_sent_once_that_is_lost_kills_nobody_until_the_silence_is_long(story: Story) -> None:
    story.hear(pong(story.call("before")))
    for _ in range(4):
        story.peer.call("once", ask, story.now, 0.5, resend=False)
        story.until(story.now + 0.5)
    assert [event for event in story.events() if not isinstance(event, Answered)] == [
        *[Unanswered("once", "timeout")] * 4,
        PeerDied("timeout"),
    ]
    assert story.now == 102.0


def test_calls_that_run_out_together_are_all_timeouts(story: Story) -> None:
    story.call("a")
    story.call("b")
    story.peer.tick(102.0)
    events = story.events()
    assert sorted(map(repr, events)) == [
        repr(PeerDied("timeout")),
        repr(Unanswered("a", "timeout")),
        repr(Unanswered("b", "timeout")),
    ]


def test_the_dead_are_left_alone_until_the_back_off_is_over_then_tried_by_one(story: Story) -> None:
    story.die()
    assert story.call("early") == 0
    assert story.events() == [Unanswered("early", "peer_dead")]
    story.now += 0.5
    assert story.call("probe") > 0
    assert story.call("second") == 0
    assert story.events() == [Unanswered("second", "peer_dead")]


def test_each_failed_probe_doubles_the_back_off_up_to_the_maximum(story: Story) -> None:
    story.die()
    waits = []
    for _ in range(4):
        died_at = story.now
        while story.call("probe") == 0:
            story.now += 0.125
        waits.append(story.now - died_at)
        story.until(story.now + 2.0)
        assert story.events()[-1] == Unanswered("probe", "peer_dead")
    assert waits == [0.5, 1.0, 2.0, 2.0]


def test_a_cancelled_probe_lets_the_next_one_through(story: Story) -> None:
    story.die()
    story.now += 0.5
    story.call("probe")
    story.peer.cancel("probe")
    assert story.call("next") > 0


def test_an_answered_probe_brings_the_peer_back_for_all(story: Story) -> None:
    story.die()
    story.now += 0.5
    seq = story.call("probe")
    story.hear(pong(seq))
    assert story.events() == [PeerBack(), Answered("probe", pong(seq))]
    assert story.peer.state is PeerState.UNKNOWN
    story.die()
    story.now += 0.5
    assert story.call("probe") > 0, "the back-off starts small again"


def test_a_late_reply_brings_the_peer_back_too(story: Story) -> None:
    seq = story.call("fatal")
    story.until(102.0)
    assert story.hear(pong(seq)) == "unknown_seq"
    assert story.events()[-1] == PeerBack()


def test_another_incarnation_at_the_address_is_death_for_good(story: Story) -> None:
    seq = story.call("a")
    assert story.hear(pong(seq, OTHER)) == "other_incarnation"
    assert story.events() == [PeerDied("peer_restarted"), Unanswered("a", "peer_restarted")]
    story.peer.watch(story.now)
    assert story.until(story.now + 60.0) == [], "nobody is asked any more"
    assert story.call("later") == 0
    assert story.events() == [Unanswered("later", "peer_restarted")]
    assert story.hear(pong(seq)) == "other_incarnation", "not even the old one's last word counts"
    assert story.hear(pong(seq, OTHER)) == "other_incarnation"
    assert story.events() == []


def test_the_dead_can_turn_out_to_be_replaced(story: Story) -> None:
    story.die()
    story.now += 0.5
    seq = story.call("probe")
    story.hear(pong(seq, OTHER))
    assert story.events() == [PeerDied("peer_restarted"), Unanswered("probe", "peer_restarted")]


def test_an_address_that_leads_nowhere_is_a_death_with_that_cause(story: Story) -> None:
    story.call("a")
    story.peer.unreachable(story.now)
    assert story.events() == [PeerDied("unreachable"), Unanswered("a", "unreachable")]
    story.now += 0.5
    story.call("probe")
    story.peer.unreachable(story.now)
    assert story.events() == [Unanswered("probe", "unreachable")]
    story.now += 0.5
    assert story.call("b") == 0, "the back-off has doubled"
    story.peer.unreachable(story.now)
    assert story.events() == [Unanswered("b", "peer_dead")]


# Watching


def test_a_watched_peer_is_asked_when_nothing_was_heard_for_a_while(story: Story) -> None:
    story.peer.watch(story.now)
    for _ in range(8):
        story.peer.tick(story.now)
        (ping,) = story.peer.take_requests()
        assert isinstance(ping, Ping)
        assert story.hear(pong(ping.seq)) is None
        story.now += 0.5
    assert story.events() == []


def test_any_word_spares_a_ping(story: Story) -> None:
    story.hear(pong(story.call("a")))
    story.peer.watch(story.now)
    assert story.peer.next_deadline() == story.now + 0.5
    story.now += 0.4
    story.hear(pong(story.call("b")))
    assert story.peer.next_deadline() == story.now + 0.5


def test_a_watched_peer_that_falls_silent_is_dead_after_the_peer_timeout(story: Story) -> None:
    story.peer.watch(story.now)
    story.call("a", timeout_s=60.0)
    story.until(101.99)
    assert story.events() == []
    story.until(102.0)
    assert story.events() == [PeerDied("silent"), Unanswered("a", "peer_dead")]


def test_a_call_of_a_watched_peer_that_runs_out_is_left_to_the_watch(story: Story) -> None:
    story.peer.watch(story.now)
    story.call("a", timeout_s=0.5)
    story.until(100.5)
    assert story.events() == [Unanswered("a", "timeout")]


def test_a_thread_that_was_held_up_and_asked_nothing_takes_nobody_for_dead(story: Story) -> None:
    story.hear(pong(story.call("a")))
    story.peer.watch(story.now)
    story.events()
    story.now += 30.0
    story.peer.tick(story.now)
    (ping,) = story.peer.take_requests()
    assert story.events() == []
    story.until(story.now + 1.4)
    assert story.events() == []
    story.hear(pong(ping.seq))
    assert story.events() == []


def test_a_dead_watched_peer_is_tried_now_and_then_and_comes_back(story: Story) -> None:
    story.peer.watch(story.now)
    story.until(102.0)
    story.events()
    assert [type(request) for request in story.until(102.4)] == []
    pings = story.until(106.0)
    assert len(pings) == 3  # after 0.5, 1 and 2 s
    assert story.hear(pong(pings[0].seq)) is None
    assert story.events() == [PeerBack()]


def test_while_a_call_tries_the_dead_no_ping_does(story: Story) -> None:
    story.peer.watch(story.now)
    story.until(102.0)
    story.now = 102.5
    assert story.call("probe", timeout_s=0.1) > 0
    assert story.peer.next_deadline() == pytest.approx(102.6)
    story.peer.tick(102.5)
    assert story.peer.take_requests() == []


def test_the_last_one_to_leave_ends_the_watch(story: Story) -> None:
    story.peer.watch(story.now)
    story.peer.watch(story.now)
    story.peer.unwatch(story.now)
    assert story.peer.is_busy
    story.peer.unwatch(story.now)
    assert story.peer.next_deadline() is None
    with pytest.raises(ValueError, match="not watched"):
        story.peer.unwatch(story.now)


# Greeting


def test_a_greeting_that_is_welcomed(story: Story) -> None:
    seq = story.greet()
    assert story.peer.state is PeerState.GREETING
    assert story.greet() == 0, "it joins the one under way"
    story.hear(welcome(seq))
    assert story.peer.state is PeerState.READY
    assert story.events() == [Answered(GREETING, welcome(seq))]


def test_a_ready_peer_can_be_greeted_again(story: Story) -> None:
    story.hear(welcome(story.greet()))
    seq = story.greet()
    assert story.peer.state is PeerState.GREETING
    story.hear(welcome(seq))
    assert story.peer.state is PeerState.READY


def test_a_refusal_is_remembered_for_a_while(story: Story) -> None:
    seq = story.greet()
    story.hear(refused(seq))
    assert story.peer.state is PeerState.REFUSED
    assert story.greet() == 0
    assert story.events() == [Answered(GREETING, refused(seq)), Answered(GREETING, refused(seq))]
    story.until(102.0)
    assert story.peer.state is PeerState.UNKNOWN
    assert story.peer.refusal is None
    assert story.greet() > 0


def test_a_refused_peer_can_die(story: Story) -> None:
    story.hear(refused(story.greet()))
    story.events()
    story.die()
    assert story.peer.refusal is None


def test_any_other_answer_to_a_greeting_is_for_the_caller_to_judge(story: Story) -> None:
    seq = story.greet()
    odd = Invalid(seq=seq, incarnation=ME, reason="malformed", text="?")
    story.hear(odd)
    assert story.peer.state is PeerState.UNKNOWN
    assert story.events() == [Answered(GREETING, odd)]


def test_a_greeting_that_runs_out_while_the_peer_talks(story: Story) -> None:
    story.greet()
    story.now += 1.0
    story.hear(pong(story.call("a")))
    story.until(102.0)
    assert story.events()[-1] == Unanswered(GREETING, "timeout")
    assert story.peer.state is PeerState.UNKNOWN


def test_a_cancelled_greeting(story: Story) -> None:
    story.greet()
    story.peer.cancel(GREETING)
    assert story.peer.state is PeerState.UNKNOWN
    assert story.greet() > 0


def test_greeting_the_dead(story: Story) -> None:
    story.die()
    assert story.greet() == 0
    assert story.events() == [Unanswered(GREETING, "peer_dead")]
    story.now += 0.5
    seq = story.greet()
    assert story.greet() == 0
    assert story.peer.state is PeerState.DEAD
    story.hear(welcome(seq))
    assert story.peer.state is PeerState.READY
    assert story.events() == [PeerBack(), Answered(GREETING, welcome(seq))]


def test_a_word_from_the_dead_while_they_are_greeted(story: Story) -> None:
    late = story.call("fatal")
    story.until(102.5)
    story.events()
    seq = story.greet()
    story.hear(pong(late))
    assert story.peer.state is PeerState.GREETING
    story.hear(welcome(seq))
    assert story.peer.state is PeerState.READY


# Whatever happens

STEP = st.one_of(
    st.tuples(st.just("call"), st.integers(0, 3)),
    st.tuples(st.just("cancel"), st.integers(0, 3)),
    st.tuples(st.just("greet"), st.just(0)),
    st.tuples(st.just("watch"), st.booleans()),
    st.tuples(st.just("pass"), st.sampled_from([0.1, 0.5, 1.0, 2.0, 5.0])),
    st.tuples(st.just("answer"), st.integers(0, 3)),
    st.tuples(st.just("stranger"), st.just(0)),
    st.tuples(st.just("unreachable"), st.just(0)),
    st.tuples(st.just("unsendable"), st.integers(0, 3)),
)


@settings(max_examples=300)
@given(st.lists(STEP, max_size=60))
def test_every_call_ends_once_or_was_cancelled(script: list[tuple[str, float]]) -> None:
    story = Story()
    open_calls: set[Hashable] = set()
    sent: list[AnyRequest] = []
    watchers = 0

    def take() -> None:
        for event in story.events():
            if isinstance(event, Answered | Unanswered):
                open_calls.remove(event.call)  # raises if it was not open: two ends
        sent.extend(story.peer.take_requests())
        del sent[:-8]

    for step, value in script:
        if step == "call" and value not in open_calls:
            open_calls.add(value)
            story.peer.call(value, ask, story.now, 2.0)
        elif step == "cancel" and value in open_calls:
            story.peer.cancel(value)
            open_calls.discard(value)
        elif step == "greet" and GREETING not in open_calls:
            open_calls.add(GREETING)
            story.peer.greet(hello, story.now, 2.0)
        elif step == "watch" and (value or not watchers):
            watchers += 1
            story.peer.watch(story.now)
        elif step == "watch":
            watchers -= 1
            story.peer.unwatch(story.now)
        elif step == "pass":
            story.now += value
            story.peer.tick(story.now)
        elif step == "answer" and sent:
            request = sent[int(value) % len(sent)]
            answers: list[AnyReply] = [welcome(request.seq), refused(request.seq)]
            plain = Released(seq=request.seq, incarnation=ME)
            story.hear(answers[int(value) % 2] if isinstance(request, Hello) else plain)
        elif step == "stranger" and value:
            story.hear(pong(1, OTHER))
        elif step == "unreachable":
            story.peer.unreachable(story.now)
        elif step == "unsendable" and sent:
            story.peer.unsendable(sent[int(value) % len(sent)].seq)
        take()
        # Events given at once may end a call before it is seen to wait; nothing else leaves it without a deadline.
        assert not open_calls or story.peer.next_deadline() is not None
    story.until(story.now + 30.0)
    take()
    assert not open_calls
