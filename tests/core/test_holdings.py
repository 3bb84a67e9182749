"""What is held at a producer and how it is told: against a model of the producer's list, whatever gets lost."""

from __future__ import annotations

from itertools import count

from hypothesis import given, settings
from hypothesis import strategies as st

from kvlease.core.holdings import Holdings, Renewal
from kvlease.core.ids import LeaseId, LeaseToken, ReaderId
from kvlease.core.messages import ID_CHARS_MAX, RENEW_LIST_MAX, REQUEST_BYTES_MAX, Renew, encode

TOKEN = LeaseToken(b"k" * 16)


def hold(holdings: Holdings, *names: str, confirm: bool = True) -> None:
    for name in names:
        holdings.add(LeaseId(f"lease-{name}"), TOKEN, ReaderId(name))
        if confirm:
            holdings.confirm(ReaderId(name))


def names(renewal: Renewal) -> list[str]:
    return [holding.reader for holding in renewal.added]


def wire_bytes(renewal: Renewal) -> int:
    return len(encode(Renew(seq=1, to=b"t" * 16, channel="c" * 32, **renewal._asdict())))


def test_the_first_list_is_full_and_later_ones_tell_only_what_changed() -> None:
    holdings = Holdings()
    hold(holdings, "a", "b")
    first = holdings.renewal()
    assert (first.base, first.full, names(first)) == (0, True, ["a", "b"])
    assert not holdings.renewed()
    unchanged = holdings.renewal()
    assert (unchanged.base, unchanged.full, unchanged.added, unchanged.removed) == (first.generation, False, [], [])
    holdings.renewed()
    hold(holdings, "c")
    holdings.remove(ReaderId("a"))
    changed = holdings.renewal()
    assert changed.base == unchanged.generation
    assert changed.generation > changed.base
    assert names(changed) == ["c"]
    assert changed.removed == ["a"]
    assert len(holdings) == 2
    assert ReaderId("a") not in holdings
    assert list(holdings) == ["b", "c"]
    assert "Holdings 2" in repr(holdings)


def test_a_list_that_was_not_acknowledged_is_offered_again_as_it_was() -> None:
    holdings = Holdings()
    hold(holdings, "a")
    holdings.renewal()
    holdings.renewed()
    hold(holdings, "b")
    lost = holdings.renewal()
    hold(holdings, "c")
    holdings.remove(ReaderId("b"))
    assert not holdings.send_once
    assert holdings.renewal() == lost
    holdings.renewed()
    rest = holdings.renewal()
    assert (names(rest), rest.removed) == (["c"], ["b"])


def test_a_full_list_that_was_not_acknowledged_is_made_anew() -> None:
    holdings = Holdings()
    hold(holdings, "a")
    lost = holdings.renewal()
    assert holdings.send_once
    hold(holdings, "b", confirm=False)
    again = holdings.renewal()
    assert again.full
    assert again.generation > lost.generation
    assert names(again) == ["a", "b"]


def test_a_resend_begins_again_with_everything_and_still_says_what_is_out() -> None:
    holdings = Holdings()
    hold(holdings, "a", "b")
    holdings.renewal()
    holdings.renewed()
    holdings.remove(ReaderId("a"))
    holdings.renewal()
    holdings.resend()
    full = holdings.renewal()
    assert (full.base, full.full, names(full), full.removed) == (0, True, ["b"], ["a"])


def test_an_acknowledgement_after_a_resend_acknowledges_nothing() -> None:
    holdings = Holdings()
    hold(holdings, "a")
    holdings.renewal()
    holdings.resend()
    assert not holdings.renewed()
    assert holdings.renewal().full


def test_an_unanswered_acquire_is_named_by_full_lists_only() -> None:
    holdings = Holdings()
    hold(holdings, "a", confirm=False)
    assert names(holdings.renewal()) == ["a"]
    holdings.renewed()
    hold(holdings, "b", confirm=False)
    assert names(holdings.renewal()) == []
    holdings.renewed()
    holdings.confirm(ReaderId("b"))
    holdings.confirm(ReaderId("a"))
    holdings.confirm(ReaderId("nobody"))
    assert names(holdings.renewal()) == ["b"], "one that was listed needs no second time"


def test_a_refused_acquire_is_dropped_without_a_word_unless_a_list_named_it() -> None:
    holdings = Holdings()
    hold(holdings, "a", confirm=False)
    holdings.renewal()
    holdings.renewed()
    hold(holdings, "b", confirm=False)
    holdings.drop(ReaderId("a"))
    holdings.drop(ReaderId("b"))
    holdings.drop(ReaderId("nobody"))
    assert len(holdings) == 0
    assert holdings.renewal().removed == ["a"]


def test_removing_what_is_not_held_changes_nothing() -> None:
    holdings = Holdings()
    holdings.renewal()
    holdings.renewed()
    holdings.remove(ReaderId("nobody"))
    assert holdings.renewal().removed == []


def test_a_name_that_is_used_again_is_not_removed_by_its_past() -> None:
    holdings = Holdings()
    hold(holdings, "a")
    holdings.renewal()
    holdings.renewed()
    holdings.remove(ReaderId("a"))
    hold(holdings, "a")
    renewal = holdings.renewal()
    assert (names(renewal), renewal.removed) == (["a"], [])


