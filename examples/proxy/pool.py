"""Which engine is asked next: round robin over the live ones of one role, with a back-off for those that failed.

Time is an argument.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

BACKOFF_S = 0.5
BACKOFF_MAX_S = 10.0


@dataclass(eq=False)
class Engine:
    """One engine's address.

    `backoff_s` is how long its last failure put it down, 0 when it is well; it is down until `down_until_s`.
    """

    url: str
    backoff_s: float = 0.0
    down_until_s: float = 0.0
    cause: str = ""

    def is_live(self, now: float) -> bool:
        """Whether it may be asked: it never failed, answered since, or its back-off is over."""
        return not self.backoff_s or now >= self.down_until_s

    def failed(self, cause: str, now: float) -> None:
        """Put it down, twice as long as last time. Failures of calls sent before it went down count as the same one."""
        if self.is_live(now):
            self.backoff_s = min(max(BACKOFF_S, 2 * self.backoff_s), BACKOFF_MAX_S)
            self.down_until_s = now + self.backoff_s
        self.cause = cause

    def answered(self) -> None:
        """It is well."""
        self.backoff_s = 0.0
        self.cause = ""


class Pool:
    """The engines of one role ("producer" or "consumer")."""

    def __init__(self, role: str, urls: Sequence[str]) -> None:
        self.role = role
        self.engines = [Engine(url) for url in urls]
        self._turn = 0

    def pick(self, now: float, tried: Collection[Engine] = ()) -> Engine | None:
        """The next live engine that is not among `tried`; None when there is none."""
        count = len(self.engines)
        for turn in range(self._turn, self._turn + count):
            engine = self.engines[turn % count]
            if engine.is_live(now) and engine not in tried:
                self._turn = (turn + 1) % count
                return engine
        return None

    def is_live(self, now: float) -> bool:
        """Whether any engine may be asked."""
        return any(engine.is_live(now) for engine in self.engines)

    def state(self, now: float) -> dict[str, str]:
        """Each engine's url with "live" or why it is down, for people."""
        return {e.url: "live" if e.is_live(now) else f"down: {e.cause}" for e in self.engines}

    def why_down(self) -> str:
        """What went wrong with the engines of this role, in a sentence for an error message."""
        causes = [f"{engine.url} {engine.cause}" for engine in self.engines if engine.cause]
        return "; ".join(causes) or f"there is no {self.role}"
