"""One lease: its states, its record, and the three things that are said about one.

::

              grant
                |
                v     acquire              quiet: the last reader left, a sibling's grace is not over
             GRANTED ---------> ACTIVE ---------> LINGERING
                |               |  ^                |  |
                |               |  +---- acquire ---+  |
                +---------------+----------------------+----> RELEASED   all readers are out (and the grace is over)
                +---------------+----------------------+----> EXPIRED    nobody renewed it in time, or it is too old
                +---------------+----------------------+----> REVOKED    the producer takes it back

Transitions that the table below does not list raise and change nothing.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Final

from kvlease.core.ids import LeaseId, LeaseToken, ReaderId
from kvlease.core.loads import IllegalTransition
from kvlease.core.messages import BlockRuns, GoneReason, ProtocolError
from kvlease.core.readers import Reader, ReaderState

READERS_MAX: Final = 4096
"""How many readers one lease may have had."""


@dataclass(frozen=True)
class LeaseTiming:
    """The producer's intervals and bounds; see the settings of the same names."""

    lease_duration_s: float
    lease_extension_s: float
    max_lease_lifetime_s: float
    sibling_grace_s: float
    tombstone_ttl_s: float
    tombstone_max: int


@dataclass(frozen=True)
class Grant:
    """What is lent: the blocks, one list of runs for each KV group, and the digest of the prompt they belong to.

    ``is_settled``: the engine writes to none of the blocks any more, not even behind the prompt's last token.
    """

    lease: LeaseId
    token: LeaseToken = field(repr=False)
    digest: bytes
    num_tokens: int
    blocks: list[BlockRuns]
    is_settled: bool = True


@dataclass(frozen=True)
class Ended:
    """A lease that is over, so that its blocks may be freed. ``age_s``: how long ago it was granted."""

    lease: LeaseId
    why: GoneReason
    age_s: float


class LeaseState(enum.Enum):
    """Where a lease stands; the last three are terminal, and such a lease is in the table no more."""

    GRANTED = "granted"
    ACTIVE = "active"
    LINGERING = "lingering"
    RELEASED = "released"
    EXPIRED = "expired"
    REVOKED = "revoked"


class LeaseEvent(enum.Enum):
    """What can happen to a lease."""

    ACQUIRE = "acquire"
    QUIET = "quiet"
    RELEASE = "release"
    EXPIRE = "expire"
    REVOKE = "revoke"


_ENDINGS: Final = {
    LeaseEvent.RELEASE: LeaseState.RELEASED,
    LeaseEvent.EXPIRE: LeaseState.EXPIRED,
    LeaseEvent.REVOKE: LeaseState.REVOKED,
}

TRANSITIONS: Final[dict[LeaseState, dict[LeaseEvent, LeaseState]]] = {
    LeaseState.GRANTED: {LeaseEvent.ACQUIRE: LeaseState.ACTIVE, **_ENDINGS},
    LeaseState.ACTIVE: {LeaseEvent.ACQUIRE: LeaseState.ACTIVE, LeaseEvent.QUIET: LeaseState.LINGERING, **_ENDINGS},
    LeaseState.LINGERING: {LeaseEvent.ACQUIRE: LeaseState.ACTIVE, LeaseEvent.QUIET: LeaseState.LINGERING, **_ENDINGS},
    LeaseState.RELEASED: {},
    LeaseState.EXPIRED: {},
    LeaseState.REVOKED: {},
}


def next_state(state: LeaseState, event: LeaseEvent) -> LeaseState:
    """The state after ``event``.

    Raises:
        IllegalTransition: the table does not list ``event`` for ``state``: a bug of ours.
    """
    try:
        return TRANSITIONS[state][event]
    except KeyError:
        raise IllegalTransition(f"a lease that is {state.value} cannot {event.value}") from None


@dataclass(slots=True)
class Lease:
    """One live lease.

    ``reading`` counts its ``READING`` readers; ``has_siblings``: one of its readers is one of several samples;
    ``committed_at`` is when the last rank of a reader last committed; ``is_mistaken``: it was claimed for another
    prompt, so whoever shows its token need not be whom it is for.
    """

    grant: Grant
    granted_at: float
    state: LeaseState = LeaseState.GRANTED
    readers: dict[ReaderId, Reader] = field(default_factory=dict)
    reading: int = 0
    has_siblings: bool = False
    committed_at: float | None = None
    is_mistaken: bool = False

    @property
    def token(self) -> LeaseToken:
        """What proves a claim."""
        return self.grant.token

    def add_reader(self, reader: ReaderId) -> Reader:
        """A record for a reader that was never heard of; it holds nothing yet."""
        if len(self.readers) >= READERS_MAX:
            raise ProtocolError("too_many_readers", f"a lease has at most {READERS_MAX} readers")
        return self.readers.setdefault(reader, Reader(ReaderState.LAPSED))
