"""At most so many log lines in a while, because a fault that repeats must not fill a disk."""

from __future__ import annotations


class Throttle:
    """Lets ``burst`` lines through in each ``window_s`` seconds."""

    def __init__(self, burst: int = 20, window_s: float = 10.0) -> None:
        self._burst, self._window_s = burst, window_s
        self._since = float("-inf")
        self._used = 0

    def allow(self, now: float) -> bool:
        """Whether one more line may be written."""
        if now - self._since >= self._window_s:
            self._since, self._used = now, 0
        self._used += 1
        return self._used <= self._burst