def test_a_long_list_comes_in_parts_and_says_when_there_is_more() -> None:
    holdings = Holdings()
    everybody = [f"r{i:05}" for i in range(2 * RENEW_LIST_MAX + 10)]
    hold(holdings, *everybody)
    parts = [holdings.renewal()]
    while holdings.renewed():
        assert holdings.send_once
        parts.append(holdings.renewal())
    assert [part.full for part in parts] == [True] + [False] * (len(parts) - 1)
    assert [part.more for part in parts] == [True] * (len(parts) - 1) + [False]
    assert [part.base for part in parts[1:]] == [part.generation for part in parts[:-1]]
    assert [name for part in parts for name in names(part)] == everybody
    assert all(len(part.added) <= RENEW_LIST_MAX for part in parts)
    assert not holdings.send_once


def test_a_reader_that_comes_while_a_long_list_is_told_belongs_to_it() -> None:
    holdings = Holdings()
    hold(holdings, *(f"r{i}" for i in range(RENEW_LIST_MAX + 1)))
    assert holdings.renewal().more
    hold(holdings, "late", confirm=False)
    assert holdings.renewed()
    assert "late" in names(holdings.renewal())


def test_a_lost_part_begins_the_whole_list_again() -> None:
    holdings = Holdings()
    hold(holdings, *(f"r{i}" for i in range(RENEW_LIST_MAX + 1)))
    holdings.renewal()
    holdings.renewed()
    holdings.renewal()
    again = holdings.renewal()
    assert again.full
    assert names(again)[0] == "r0"
    assert again.more


def test_a_list_fits_into_one_message_even_with_the_longest_names() -> None:
    holdings = Holdings()
    for i in range(RENEW_LIST_MAX):
        name = f"{i:04}" + "\N{SMILING FACE WITH SMILING EYES}" * (ID_CHARS_MAX - 4)
        holdings.add(LeaseId(name), TOKEN, ReaderId(name))
    renewal = holdings.renewal()
    assert renewal.more
    assert wire_bytes(renewal) < REQUEST_BYTES_MAX
    holdings.renewed()
    for reader in list(holdings):
        holdings.remove(reader)
    renewal = holdings.renewal()
    assert renewal.removed
    assert wire_bytes(renewal) < REQUEST_BYTES_MAX


def test_removals_come_in_parts_too_and_too_many_are_cheaper_as_a_full_list() -> None:
    holdings = Holdings()
    everybody = [f"r{i}" for i in range(2 * RENEW_LIST_MAX + 2)]
    hold(holdings, "stays", *everybody)
    holdings.renewal()
    while holdings.renewed():
        holdings.renewal()
    for name in everybody[: RENEW_LIST_MAX + 1]:
        holdings.remove(ReaderId(name))
    first = holdings.renewal()
    assert (first.more, first.full) == (True, False)
    assert holdings.renewed()
    assert len(holdings.renewal().removed) == RENEW_LIST_MAX + 1 - len(first.removed)
    holdings.renewed()
    for name in everybody[RENEW_LIST_MAX + 1 :]:
        holdings.remove(ReaderId(name))
    hold(holdings, *(f"q{i}" for i in range(RENEW_LIST_MAX)))
    for i in range(RENEW_LIST_MAX):
        holdings.remove(ReaderId(f"q{i}"))
    assert holdings.renewal().full
    assert names(holdings.renewal()) == ["stays"]


def test_generations_of_successive_holdings_of_one_peer_never_go_back() -> None:
    generations = count(1)
    first = Holdings(generations).renewal()
    assert Holdings(generations).renewal().generation > first.generation


class Producer:
    """The producer's list, as its lease table keeps it; ``acquire`` puts a reader in, nothing else does."""

    def __init__(self) -> None:
        self.generation = 0
        self.held: set[str] = set()
        self.stale: set[str] = set()

    def renew(self, renewal: Renewal) -> bool:
        """False: resend."""
        if renewal.generation == self.generation:
            return True
        if renewal.generation < self.generation or not (renewal.full or renewal.base == self.generation):
            return False
        if renewal.full:
            self.stale = set(self.held)
        self.held -= set(renewal.removed)
        self.stale -= {holding.reader for holding in renewal.added}
        if not renewal.more:
            self.held -= self.stale
            self.stale = set()
        self.generation = renewal.generation
        return True


STEP = st.one_of(
    st.tuples(st.just("acquire"), st.booleans()),
    st.tuples(st.just("let go"), st.integers(0, 99)),
    st.tuples(st.just("refuse"), st.integers(0, 99)),
    st.tuples(st.just("beat"), st.sampled_from(["fine", "fine", "request lost", "reply lost"])),
    st.tuples(st.just("restart of the list"), st.just(0)),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(STEP, max_size=60))
def test_whatever_is_lost_the_producers_list_becomes_the_consumers(script: list[tuple[str, object]]) -> None:
    holdings, producer, numbers = Holdings(), Producer(), count()

    def beat(fate: str) -> None:
        offered = holdings.renewal()
        known = fate != "request lost" and producer.renew(offered)
        if fate == "fine":
            if known:
                holdings.renewed()
            else:
                holdings.resend()
        elif holdings.send_once:
            holdings.resend()

    for step, value in script:
        if step == "acquire":
            name = f"r{next(numbers)}"
            hold(holdings, name, confirm=False)
            producer.held.add(name)
            if value:
                holdings.confirm(ReaderId(name))
        elif step == "let go" and len(holdings):
            # Its Release, and its commit, are lost here: only the list tells.
            holdings.remove(list(holdings)[int(str(value)) % len(holdings)])
        elif step == "refuse" and len(holdings):
            refused = list(holdings)[int(str(value)) % len(holdings)]
            holdings.drop(refused)
            producer.held.discard(refused)
        elif step == "beat":
            beat(str(value))
        elif step == "restart of the list":
            producer.generation = 0
        assert set(holdings) <= producer.held, "nobody who is held is ever put out"
    for _ in range(3):
        beat("fine")
    assert set(holdings) == producer.held
