"""The producer's lease table, one story per rule: messages and ticks of a clock in, answers and ended leases out."""

from __future__ import annotations

import time
from typing import Any

import pytest

from kvlease.core.ids import ChannelId, Incarnation, LeaseId, LeaseToken
from kvlease.core.lease import READERS_MAX, TRANSITIONS, LeaseEvent, next_state
from kvlease.core.leases import Ended, Grant, LeaseState, LeaseTable, LeaseTiming
from kvlease.core.loads import IllegalTransition
from kvlease.core.messages import (
    RENEW_LIST_MAX,
    Acquire,
    Checksum,
    Commit,
    Committed,
    Gone,
    GoneReason,
    Granted,
    Holding,
    ProtocolError,
    Release,
    Released,
    Renew,
    Renewed,
    Reply,
    Resend,
)
from kvlease.core.readers import Channel

US = Incarnation(b"producer-life-01")
TOKEN = LeaseToken(b"token-of-lease-1")
WRONG = LeaseToken(b"token-of-nobody!")
DIGEST = b"digest of the prompt"
TIMING = LeaseTiming(
    lease_duration_s=30.0,
    lease_extension_s=10.0,
    max_lease_lifetime_s=600.0,
    sibling_grace_s=0.25,
    tombstone_ttl_s=600.0,
    tombstone_max=100,
)


class Story:
    """A lease table, a clock, and short names for what consumers send. Every message is checked for its envelope."""

    def __init__(self, **timing: Any) -> None:
        values = {name: getattr(TIMING, name) for name in TIMING.__dataclass_fields__} | timing
        self.table = LeaseTable(US, LeaseTiming(**values))
        self.now = 1000.0
        self.seq = 0

    def grant(self, lease: str = "L", token: LeaseToken = TOKEN) -> None:
        self.table.grant(Grant(LeaseId(lease), token, DIGEST, 48, [[(3, 3)]]), self.now)

    def after(self, seconds: float) -> list[tuple[str, GoneReason]]:
        self.now += seconds
        self.table.expire(self.now)
        return self.ended()

    def ended(self) -> list[tuple[str, GoneReason]]:
        return [(ended.lease, ended.why) for ended in self.table.take_ended()]

    def ask(self, kind: Any, to: Incarnation = US, **fields: Any) -> Reply:
        self.seq += 1
        reply = self.table.handle(kind(seq=self.seq, to=to, **fields), self.now)
        assert (reply.seq, reply.incarnation) == (self.seq, US)
        return reply

    def acquire(self, reader: str = "c/1", lease: str = "L", channel: str = "c", **fields: Any) -> Reply:
        fields = {"token": TOKEN, "digest": DIGEST} | fields
        return self.ask(Acquire, lease=lease, reader=reader, channel=channel, **fields)

    def commit(self, reader: str = "c/1", lease: str = "L", rank: int = 0, of: int = 1, **fields: Any) -> Reply:
        return self.ask(Commit, lease=lease, reader=reader, rank=rank, of_ranks=of, **({"token": TOKEN} | fields))

    def release(self, reader: str | None = "c/1", lease: str = "L", **fields: Any) -> Reply:
        return self.ask(Release, lease=lease, reader=reader, **({"token": TOKEN} | fields))

    def renew(self, base: int = 0, generation: int = 0, channel: str = "c", added: Any = (), **fields: Any) -> Reply:
        holdings = [Holding(lease=lease, token=token, reader=reader) for lease, token, reader in added]
        return self.ask(Renew, channel=channel, base=base, generation=generation, added=holdings, **fields)


def gone(reply: Reply) -> GoneReason:
    assert isinstance(reply, Gone)
    return reply.why


def lost(reply: Reply) -> dict[str, GoneReason]:
    assert isinstance(reply, Renewed)
    return {holding.reader: holding.why for holding in reply.gone}


@pytest.fixture
def story() -> Story:
    story = Story()
    story.grant()
    return story


# One reader, from grant to end.


