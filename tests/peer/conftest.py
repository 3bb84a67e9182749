"""Pairs of a consumer and a producer that end with their test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from devtools.pair import EXTENSION_S, Consumer, Producer, Shape
from kvlease.config import Settings
from kvlease.worker.agent import Agent, NixlAgent

Make = Callable[..., tuple[Consumer, Producer]]


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes a consumer and a producer with KV caches of ``shape``."""
    parts: list[Consumer | Producer] = []

    def pair(
        shape: Shape = Shape(3, 64, 4096),  # noqa: B008 - frozen
        *,
        together: bool = False,
        extension_s: float = EXTENSION_S,
        make_agent: Callable[[Settings], Agent] = NixlAgent,
        **extra: Any,
    ) -> tuple[Consumer, Producer]:
        settings = Settings(num_threads=0, **extra)
        producer = Producer(settings, shape, together=together, extension_s=extension_s)
        parts.append(producer)
        consumer = Consumer(settings, shape, make_agent)
        parts.append(consumer)
        return consumer, producer

    yield pair
    for part in reversed(parts):
        if isinstance(part, Consumer):
            part.half.shutdown()
        else:
            part.close()
