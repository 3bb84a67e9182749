"""The table of a load: what may happen in which state, and nothing else."""

from __future__ import annotations

import itertools

import pytest

from kvlease.core.loads import TRANSITIONS, IllegalTransition, LoadEvent, LoadState, next_state

S, E = LoadState, LoadEvent


def follow(*events: LoadEvent, start: LoadState = S.ACQUIRING) -> LoadState:
    state = start
    for event in events:
        state = next_state(state, event)
    return state


def test_a_worker_sees_every_step_of_a_good_load() -> None:
    assert follow(E.DISPATCH, E.READ, E.COMMIT, start=S.GRANTED) is S.DONE


def test_the_scheduler_half_learns_of_the_last_stretch_from_the_report() -> None:
    assert follow(E.GRANT, E.DISPATCH, E.COMMIT) is S.DONE


@pytest.mark.parametrize("before", [(), (E.GRANT,), (E.GRANT, E.DISPATCH), (E.GRANT, E.DISPATCH, E.READ)])
def test_until_it_is_done_a_load_can_fail_and_be_aborted(before: tuple[LoadEvent, ...]) -> None:
    assert follow(*before, E.FAIL) is S.FAILED
    assert follow(*before, E.ABORT) is S.ABORTED


def test_what_the_table_does_not_list_raises() -> None:
    for state, event in itertools.product(LoadState, LoadEvent):
        if event in TRANSITIONS[state]:
            assert isinstance(next_state(state, event), LoadState)
        else:
            with pytest.raises(IllegalTransition, match=f"{state.value} cannot {event.value}"):
                next_state(state, event)


def test_a_terminal_state_is_one_in_which_nothing_can_happen() -> None:
    assert {state for state in LoadState if state.is_terminal} == {s for s in LoadState if not TRANSITIONS[s]}


def test_nothing_is_read_before_a_grant_and_nothing_committed_before_it_is_ordered() -> None:
    for event in (E.DISPATCH, E.READ, E.COMMIT):
        assert event not in TRANSITIONS[S.ACQUIRING]
    assert E.COMMIT not in TRANSITIONS[S.GRANTED]