def test_a_lease_is_granted_read_committed_and_over_after_the_grace(story: Story) -> None:
    assert story.table.state_of(LeaseId("L")) is LeaseState.GRANTED
    reply = story.acquire()
    assert isinstance(reply, Granted)
    assert (reply.ttl_s, reply.num_tokens, reply.blocks) == (10.0, 48, [[(3, 3)]])
    assert story.table.state_of(LeaseId("L")) is LeaseState.ACTIVE
    assert isinstance(story.commit(), Committed)
    assert story.table.state_of(LeaseId("L")) is LeaseState.LINGERING
    assert story.after(0.2) == []
    assert story.after(0.05) == [("L", GoneReason.COMMITTED)]
    assert story.table.state_of(LeaseId("L")) is None
    assert len(story.table) == 0


def test_without_a_grace_the_last_commit_ends_the_lease_at_once() -> None:
    story = Story(sibling_grace_s=0.0)
    story.grant()
    story.acquire()
    assert isinstance(story.commit(), Committed)
    assert story.ended() == [("L", GoneReason.COMMITTED)]


def test_an_ended_lease_says_how_old_it_became(story: Story) -> None:
    story.now += 3
    story.release()
    assert story.table.take_ended() == [Ended(LeaseId("L"), GoneReason.RELEASED, 3.0)]
    assert story.table.take_ended() == []


def test_a_name_that_is_live_cannot_be_granted_again(story: Story) -> None:
    story.acquire()
    with pytest.raises(ValueError, match="live already"):
        story.grant()
    assert isinstance(story.commit(), Committed)


def test_a_name_whose_lease_has_ended_can_be_granted_again_with_another_token(story: Story) -> None:
    story.release()
    other = LeaseToken(b"token-of-lease-2")
    story.grant(token=other)
    assert gone(story.acquire()) is GoneReason.BAD_TOKEN
    assert isinstance(story.acquire(token=other), Granted)
    assert story.after(30) == [("L", GoneReason.RELEASED), ("L", GoneReason.EXPIRED)]


# Who may claim it.


def test_another_incarnation_is_never_answered_for(story: Story) -> None:
    elsewhere = Incarnation(b"producer-life-00")
    assert gone(story.acquire(to=elsewhere)) is GoneReason.UNKNOWN
    assert gone(story.renew(to=elsewhere)) is GoneReason.UNKNOWN
    assert gone(story.release(to=elsewhere)) is GoneReason.UNKNOWN
    assert story.table.state_of(LeaseId("L")) is LeaseState.GRANTED


def test_a_wrong_token_gets_nothing_and_ends_nothing(story: Story) -> None:
    assert gone(story.acquire(token=WRONG)) is GoneReason.BAD_TOKEN
    story.acquire()
    assert gone(story.commit(token=WRONG)) is GoneReason.BAD_TOKEN
    assert gone(story.release(token=WRONG)) is GoneReason.BAD_TOKEN
    assert gone(story.release(None, token=WRONG)) is GoneReason.BAD_TOKEN
    assert story.ended() == []
    assert isinstance(story.commit(), Committed)


def test_a_wrong_token_learns_nothing_of_an_ended_lease_either(story: Story) -> None:
    story.acquire()
    story.commit()
    story.after(1)
    assert gone(story.acquire(token=WRONG)) is GoneReason.BAD_TOKEN
    assert gone(story.commit(token=WRONG)) is GoneReason.BAD_TOKEN
    assert gone(story.release(token=WRONG)) is GoneReason.BAD_TOKEN


def test_another_prompt_is_refused_and_the_right_one_is_still_served(story: Story) -> None:
    assert gone(story.acquire(digest=b"another prompt")) is GoneReason.MISMATCH
    assert gone(story.commit()) is GoneReason.UNKNOWN
    assert story.table.state_of(LeaseId("L")) is LeaseState.GRANTED
    assert isinstance(story.acquire("c/2"), Granted)


