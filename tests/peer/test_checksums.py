"""Checksums between two processes, over real NIXL: right bytes are used, and a flipped one is caught."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from devtools.pair import Shape
from kvlease.config import Settings
from kvlease.core.ids import LoadId
from kvlease.core.loads import FailureCause
from kvlease.worker.agent import NixlAgent

from .conftest import Make

pytestmark = pytest.mark.peer

BLOCKS = {i: i + 20 for i in range(1, 33)}
PATIENT = {"commit_timeout_s": 20.0, "peer_timeout_s": 20.0}


class Flipper:
    """Makes agents whose memory somebody else writes to when a read has ended, before anybody hears of it."""

    def __init__(self) -> None:
        self.flip: Callable[[], None] = lambda: None

    def __call__(self, settings: Settings) -> NixlAgent:
        flipper = self

        class Agent(NixlAgent):
            def release(self, read: Any) -> None:
                super().release(read)
                flipper.flip()

        return Agent(settings)


@pytest.mark.parametrize("extent", ["sampled", "full"])
@pytest.mark.parametrize("together", [False, True], ids=["endpoint here", "endpoint there"])
def test_right_bytes_are_compared_and_used(make: Make, extent: str, together: bool) -> None:
    consumer, producer = make(kv_checksum=extent, together=together, **PATIENT)
    consumer.take(producer.order("load", BLOCKS))
    consumer.wait_for("load")
    assert consumer.reports.failed == {}
    assert consumer.holds(producer, BLOCKS)
    consumer.wait(lambda: consumer.half.take_stats().get("checksums|equal") == 1)


@pytest.mark.parametrize("extent", ["sampled", "full"])
def test_one_flipped_byte_of_what_is_compared_fails_the_load_and_no_other(make: Make, extent: str) -> None:
    flipper = Flipper()
    consumer, producer = make(kv_checksum=extent, make_agent=flipper, **PATIENT)
    blocks = BLOCKS if extent == "full" else {3: 4}  # a sample of one block is that block

    def flip() -> None:
        consumer.caches["layers.1"][1, 3, 100] ^= 1
        flipper.flip = lambda: None

    flipper.flip = flip
    consumer.take(producer.order("bad", blocks))
    consumer.wait_for("bad")
    assert consumer.reports.failed == {"bad": FailureCause.CHECKSUM}
    assert producer.endpoint is not None
    assert producer.endpoint.stats().counters.get("committed", 0) == 0
    consumer.take(producer.order("good", blocks))
    consumer.wait_for("good")
    assert set(consumer.reports.failed) == {LoadId("bad")}
    assert consumer.holds(producer, blocks)


def test_a_producer_with_the_knob_off_is_refused_before_a_byte_is_read(make: Make) -> None:
    consumer, _ = make(kv_checksum="full")
    _, producer = make()
    consumer.take(producer.order("load", BLOCKS))
    consumer.wait_for("load")
    assert consumer.reports.failed == {"load": FailureCause.INCOMPATIBLE}
    assert not any(cache.any() for cache in consumer.caches.values())


def test_a_consumer_with_the_knob_off_asks_nothing_of_a_producer_with_it_on(make: Make) -> None:
    consumer, _ = make(**PATIENT)
    _, producer = make(kv_checksum="full")
    consumer.take(producer.order("load", BLOCKS))
    consumer.wait_for("load")
    assert consumer.reports.failed == {}
    assert producer.endpoint is not None
    assert "checksums" not in producer.endpoint.stats().counters


def test_off_there_is_no_thread_and_no_socket_for_it(make: Make) -> None:
    consumer, producer = make(Shape(1, 8, 256))
    assert consumer.half.hasher_address() is None
    assert producer.info.checksum == ""
    assert not [thread for thread in threading.enumerate() if thread.name == "kvlease-checksums"]
