"""How long a peer may be silent: when one with open loads is asked for a word, taken for dead, and tried again.

Silence counts from the last word (or the first watcher), and only if the peer was asked a while ago: a thread that was
held up elsewhere, and asked nothing, takes nobody for dead.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvlease.core.messages import Ping


@dataclass(frozen=True)
class PeerTiming:
    """How long silence may last, how often we ask, and for how long a dead peer is left alone (at first, at most)."""

    peer_timeout_s: float
    ping_interval_s: float
    backoff_s: float = 0.5
    backoff_max_s: float = 10.0


class Backoff:
    """When a dead peer may be tried again: ``retry_at``."""

    def __init__(self, timing: PeerTiming) -> None:
        self._timing = timing
        self._wait_s = timing.backoff_s
        self.retry_at = 0.0

    def start(self, now: float) -> None:
        """The peer has died."""
        self._wait_s = self._timing.backoff_s
        self.retry_at = now + self._wait_s

    def double(self, now: float) -> None:
        """It was tried, and is still dead."""
        self._wait_s = min(2 * self._wait_s, self._timing.backoff_max_s)
        self.retry_at = now + self._wait_s


class Watch:
    """See the module. ``ping`` is the question that the peer owes a word since, ``ping_at`` when to ask (again)."""

    def __init__(self, timing: PeerTiming) -> None:
        self._timing = timing
        self.watchers = 0
        self.ping: Ping | None = None
        self.ping_at = 0.0
        self._quiet_since = 0.0
        self._asked_at = 0.0

    def open(self, now: float, heard_at: float | None) -> None:
        """One more watcher; ``heard_at`` is when the peer last said something, ever."""
        self.watchers += 1
        if self.watchers == 1:
            self.ping = None
            self._quiet_since = now
            self.ping_at = now if heard_at is None else max(now, heard_at + self._timing.ping_interval_s)

    def heard(self, now: float) -> None:
        """The peer said something."""
        self.ping = None
        self._quiet_since = now
        self.ping_at = now + self._timing.ping_interval_s

    def asked(self, ping: Ping, now: float) -> None:
        """The peer was asked; again, if it owes us a word already."""
        if self.ping is None:
            self._asked_at = now
        self.ping = ping
        self.ping_at = now + self._timing.ping_interval_s

    def dead_at(self) -> float | None:
        """When silence is death; None while the peer owes us no word."""
        if self.ping is None:
            return None
        patience_s = self._timing.peer_timeout_s - self._timing.ping_interval_s
        return max(self._quiet_since + self._timing.peer_timeout_s, self._asked_at + patience_s)