def test_what_was_claimed_for_another_prompt_is_not_let_go_by_that_request(story: Story) -> None:
    story.acquire("c/mistaken", digest=b"another prompt")
    assert isinstance(story.release("c/clean-up"), Released)
    assert gone(story.acquire("c/clean-up")) is GoneReason.RELEASED
    assert isinstance(story.acquire("c/right"), Granted)
    story.release("c/right")
    assert story.table.state_of(LeaseId("L")) is None


def test_what_was_claimed_for_another_prompt_ends_by_its_deadline(story: Story) -> None:
    story.acquire("c/mistaken", digest=b"another prompt")
    story.release("c/mistaken")
    assert story.after(29.9) == []
    assert story.after(0.1) == [("L", GoneReason.EXPIRED)]


def test_unknown_leases_are_unknown_and_may_be_released(story: Story) -> None:
    assert gone(story.acquire(lease="X")) is GoneReason.UNKNOWN
    assert gone(story.commit(lease="X")) is GoneReason.UNKNOWN
    assert isinstance(story.release(lease="X"), Released)


def test_only_a_reader_that_acquired_can_commit(story: Story) -> None:
    story.acquire("c/1")
    assert gone(story.commit("c/2")) is GoneReason.UNKNOWN
    assert story.ended() == []


def test_what_may_be_read_is_told_to_readers_of_a_live_lease_only(story: Story) -> None:
    def readable(reader: str = "c/1", to: Incarnation = US, token: LeaseToken = TOKEN) -> Grant | GoneReason:
        request = Checksum(seq=1, to=to, lease="L", token=token, reader=reader, rank=0, positions=[])
        found = story.table.readable(request, story.now)
        return found if isinstance(found, Grant) else found.why

    assert readable() is GoneReason.UNKNOWN  # nobody compared its digest
    story.acquire()
    story.acquire(reader="c/2")
    assert readable() == Grant(LeaseId("L"), TOKEN, DIGEST, 48, [[(3, 3)]])
    assert readable(token=WRONG) is GoneReason.BAD_TOKEN
    assert readable(to=Incarnation(b"producer-life-02")) is GoneReason.UNKNOWN
    story.commit()
    assert readable() is GoneReason.COMMITTED
    story.table.revoke_all(story.now)
    assert readable("c/2") is GoneReason.REVOKED


def test_a_lease_has_a_bounded_number_of_readers(story: Story) -> None:
    for number in range(READERS_MAX):
        story.acquire(f"c/{number}")
    with pytest.raises(ProtocolError, match="at most") as error:
        story.acquire("c/one-more")
    assert error.value.reason == "too_many_readers"
    with pytest.raises(ProtocolError, match="at most"):
        story.release("c/one-more")
    assert isinstance(story.acquire("c/0"), Granted)


# Repeated, late and overtaking messages.


def test_every_message_may_come_twice(story: Story) -> None:
    assert isinstance(story.acquire(), Granted)
    assert isinstance(story.acquire(), Granted)
    assert isinstance(story.commit(), Committed)
    assert isinstance(story.commit(), Committed)
    assert story.after(1) == [("L", GoneReason.COMMITTED)]
    assert isinstance(story.commit(), Committed)
    assert isinstance(story.release(), Released)
    assert isinstance(story.release(), Released)
    assert story.table.counters["acquired"] == story.table.counters["committed"] == 1
    assert story.table.counters["released"] == 0


def test_a_reader_that_committed_or_released_never_reads_again(story: Story) -> None:
    story.acquire("c/stays")
    story.acquire("c/1")
    story.commit("c/1")
    assert gone(story.acquire("c/1")) is GoneReason.COMMITTED
    story.acquire("c/2")
    story.release("c/2")
    story.release("c/2")
    assert gone(story.acquire("c/2")) is GoneReason.RELEASED
    assert gone(story.commit("c/2")) is GoneReason.RELEASED
    assert isinstance(story.release("c/1"), Released)
    assert isinstance(story.commit("c/1"), Committed)


def test_a_release_that_overtook_its_acquire_counts(story: Story) -> None:
    story.acquire("c/stays")
    story.release("c/2")
    assert gone(story.acquire("c/2")) is GoneReason.RELEASED
    assert story.ended() == []


