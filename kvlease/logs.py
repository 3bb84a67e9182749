"""Log lines that a peer or a repeated fault can provoke: so many of each kind per interval, and no more."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Final

INTERVAL_S: Final = 10.0


@dataclass
class _Kind:
    """What one kind of line has used up of the interval that began at ``since``."""

    since: float
    passed: int = 0
    swallowed: int = 0


class RateLimitedLog:
    """Passes ``burst`` lines of each kind in every :data:`INTERVAL_S` seconds on; the next interval's first line says
    how many others there were.

    ``burst`` is for lines of which each is about a request of its own. Kinds are few: never a peer's words.
    """

    def __init__(self, logger: logging.Logger, burst: int = 1) -> None:
        self._logger = logger
        self._burst = burst
        self._kinds: dict[str, _Kind] = {}

    def __call__(
        self,
        kind: str,
        now: float,
        text: str,
        *args: object,
        level: int = logging.WARNING,
        trace: bool | BaseException = False,
    ) -> None:
        """Log ``text % args``, unless ``kind`` has used up this interval.

        ``trace``: with the traceback of this error, or of the one being handled (True).
        """
        used = self._kinds.setdefault(kind, _Kind(now))
        if now >= used.since + INTERVAL_S:
            if used.swallowed:
                text += f" ({used.swallowed} more like this since the last such line)"
            used = self._kinds[kind] = _Kind(now)
        if used.passed < self._burst:
            used.passed += 1
            self._logger.log(level, text, *args, exc_info=trace)
        else:
            used.swallowed += 1
