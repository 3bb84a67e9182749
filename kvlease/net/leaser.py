"""The thread that acquires, renews and releases the consumer's leases, whatever the engine is doing.

The scheduler thread appends commands and takes results; both are deques, and beside them there is only an event, for a
scheduler thread that gives a new claim its time. Everything slow is on this side: digests of long prompts, sockets,
waiting. What is done is in :mod:`kvlease.net.claims`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from functools import partial
from typing import Final

from kvlease.config import Settings
from kvlease.core.digest import PromptIdentity
from kvlease.core.ids import ChannelId, LeaseId, LeaseToken, LoadId, PeerKey
from kvlease.core.silence import PeerTiming
from kvlease.net.channel import Channel
from kvlease.net.claims import AcquireFailed, AcquireGranted, Claims, LeaseGone, Result

__all__ = ["AcquireFailed", "AcquireGranted", "LeaseGone", "Leaser", "Result"]

logger = logging.getLogger(__name__)

CLOSE_S: Final = 0.2
"""How long closing waits for its releases to be answered."""

_JOIN_S: Final = 2.0
_AFTER_ERROR_S: Final = 0.1

_BATCH_MAX: Final = 64
"""How many commands are carried out between two looks at the sockets."""

_NAP_S: Final = 1.0
"""The longest sleep; whoever has news wakes the thread anyway."""


class Leaser:
    """See the module. ``channel`` is this consumer's name on the wire.

    The methods up to :meth:`close` are for the scheduler thread. :meth:`step` is the thread's; a test may call it
    instead of :meth:`start`. ``claims`` is the thread's, too.
    """

    def __init__(
        self,
        channel: ChannelId,
        settings: Settings,
        *,
        clock: Callable[[], float] = time.monotonic,
        make_channel: Callable[[PeerTiming, Callable[[], float]], Channel] = Channel,
    ) -> None:
        self._clock = clock
        self._channel = make_channel(PeerTiming(settings.peer_timeout_s, settings.ping_interval_s()), clock)
        self._commands: deque[Callable[[], None]] = deque()
        self._results: deque[Result] = deque()
        self._has_told = threading.Event()
        self.claims = Claims(channel, settings, self._channel, clock, self._tell)
        self._counters: Counter[str] = Counter()
        self._stats: dict[str, float] = {}
        self._stats_total = 0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvlease-leaser", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def acquire(
        self,
        load: LoadId,
        key: PeerKey,
        lease: LeaseId,
        token: LeaseToken,
        prompt: PromptIdentity,
        *,
        has_siblings: bool = True,
    ) -> None:
        """Claim ``lease`` for ``load``; a result follows in ``acquire_timeout_s``, unless the load is let go before.

        ``has_siblings``: other loads may claim it, too, a moment later.
        """
        self._command(partial(self.claims.acquire, load, key, lease, token, prompt, has_siblings=has_siblings))

    def finish(self, load: LoadId) -> None:
        """The load is committed everywhere: hold its lease no more. Unknown loads are ignored."""
        self._command(partial(self.claims.finish, load))

    def release(self, load: LoadId) -> None:
        """The load will not read: tell the producer. Unknown loads are ignored."""
        self._command(partial(self.claims.release, load))

    def release_unclaimed(self, key: PeerKey, lease: LeaseId, token: LeaseToken) -> None:
        """Nobody here will ever read ``lease``: tell the producer, as a reader that never acquired."""
        self._command(partial(self.claims.release_unclaimed, key, lease, token))

    def take_results(self) -> list[Result]:
        """What became of the claims since the last call, in order."""
        results = []
        while self._results:
            results.append(self._results.popleft())
        return results

    def wait(self, timeout_s: float) -> bool:
        """Wait for results to take; whether it was for something, or at least may have been.

        Without a thread nobody would bring any.
        """
        self._has_told.clear()
        return bool(self._results) or (self.is_alive and self._has_told.wait(timeout_s))

    def stats(self) -> dict[str, float]:
        """What was counted since the start, as ``channel_events|<kind>``: the same object until something was."""
        total = self._channel.num_counted() + self.claims.counters.total() + self._counters.total()
        if total != self._stats_total:
            counted = self._channel.counters()
            for counters in (self.claims.counters, self._counters):
                counted.update(dict(counters))
            self._stats = {f"channel_events|{kind}": float(number) for kind, number in counted.items()}
            self._stats_total = total
        return self._stats

    def close(self) -> None:
        """Release what is held, as far as that goes within :data:`CLOSE_S`, and end the thread. Idempotent."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._channel.wake()
        if self.is_alive:
            self._thread.join(_JOIN_S)
        else:
            self._say_goodbye()

    def step(self, timeout_s: float) -> None:
        """Carry out what was commanded, wait for at most ``timeout_s``, and take in what happened."""
        for _ in range(min(len(self._commands), _BATCH_MAX)):
            self._carry_out(self._commands.popleft())
        beat_at = self.claims.next_deadline()
        if self._commands:
            timeout_s = 0.0
        elif beat_at is not None:
            timeout_s = min(timeout_s, beat_at - self._clock())
        self._channel.poll(timeout_s)
        self._take_events()
        self.claims.tick()

    def next_deadline(self) -> float | None:
        """When :meth:`step` has something to do if nothing is heard; for whoever drives it without a thread."""
        if self._commands:
            return self._clock()
        deadlines = (self.claims.next_deadline(), self._channel.next_deadline())
        return min((at for at in deadlines if at is not None), default=None)

    def _tell(self, result: Result) -> None:
        self._results.append(result)
        self._has_told.set()

    def _command(self, command: Callable[[], None]) -> None:
        self._commands.append(command)
        self._channel.wake()

    def _carry_out(self, command: Callable[[], None]) -> None:
        try:
            command()
        except Exception:
            self._counters["internal"] += 1
            logger.exception("a command could not be carried out")

    def _take_events(self) -> None:
        for key, event in self._channel.take_events():
            self.claims.happen(key, event)

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                self.step(_NAP_S)
            except Exception:
                self._counters["internal"] += 1
                logger.exception("the leaser goes on after an error of its own")
                self._closing.wait(_AFTER_ERROR_S)
        self._say_goodbye()

    def _say_goodbye(self) -> None:
        try:
            until = time.monotonic() + CLOSE_S
            while self._commands and time.monotonic() < until:
                self._carry_out(self._commands.popleft())
            for load in self.claims.loads():
                if time.monotonic() >= until:
                    break
                self.claims.release(load)
            while self.claims.releases_open and (left_s := until - time.monotonic()) > 0:
                self._channel.poll(left_s)
                self._take_events()
        except Exception:
            logger.exception("what is held could not be released; it expires at its producers")
        finally:
            self._channel.close()