def test_a_release_before_anybody_acquired_ends_the_lease_and_the_late_acquire_is_told(story: Story) -> None:
    assert isinstance(story.release(), Released)
    assert story.ended() == [("L", GoneReason.RELEASED)]
    story.now += 2
    reply = story.acquire()
    assert gone(reply) is GoneReason.RELEASED
    assert isinstance(reply, Gone)
    assert reply.age_s == 2.0


def test_a_release_without_a_reader_ends_only_what_nobody_acquired(story: Story) -> None:
    story.acquire()
    assert isinstance(story.release(None), Released)
    assert story.ended() == []
    story.grant("M")
    assert isinstance(story.release(None, lease="M"), Released)
    assert story.ended() == [("M", GoneReason.RELEASED)]


# Siblings.


def test_a_late_sibling_joins_during_the_grace(story: Story) -> None:
    story.acquire("c/1")
    story.commit("c/1")
    story.after(0.2)
    assert isinstance(story.acquire("c/2"), Granted)
    assert story.after(5) == []
    assert isinstance(story.commit("c/2"), Committed)
    assert story.after(0.25) == [("L", GoneReason.COMMITTED)]
    assert gone(story.acquire("c/3")) is GoneReason.COMMITTED


def test_the_last_reader_that_leaves_after_the_grace_ends_the_lease_at_once(story: Story) -> None:
    story.acquire("c/1")
    story.acquire("c/2")
    story.commit("c/1")
    story.now += 1
    story.release("c/2")
    assert story.ended() == [("L", GoneReason.COMMITTED)]


def test_the_last_reader_that_leaves_during_the_grace_leaves_the_rest_of_it(story: Story) -> None:
    story.acquire("c/1")
    story.acquire("c/2")
    story.commit("c/1")
    story.now += 0.2
    story.release("c/2")
    story.release("c/3")
    assert story.ended() == []
    assert story.after(0.05) == [("L", GoneReason.COMMITTED)]


def test_readers_that_only_release_leave_no_grace(story: Story) -> None:
    story.acquire("c/1")
    story.acquire("c/2")
    story.release("c/1")
    assert story.ended() == []
    story.release("c/2")
    assert story.ended() == [("L", GoneReason.RELEASED)]


def test_a_reader_without_siblings_leaves_no_grace(story: Story) -> None:
    story.acquire("c/1", has_siblings=False)
    assert isinstance(story.commit("c/1", rank=0, of=2), Committed)
    assert story.ended() == []
    assert isinstance(story.commit("c/1", rank=1, of=2), Committed)
    assert story.ended() == [("L", GoneReason.COMMITTED)]
    assert isinstance(story.commit("c/1", rank=1, of=2), Committed)
    assert gone(story.acquire("c/2", has_siblings=False)) is GoneReason.COMMITTED


def test_others_still_read_when_a_reader_without_siblings_has_committed(story: Story) -> None:
    story.acquire("c/1", has_siblings=False)
    story.acquire("d/1", channel="d", has_siblings=False)
    story.commit("c/1")
    assert story.after(5) == []
    assert isinstance(story.commit("d/1"), Committed)
    assert story.ended() == [("L", GoneReason.COMMITTED)]


@pytest.mark.parametrize("readers", [("sample", "single"), ("single", "sample")])
def test_one_reader_with_siblings_is_enough_for_the_grace(story: Story, readers: tuple[str, str]) -> None:
    for reader in readers:
        story.acquire(reader, has_siblings=reader == "sample")
    for reader in readers:
        story.commit(reader)
    assert story.ended() == []
    assert story.after(0.25) == [("L", GoneReason.COMMITTED)]


# Several ranks.


