"""The consumer's record of one load: one request's pull, from admission to its single report.

::

    ACQUIRING --granted--> GRANTED --dispatched--> PULLING --read--> COMMITTING --committed--> DONE
        |                     |                       |                  |
        +---------------------+----- failed(cause) ---+------------------+--> FAILED
        +---------------------+----- aborted ---------+------------------+--> ABORTED

Both halves of a consumer follow this table. The scheduler half sees a load from ``ACQUIRING`` on and learns of the last
stretch from the worker half's report (so it goes from ``PULLING`` to ``DONE`` by ``committed``); the worker half starts
at ``GRANTED``. Terminal loads leave the table they are kept in: forgetting one is one ``del``.
"""

from __future__ import annotations

import enum
from typing import Final


class FailureCause(enum.Enum):
    """The first reason why a load could not be completed; each is one label of the failure counter."""

    BAD_HANDOFF = "bad_handoff"
    NO_PROOF = "no_proof"
    WRONG_ROLE = "wrong_role"
    ACQUIRE_TIMEOUT = "acquire_timeout"
    COMMIT_TIMEOUT = "commit_timeout"
    HANDSHAKE_TIMEOUT = "handshake_timeout"
    LOAD_TIMEOUT = "load_timeout"
    INCOMPATIBLE = "incompatible"
    PEER_DEAD = "peer_dead"
    PEER_RESTARTED = "peer_restarted"
    PEER_CONFUSED = "peer_confused"
    TOO_MANY_PEERS = "too_many_peers"
    TRANSFER = "transfer"
    CHECKSUM = "checksum"
    ABORTED = "aborted"
    RESET = "reset"
    SHUTDOWN = "shutdown"
    INTERNAL = "internal"
    GONE_RELEASED = "gone_released"
    GONE_COMMITTED = "gone_committed"
    GONE_EXPIRED = "gone_expired"
    GONE_UNKNOWN = "gone_unknown"
    GONE_REVOKED = "gone_revoked"
    GONE_BAD_TOKEN = "gone_bad_token"  # noqa: S105 - the name of a refusal, not a secret
    GONE_MISMATCH = "gone_mismatch"


class LoadState(enum.Enum):
    """Where a load stands; the last three are terminal."""

    ACQUIRING = "acquiring"
    GRANTED = "granted"
    PULLING = "pulling"
    COMMITTING = "committing"
    DONE = "done"
    FAILED = "failed"
    ABORTED = "aborted"

    @property
    def is_terminal(self) -> bool:
        """Whether nothing more can happen to the load."""
        return self in _TERMINAL


class LoadEvent(enum.Enum):
    """What can happen to a load."""

    GRANT = "grant"
    DISPATCH = "dispatch"
    READ = "read"
    COMMIT = "commit"
    FAIL = "fail"
    ABORT = "abort"


_TERMINAL: Final = frozenset({LoadState.DONE, LoadState.FAILED, LoadState.ABORTED})

_ENDINGS: Final = {LoadEvent.FAIL: LoadState.FAILED, LoadEvent.ABORT: LoadState.ABORTED}

TRANSITIONS: Final[dict[LoadState, dict[LoadEvent, LoadState]]] = {
    LoadState.ACQUIRING: {LoadEvent.GRANT: LoadState.GRANTED, **_ENDINGS},
    LoadState.GRANTED: {LoadEvent.DISPATCH: LoadState.PULLING, **_ENDINGS},
    LoadState.PULLING: {LoadEvent.READ: LoadState.COMMITTING, LoadEvent.COMMIT: LoadState.DONE, **_ENDINGS},
    LoadState.COMMITTING: {LoadEvent.COMMIT: LoadState.DONE, **_ENDINGS},
    LoadState.DONE: {},
    LoadState.FAILED: {},
    LoadState.ABORTED: {},
}


class IllegalTransition(Exception):  # noqa: N818 - named for what happened, like the events
    """An event that the table does not list for the load's state: a bug of ours. The state is unchanged."""


def next_state(state: LoadState, event: LoadEvent) -> LoadState:
    """The state after ``event``.

    Raises:
        IllegalTransition: the table does not list ``event`` for ``state``.
    """
    try:
        return TRANSITIONS[state][event]
    except KeyError:
        raise IllegalTransition(f"a load that is {state.value} cannot {event.value}") from None
