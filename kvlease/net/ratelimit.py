"""Log lines that a peer can provoke, at most one of each kind per interval."""

from __future__ import annotations

import logging
from typing import Final

INTERVAL_S: Final = 10.0


class RateLimitedLog:
    """Passes the first line of each kind in every :data:`INTERVAL_S` seconds on, and counts the others in the next."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._quiet_until: dict[str, float] = {}
        self._swallowed: dict[str, int] = {}

    def __call__(
        self, kind: str, now: float, text: str, *args: object, level: int = logging.WARNING, trace: bool = False
    ) -> None:
        """Log ``text % args``, unless another line of ``kind`` was logged less than an interval ago."""
        if now < self._quiet_until.get(kind, now):
            self._swallowed[kind] = self._swallowed.get(kind, 0) + 1
            return
        self._quiet_until[kind] = now + INTERVAL_S
        if swallowed := self._swallowed.pop(kind, 0):
            text += f" ({swallowed} more like this since the last such line)"
        self._logger.log(level, text, *args, exc_info=trace)