def test_a_reader_has_committed_when_all_its_ranks_have(story: Story) -> None:
    story.acquire()
    assert isinstance(story.commit(rank=1, of=2), Committed)
    assert isinstance(story.commit(rank=1, of=2), Committed)
    assert story.table.state_of(LeaseId("L")) is LeaseState.ACTIVE
    assert isinstance(story.commit(rank=0, of=2), Committed)
    assert story.after(0.25) == [("L", GoneReason.COMMITTED)]
    assert isinstance(story.commit(rank=0, of=2), Committed)
    assert isinstance(story.commit(rank=1, of=2), Committed)
    assert gone(story.commit(rank=2, of=3)) is GoneReason.COMMITTED


def test_a_rank_that_was_late_hears_gone_and_the_other_keeps_its_answer(story: Story) -> None:
    story.acquire()
    story.commit(rank=0, of=2)
    assert story.after(10) == [("L", GoneReason.EXPIRED)]
    assert gone(story.commit(rank=1, of=2)) is GoneReason.EXPIRED
    assert isinstance(story.commit(rank=0, of=2), Committed)


def test_ranks_that_contradict_each_other_are_refused_in_words(story: Story) -> None:
    story.acquire()
    for rank, of in ((1, 1), (7, 2)):
        with pytest.raises(ProtocolError, match="rank") as error:
            story.commit(rank=rank, of=of)
        assert error.value.reason == "bad_rank"
    story.commit(rank=0, of=2)
    with pytest.raises(ProtocolError, match="another rank said of 2"):
        story.commit(rank=1, of=3)
    assert isinstance(story.commit(rank=1, of=2), Committed)


# Time.


def test_a_lease_that_nobody_claims_ends_after_its_duration(story: Story) -> None:
    assert story.table.next_deadline() == 1030.0
    assert story.after(29.9) == []
    assert story.after(0.1) == [("L", GoneReason.EXPIRED)]
    assert gone(story.commit()) is GoneReason.EXPIRED
    assert gone(story.acquire()) is GoneReason.EXPIRED


def test_a_reader_keeps_it_for_one_extension_from_its_acquire(story: Story) -> None:
    story.after(29)
    story.acquire()
    assert story.table.next_deadline() == 1039.0
    assert story.after(9.9) == []
    assert story.after(0.1) == [("L", GoneReason.EXPIRED)]


def test_a_deadline_that_passed_unnoticed_ends_nothing(story: Story) -> None:
    story.acquire()
    story.now += 11  # the renewal lay in the inbox when the producer woke up late
    assert isinstance(story.renew(), Renewed)
    assert story.after(9) == []
    assert isinstance(story.commit(), Committed)


def test_nothing_outlives_its_lifetime_however_often_it_is_renewed(story: Story) -> None:
    story.acquire()
    for _ in range(66):
        assert story.after(9) == []
        assert lost(story.renew()) == {}
    reply = story.acquire()
    assert isinstance(reply, Granted)
    assert reply.ttl_s == 6.0
    assert story.table.next_deadline() == 1600.0
    story.now += 7
    reply = story.acquire()
    assert isinstance(reply, Granted)
    assert reply.ttl_s == 0.0
    assert story.after(0) == [("L", GoneReason.EXPIRED)]
    assert lost(story.renew()) == {"c/1": GoneReason.EXPIRED}


def test_a_lifetime_that_ends_within_the_grace_is_over() -> None:
    story = Story(max_lease_lifetime_s=30.0)
    story.grant()
    story.now += 20
    story.acquire()
    story.now += 9.9
    story.commit()
    assert story.after(0.1) == [("L", GoneReason.EXPIRED)]


def test_revoking_ends_everything_and_says_so(story: Story) -> None:
    story.grant("M")
    story.acquire()
    story.table.revoke_all(story.now)
    assert story.ended() == [("L", GoneReason.REVOKED), ("M", GoneReason.REVOKED)]
    assert gone(story.commit()) is GoneReason.REVOKED
    assert gone(story.acquire(lease="M")) is GoneReason.REVOKED
    assert lost(story.renew()) == {"c/1": GoneReason.REVOKED}


