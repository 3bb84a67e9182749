"""kvlease's log lines in vLLM's log: same handlers, same format, same level."""

from __future__ import annotations

import logging


def join_vllm_logging() -> None:
    """Let the ``kvlease`` loggers write where ``vllm`` writes, unless the user configured them; may be called again."""
    ours, theirs = logging.getLogger("kvlease"), logging.getLogger("vllm")
    if ours.handlers or not theirs.handlers:
        return
    for handler in theirs.handlers:
        ours.addHandler(handler)
    if ours.level == logging.NOTSET:
        ours.setLevel(theirs.getEffectiveLevel())
