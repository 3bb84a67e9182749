"""The names that travel through kvlease, one type each, so that no two of them can be mixed up.

Two ids look alike and are not: the *producer's* request id names a lease, the *consumer's* request id
names a load. They share no type, so swapping them is a type error rather than a lost lease.
"""

from __future__ import annotations

from typing import NamedTuple, NewType

EngineId = NewType("EngineId", str)
"""vLLM's ``engine_id`` of one engine: stable in its configuration, reused after a restart."""

Incarnation = NewType("Incarnation", bytes)
"""16 random bytes made at each start of an engine's scheduler half: one life of one engine."""

LeaseId = NewType("LeaseId", str)
"""The producer's own request id; with the token it names one lease."""

LeaseToken = NewType("LeaseToken", bytes)
"""16 random bytes minted at grant. Whoever cannot show them has no claim. Never logged."""

LoadId = NewType("LoadId", str)
"""The consumer's own request id; it names one load."""

ChannelId = NewType("ChannelId", str)
"""One consumer scheduler half's life, as text; all that it holds is renewed together."""

ReaderId = NewType("ReaderId", str)
"""One consumer request that uses a lease: ``<channel>/<load id>``, unique over all consumers."""

Rank = NewType("Rank", int)
"""A tensor-parallel rank, from 0."""

INCARNATION_BYTES = 16
TOKEN_BYTES = 16


class PeerKey(NamedTuple):
    """How a consumer names one life of one producer: what it must be, and where it was said to be.

    The address is only a hint a router may overwrite, so two hints for one incarnation are two peers and a
    wrong one cannot poison the right one.
    """

    engine_id: EngineId
    incarnation: Incarnation
    host: str
    port: int

    def __str__(self) -> str:
        """``engine@host:port#incarnation``, short enough for a log line."""
        return f"{self.engine_id}@{self.host}:{self.port}#{self.incarnation.hex()[:8]}"


def reader_id(channel: ChannelId, load: LoadId) -> ReaderId:
    """The reader that the load ``load`` of the consumer ``channel`` is."""
    return ReaderId(f"{channel}/{load}")