def test_tombstones_are_forgotten_in_time_and_in_number() -> None:
    story = Story(tombstone_max=2, tombstone_ttl_s=5.0)
    for lease in ("A", "B", "C"):
        story.grant(lease)
        story.release(lease=lease)
    assert story.table.num_tombstones == 2
    assert gone(story.acquire(lease="A")) is GoneReason.UNKNOWN
    assert gone(story.acquire(lease="B")) is GoneReason.RELEASED
    assert story.table.next_deadline() == 1005.0
    story.after(5)
    assert story.table.num_tombstones == 0
    assert gone(story.acquire(lease="B")) is GoneReason.UNKNOWN
    assert story.table.next_deadline() is None


# Renewing by channel.


def test_one_renewal_keeps_all_that_the_channel_holds() -> None:
    story = Story()
    for number in range(50):
        story.grant(f"L{number}")
        story.acquire(f"c/{number}", f"L{number}")
    story.grant("other")
    story.acquire("d/1", "other", channel="d")
    story.now += 9
    reply = story.renew()
    assert isinstance(reply, Renewed)
    assert (reply.ttl_s, reply.gone) == (10.0, [])
    assert story.after(1) == [("other", GoneReason.EXPIRED)]
    assert len(story.table) == 50
    assert len(story.after(9)) == 50
    assert story.table.num_channels == 0


def test_a_lease_lives_as_long_as_the_last_of_its_channels(story: Story) -> None:
    story.acquire("c/1", channel="c")
    story.now += 5
    story.acquire("d/1", channel="d")
    assert story.after(5) == []
    assert isinstance(story.commit("c/1"), Committed)  # not renewed, but the lease has never ended
    assert story.after(1) == []
    assert story.after(4) == [("L", GoneReason.EXPIRED)]


def test_a_reader_whose_channel_fell_silent_may_acquire_again(story: Story) -> None:
    story.acquire("c/1", channel="c")
    story.acquire("d/1", channel="d")
    story.now += 5
    story.renew(channel="d")
    assert story.after(5) == []
    assert isinstance(story.acquire("c/1", channel="c"), Granted)
    assert story.after(9) == []
    assert story.table.counters["acquired"] == 2


def test_lists_of_changes_are_followed_and_may_be_repeated(story: Story) -> None:
    story.grant("M")
    story.acquire("c/1")
    story.acquire("c/2", "M")
    added = [("L", TOKEN, "c/1"), ("M", TOKEN, "c/2")]
    assert lost(story.renew(0, 1, added=added)) == {}
    assert lost(story.renew(0, 1, added=added)) == {}
    assert lost(story.renew(1, 2, removed=["c/2", "c/never"])) == {}
    assert story.ended() == [("M", GoneReason.RELEASED)]
    assert lost(story.renew(1, 2, removed=["c/2"])) == {}
    assert lost(story.renew(2, 2)) == {}


def test_a_list_that_does_not_continue_ours_is_asked_for_again_and_renews_nothing(story: Story) -> None:
    story.acquire()
    story.renew(0, 3, full=True, added=[("L", TOKEN, "c/1")])
    story.now += 9
    for base, generation in ((0, 2), (2, 4), (7, 9)):
        assert isinstance(story.renew(base, generation), Resend)
    assert isinstance(story.renew(0, 2, full=True), Resend)  # a late copy of an old list
    assert isinstance(story.renew(7, 9, channel="stranger"), Resend)
    assert story.after(1) == [("L", GoneReason.EXPIRED)]


def test_a_full_list_brings_back_what_lapsed(story: Story) -> None:
    story.acquire("c/1", channel="c")
    story.acquire("d/1", channel="d")
    story.now += 5
    story.renew(channel="d")
    story.after(5)
    assert isinstance(story.renew(4, 5), Resend)
    assert lost(story.renew(0, 6, full=True, added=[("L", TOKEN, "c/1")])) == {}
    assert story.after(9) == []
    assert story.table.state_of(LeaseId("L")) is LeaseState.ACTIVE


