"""All producers that one consumer rank knows: one :class:`Source` for each, kept while it is of use.

Sources may share a NIXL agent, because a router may write another address of the same producer: what is done to the
agent is done with an eye on the others.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import Final

from kvlease.core.ids import PeerKey
from kvlease.core.loads import FailureCause
from kvlease.core.peers import PeerState
from kvlease.core.plan import Pages
from kvlease.worker.agent import Agent
from kvlease.worker.sources import Identity, Link, Source, SourceError

EARLY_MAX: Final = 64
"""Greetings under way beyond which none is begun without a load that needs it: a handoff may name anybody."""


class KnownSources:
    """See the module. ``local``: the layout of our own pages. Belongs to the puller's thread."""

    def __init__(self, identity: Identity, agent: Agent, link: Link, local: Pages) -> None:
        self._identity, self._agent, self._link, self._local = identity, agent, link, local
        self._sources: dict[PeerKey, Source] = {}

    def __len__(self) -> int:
        return len(self._sources)

    def find(self, key: PeerKey) -> Source | None:
        """The source of that key, if it is known."""
        return self._sources.get(key)

    def get(self, key: PeerKey, now: float) -> Source:
        """The source of that key, from now on known."""
        source = self._sources.get(key)
        if source is None:
            peer = self._link.peer(key)
            source = self._sources[key] = Source(peer, self._identity, self._agent, self._local, now)
        return source

    def count_by_state(self) -> Counter[PeerState]:
        """How many there are, by where we stand with them."""
        return Counter(source.peer.state for source in self._sources.values())

    def greet_early(self, key: PeerKey, now: float, timeout_s: float) -> None:
        """Shake hands before there is a load. Whatever comes of it, the first load finds out for itself."""
        source = self._sources.get(key)
        if source is None and sum(one.is_greeting for one in self._sources.values()) >= EARLY_MAX:
            return
        source = source or self.get(key, now)
        if not source.is_ready:
            with contextlib.suppress(SourceError):
                source.greet(now, timeout_s)

    def repair(self, source: Source) -> None:
        """After an error of NIXL its agent is added anew, for every source that reaches it.

        Raises:
            SourceError: reads of before the error are still busy, or NIXL fails again.
        """
        if not source.is_broken:
            return
        sharers = self._sharers(source)
        if any(other.busy_reads for other in sharers):
            raise SourceError(FailureCause.TRANSFER, "reads of before an error have not ended")
        source.repair()
        for other in sharers:
            if other.open_loads:
                other.is_broken = True
            else:
                other.drop_remote(keep_agent=True)

    def forget_former_lives(self, source: Source) -> None:
        """Whoever was at the address of ``source`` before it is gone. Without this a producer that restarts again and
        again leaves an agent, prepared pages and a socket of each life here until they have been idle for long.
        """
        new = source.peer.key
        for key, former in list(self._sources.items()):
            if (key.host, key.port) == (new.host, new.port) and key.incarnation != new.incarnation and former.is_unused:
                self.drop(key)
                self._link.forget(key)

    def sweep(self, now: float) -> None:
        """Forget those that nobody has needed for long."""
        for key, source in list(self._sources.items()):
            if source.is_stale(now):
                self.drop(key)
                self._link.forget(key)

    def drop(self, key: PeerKey) -> None:
        """Forget one whose peer the link has forgotten, or is about to."""
        source = self._sources.pop(key)
        if not source.busy_reads:
            source.drop_remote(keep_agent=bool(self._sharers(source)))

    def close(self) -> None:
        """Forget every producer that no busy read needs."""
        for source in self._sources.values():
            if not source.busy_reads:
                source.drop_remote()
        self._sources.clear()

    def _sharers(self, source: Source) -> list[Source]:
        """The other sources that reach the same agent."""
        if source.remote is None:
            return []
        name = source.remote.name
        return [
            other
            for other in self._sources.values()
            if other is not source and other.remote is not None and other.remote.name == name
        ]
