"""Virtual time: one heap of what happens next, processes with clocks of their own, and the trace of it all.

Everything that is drawn is drawn from one seeded generator and everything happens in one thread, so a seed is a story
that is the same each time it is told: :attr:`World.fingerprint` is a checksum of every event.
"""

from __future__ import annotations

import heapq
import random
import traceback
import zlib
from collections import deque
from collections.abc import Callable
from itertools import count
from math import inf
from typing import Any

STORY_LINES = 400
TURNS_MAX = 20_000
"""Many times what any seed takes: a thread that never sleeps is a fault, too."""


class World:
    """The heap, the generator, the trace. Time is in seconds from 0; no process sees it but through its clock."""

    def __init__(self, seed: int, *, keep_all: bool = False) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.now = 0.0
        self.fingerprint = 0
        self.events = 0
        self.violations: list[tuple[str, str]] = []
        self.story: deque[tuple[float, str, str, tuple[Any, ...]]] = deque(maxlen=None if keep_all else STORY_LINES)
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = count()
        self._turns = 0

    def at(self, at: float, happen: Callable[..., None], *args: Any) -> None:
        """Let ``happen(*args)`` be called at ``at``."""
        heapq.heappush(self._heap, (at, next(self._order), happen, args))

    def after(self, delay_s: float, happen: Callable[..., None], *args: Any) -> None:
        """As :meth:`at`, from now on."""
        heapq.heappush(self._heap, (self.now + delay_s, next(self._order), happen, args))

    def tell(self, who: str, what: str, *args: Any) -> None:
        """One event of the story. ``args`` are formatted only if it is read; bytes are messages."""
        self.events += 1
        self.fingerprint = zlib.crc32(f"{self.now!r}{who}{what}{args!r}".encode(), self.fingerprint)
        self.story.append((self.now, who, what, args))

    def violate(self, rule: str, text: str) -> None:
        """A rule was broken: the run ends with this event. Never raises, for the code under test might catch it."""
        self.violations.append((rule, text))
        self.tell("oracle", f"VIOLATION {rule}: {text}")

    def run_until(self, until: float) -> None:
        """Let everything happen that is due by ``until``, or up to the first violation."""
        heap = self._heap
        while heap and heap[0][0] <= until and not self.violations:
            self.now, _, happen, args = heapq.heappop(heap)
            happen(*args)
            self._turns += 1
            if self._turns == TURNS_MAX:
                who = getattr(getattr(happen, "__self__", None), "name", "the world")
                self.violate("L1", f"something spins: {TURNS_MAX} turns were taken; the last was one of {who}")
        if not self.violations:
            self.now = until


class Clock:
    """A process's monotonic clock: it runs a little fast or slow, and leaps when the machine was suspended."""

    def __init__(self, world: World, base: float, rate: float) -> None:
        self._world = world
        self._base = base
        self.rate = rate

    def __call__(self) -> float:
        return self._base + self._world.now * self.rate

    def leap(self, by_s: float) -> None:
        self._base += by_s

    def global_delay(self, local_at: float) -> float:
        """How long until this clock shows ``local_at``; a hair more, so that it is not asked a moment too early."""
        return max(0.0, (local_at - self()) / self.rate) + 1e-9


class Process:
    """One operating-system process: it may be frozen for a while and then goes on with all that has arrived."""

    def __init__(self, world: World, name: str, host: str, clock: Clock) -> None:
        self.world = world
        self.name = name
        self.host = host
        self.clock = clock
        self.alive = True
        self.paused_until = 0.0

    def pause(self, until: float) -> None:
        self.paused_until = max(self.paused_until, until)

    @property
    def is_paused(self) -> bool:
        return self.paused_until > self.world.now


class Actor:
    """One thread of a process: ``act`` is one turn of it and returns when it wants the next, by the process's clock."""

    def __init__(self, process: Process, name: str, act: Callable[[], float | None]) -> None:
        self.process = process
        self.name = f"{process.name}.{name}"
        self.act = act
        self.stalled_until = 0.0
        self._world = process.world
        self._due = inf

    def wake(self, delay_s: float = 0.0) -> None:
        """Take a turn in ``delay_s`` seconds, if none is due before."""
        self._wake_at(self._world.now + delay_s)

    def wake_soon(self) -> None:
        """Take a turn after the moment that waking a thread takes."""
        self._wake_at(self._world.now + self._world.rng.random() * 0.001)

    def _wake_at(self, at: float) -> None:
        if at < self._due:
            self._due = at
            self._world.at(at, self._fire, at)

    def _fire(self, at: float) -> None:
        if at != self._due:
            return
        self._due = inf
        if not self.process.alive:
            return
        held_until = max(self.process.paused_until, self.stalled_until)
        if held_until > at:
            self._wake_at(held_until + self._world.rng.random() * 0.005)
            return
        try:
            deadline = self.act()
        except Exception:
            self._world.violate("I1", f"{self.name} raised: {traceback.format_exc(limit=-6)}")
            return
        if deadline is not None:
            self.wake(self.process.clock.global_delay(deadline))