def test_a_full_list_puts_out_what_it_no_longer_names(story: Story) -> None:
    story.grant("M")
    story.acquire("c/1")
    story.acquire("c/2", "M")
    story.renew(0, 1, added=[("L", TOKEN, "c/1"), ("M", TOKEN, "c/2")])
    assert lost(story.renew(0, 2, full=True, added=[("M", TOKEN, "c/2")])) == {}
    assert story.ended() == [("L", GoneReason.RELEASED)]
    assert gone(story.commit("c/1")) is GoneReason.RELEASED


def test_a_full_list_in_parts_puts_nothing_out_before_its_last_part(story: Story) -> None:
    story.grant("M")
    story.acquire("c/1")
    story.acquire("c/2", "M")
    story.renew(0, 1, added=[("L", TOKEN, "c/1"), ("M", TOKEN, "c/2")])
    story.renew(0, 2, full=True, more=True, added=[("L", TOKEN, "c/1")])
    story.renew(2, 3, more=True)
    assert story.ended() == []
    story.renew(3, 4, added=[("M", TOKEN, "c/2")])
    assert story.after(9) == []


def test_an_acquire_that_the_full_list_could_not_know_of_is_not_put_out(story: Story) -> None:
    story.renew(0, 1, full=True)
    story.acquire("c/1")
    assert lost(story.renew(0, 2, full=True)) == {}  # made before the consumer heard Granted
    assert story.after(9) == []
    assert lost(story.renew(2, 3, added=[("L", TOKEN, "c/1")])) == {}
    assert story.after(9.5) == []
    assert isinstance(story.commit("c/1"), Committed)


def test_an_acquire_that_is_never_listed_lapses_although_its_channel_lives(story: Story) -> None:
    story.grant("M")
    story.acquire("c/1")
    story.renew(0, 1, full=True)
    story.now += 4
    story.acquire("c/2", "M")
    story.renew(0, 2, full=True)
    assert story.table.next_deadline() == 1010.0
    assert story.after(6) == [("L", GoneReason.EXPIRED)]
    story.renew(2, 2)
    assert story.after(4) == [("M", GoneReason.EXPIRED)]
    assert story.table.num_channels == 1


def test_what_ended_is_named_in_every_renewal_until_it_is_removed(story: Story) -> None:
    story.acquire("c/1")
    story.renew(0, 1, added=[("L", TOKEN, "c/1")])
    story.table.revoke_all(story.now)
    assert lost(story.renew(1, 1)) == {"c/1": GoneReason.REVOKED}
    assert lost(story.renew(1, 1)) == {"c/1": GoneReason.REVOKED}
    assert lost(story.renew(1, 2, removed=["c/1"])) == {}


def test_the_list_of_what_ended_is_bounded() -> None:
    channel = Channel(deadline=0.0)
    for number in range(RENEW_LIST_MAX + 5):
        channel.mark_gone(f"c/{number}", GoneReason.EXPIRED)  # type: ignore[arg-type]
    assert len(channel.gone) == RENEW_LIST_MAX
    assert "c/0" not in channel.gone


def test_listing_says_what_is_gone_and_makes_nobody_a_reader(story: Story) -> None:
    for lease in ("expired", "committed", "half", "open"):
        story.grant(lease)
    story.acquire("c/expired", "expired")
    story.acquire("c/committed", "committed")
    story.commit("c/committed", "committed")
    story.acquire("c/half", "half")
    story.commit("c/half", "half", rank=0, of=2)
    story.now += 9
    story.acquire("d/1", channel="d")
    story.acquire("d/2", channel="d")
    story.release("d/2")
    story.after(1)
    listed = [
        ("expired", TOKEN, "c/expired"),
        ("committed", TOKEN, "c/committed"),
        ("half", TOKEN, "c/half"),
        ("never", TOKEN, "c/never"),
        ("open", WRONG, "c/stranger"),
        ("open", TOKEN, "c/not-acquired"),
        ("L", TOKEN, "d/1"),
        ("L", TOKEN, "d/2"),
    ]
    assert lost(story.renew(0, 1, channel="d", full=True, added=listed)) == {
        "c/expired": GoneReason.EXPIRED,
        "c/half": GoneReason.EXPIRED,
        "c/never": GoneReason.UNKNOWN,
        "c/stranger": GoneReason.BAD_TOKEN,
    }
    assert gone(story.commit("c/not-acquired", "open")) is GoneReason.UNKNOWN
    assert story.table.state_of(LeaseId("open")) is LeaseState.GRANTED


def test_a_stranger_that_holds_nothing_leaves_no_record(story: Story) -> None:
    assert lost(story.renew(0, 1, channel="x", full=True, added=[("L", WRONG, "x/1")])) == {"x/1": GoneReason.BAD_TOKEN}
    assert story.table.num_channels == 0


def test_a_channel_that_holds_nothing_any_more_is_remembered_for_one_extension(story: Story) -> None:
    story.acquire()
    story.renew(0, 1, added=[("L", TOKEN, "c/1")])
    story.release()
    story.grant("M")
    story.acquire("c/2", "M")
    assert lost(story.renew(1, 2, added=[("M", TOKEN, "c/2")])) == {}
    story.release("c/2", "M")
    story.after(10)
    assert story.table.num_channels == 0


def test_a_reader_that_acquires_another_lease_is_out_of_the_first(story: Story) -> None:
    story.acquire("c/1")
    story.grant("M")
    assert isinstance(story.acquire("c/1", "M"), Granted)
    assert story.ended() == [("L", GoneReason.RELEASED)]
    story.renew(0, 1, removed=["c/1"], added=[("M", TOKEN, "c/1")])
    assert story.ended() == []
    assert isinstance(story.commit("c/1", "M"), Committed)


def test_a_reader_that_comes_by_another_channel_is_held_by_that_one(story: Story) -> None:
    story.acquire("c/1", channel="c")
    story.now += 5
    story.acquire("c/1", channel="d")
    story.renew(0, 1, channel="c", removed=["c/1"])
    assert story.after(9) == []
    assert story.after(1) == [("L", GoneReason.EXPIRED)]


# What is seen from outside.


def test_gauges_and_counters(story: Story) -> None:
    assert story.table.oldest_grant(1005.0) == 5.0
    story.acquire()
    story.acquire(digest=b"")
    story.renew()
    story.release()
    assert story.table.oldest_grant(1005.0) == 0.0
    assert story.table.counters == {
        "granted": 1,
        "acquired": 1,
        "refused_mismatch": 1,
        "renewed": 1,
        "released": 1,
        "ended": 1,
    }
    assert repr(story.table) == "<LeaseTable leases=0 channels=1 tombstones=1>"


def test_no_token_is_ever_shown(story: Story) -> None:
    shown = repr(Grant(LeaseId("L"), TOKEN, DIGEST, 1, [])) + repr(story.table) + repr(ChannelId("c"))
    assert "token-of" not in shown


def test_the_table_of_states_raises_at_what_it_does_not_list() -> None:
    assert set(TRANSITIONS) == set(LeaseState)
    with pytest.raises(IllegalTransition, match="released cannot acquire"):
        next_state(LeaseState.RELEASED, LeaseEvent.ACQUIRE)


# What it costs


def test_the_oldest_lease_is_found_at_once_however_many_older_ones_have_ended() -> None:
    def cpu_s(ended: int) -> float:
        """The processor time of a thousand questions, at best, after so many leases of as many more have ended."""
        table = LeaseTable(US, TIMING)
        for index in range(2 * ended):
            table.grant(Grant(LeaseId(f"lease-{index}"), TOKEN, DIGEST, 1, []), 0.0)
        for index in range(ended):
            table.handle(Release(seq=1, to=US, lease=f"lease-{index}", token=TOKEN), 1.0)
        taken = []
        for _ in range(3):
            began = time.thread_time()
            for _ in range(1000):
                table.oldest_grant(1.0)
            taken.append(time.thread_time() - began)
        return min(taken)

    assert cpu_s(40_000) < 50 * cpu_s(10)
