"""Real bytes from another process, and what becomes of a load when that process does not play along."""

from __future__ import annotations

import random
import signal
import time

import pytest

from devtools.pair import Shape
from kvlease.core.ids import LoadId
from kvlease.core.loads import FailureCause

from .conftest import Make

pytestmark = pytest.mark.peer

BIG = Shape(2, 4096, 8192)
"""64 MiB, in pages of which half a page is one NIXL descriptor: a pull that lasts."""


def scattered(count: int, of: int) -> dict[int, int]:
    rng = random.Random(3)
    return dict(zip(rng.sample(range(1, of), count), rng.sample(range(1, of), count), strict=True))


@pytest.mark.parametrize(
    "blocks",
    [{i: i for i in range(1, 33)}, {i + 1: i + 30 for i in range(1, 33)}, scattered(40, 64), {5: 9}],
    ids=["same", "shifted", "scattered", "one"],
)
def test_what_was_reported_good_is_what_the_producer_has(make: Make, blocks: dict[int, int]) -> None:
    consumer, producer = make(chunk_bytes=64 << 10)
    consumer.take(producer.order("load", blocks))
    consumer.wait_for("load")
    assert consumer.reports.failed == {}
    assert consumer.holds(producer, blocks)
    untouched = set(range(64)) - set(blocks)
    assert all(not cache[:, sorted(untouched)].any() for cache in consumer.caches.values())


def test_many_loads_at_once(make: Make) -> None:
    consumer, producer = make(chunk_bytes=16 << 10)
    blocks = {f"load-{i}": {4 * i + j + 1: 60 - 4 * i - j for j in range(4)} for i in range(15)}
    consumer.take(*(producer.order(load, pairs) for load, pairs in blocks.items()))
    consumer.wait_for(*blocks)
    assert consumer.reports.failed == {}
    assert all(consumer.holds(producer, pairs) for pairs in blocks.values())


def test_a_lease_that_ended_before_the_commit_fails_the_load(make: Make) -> None:
    consumer, producer = make(extension_s=0.2)
    order = producer.order("load", {1: 1})
    consumer.wait(lambda: bool(producer.endpoint.take_ended()))
    consumer.take(order)
    consumer.wait_for("load")
    assert consumer.reports.failed == {"load": FailureCause.GONE_EXPIRED}


def test_a_killed_producer_fails_its_loads_soon_and_frees_their_blocks(make: Make) -> None:
    consumer, producer = make(BIG, chunk_bytes=1 << 20, together=True)
    blocks = scattered(4000, 4096)
    consumer.take(producer.order("load", blocks))
    consumer.wait(lambda: consumer.half.take_stats().get("bytes_pulled", 0) > 0)
    producer.close()
    began = time.monotonic()
    consumer.wait_for("load")
    assert time.monotonic() - began < 4
    assert consumer.reports.failed["load"] in {FailureCause.TRANSFER, FailureCause.PEER_DEAD}
    consumer.wait(lambda: consumer.reports.unsettled == consumer.reports.settled)


def test_a_killed_worker_with_a_living_endpoint_fails_its_loads(make: Make) -> None:
    consumer, producer = make()
    consumer.take(producer.order("first", {1: 1}))
    consumer.wait_for("first")
    producer.signal_worker(signal.SIGKILL)
    producer.process.join()
    consumer.take(producer.order("second", {2: 2}))
    consumer.wait_for("second")
    assert consumer.reports.failed == {"second": FailureCause.TRANSFER}


def test_a_frozen_producer_fails_its_loads_in_time_and_serves_again_when_it_thaws(make: Make) -> None:
    consumer, producer = make(together=True)
    consumer.take(producer.order("first", {1: 1}))
    consumer.wait_for("first")
    order = producer.order("second", {2: 2})
    producer.signal_worker(signal.SIGSTOP)
    began = time.monotonic()
    consumer.take(order)
    consumer.wait_for("second")
    assert time.monotonic() - began < 3
    assert consumer.reports.failed["second"] in {FailureCause.COMMIT_TIMEOUT, FailureCause.PEER_DEAD}
    producer.signal_worker(signal.SIGCONT)
    attempts: list[str] = []

    def is_served_again() -> bool:
        if attempts and attempts[-1] not in consumer.reports.received:
            return False
        if attempts and attempts[-1] not in consumer.reports.failed:
            return True
        attempts.append(f"third-{len(attempts)}")
        consumer.take(producer.order(attempts[-1], {3: 3}))
        return False

    consumer.wait(is_served_again)
    assert consumer.holds(producer, {3: 3})


@pytest.mark.parametrize("end", [signal.SIGCONT, signal.SIGKILL])
def test_reads_from_a_worker_frozen_before_they_connect_keep_their_blocks_in_quarantine_until_they_end(
    make: Make, end: signal.Signals
) -> None:
    consumer, producer = make()
    producer.signal_worker(signal.SIGSTOP)
    consumer.take(producer.order("load", {1: 1}))
    consumer.wait(lambda: consumer.half.take_stats().get("pulls", 0) > 0)
    consumer.take(aborts=("load",))
    consumer.wait_for("load")
    assert consumer.reports.failed == {"load": FailureCause.ABORTED}
    assert consumer.reports.unsettled == {"load"}
    assert not consumer.reports.settled
    producer.signal_worker(end)
    consumer.wait(lambda: consumer.reports.settled == {LoadId("load")})


def test_an_abort_in_the_middle_of_a_large_load_stops_it(make: Make) -> None:
    consumer, producer = make(BIG, chunk_bytes=256 << 10, peer_timeout_s=60.0, commit_timeout_s=60.0)
    _, other = make(BIG)
    consumer.take(producer.order("first", {2: 2}))
    consumer.wait_for("first")
    order = producer.order("load", scattered(4000, 4096))
    assert producer.endpoint is not None
    producer.endpoint.close()  # so that the load stays open, however fast it is read
    consumer.take(order)
    consumer.wait(lambda: consumer.half.take_stats().get("bytes_pulled", 0) > 2 * 8192)
    consumer.take(aborts=("load",))
    consumer.wait_for("load")
    assert consumer.reports.failed == {"load": FailureCause.ABORTED}
    consumer.take(other.order("next", {1: 1}))
    consumer.wait_for("next")
    assert consumer.holds(other, {1: 1})


def test_a_small_load_behind_a_large_one_is_not_delayed(make: Make) -> None:
    consumer, producer = make(BIG, chunk_bytes=256 << 10)
    consumer.take(producer.order("large", scattered(4000, 4096)), producer.order("small", {1: 1}))
    consumer.wait_for("large", "small")
    assert consumer.reports.failed == {}
    assert producer.endpoint is not None
    assert [ended.lease for ended in producer.endpoint.take_ended()] == ["lease-of-small", "lease-of-large"]


def test_shutdown_reports_what_is_open_as_failed(make: Make) -> None:
    consumer, producer = make(BIG, chunk_bytes=256 << 10, peer_timeout_s=60.0, commit_timeout_s=60.0)
    consumer.take(producer.order("first", {1: 1}))
    consumer.wait_for("first")
    order, late = producer.order("load", scattered(4000, 4096)), producer.order("late", {1: 1})
    assert producer.endpoint is not None
    producer.endpoint.close()  # so that the load stays open, however fast it is read
    consumer.take(order)
    consumer.wait(lambda: consumer.half.take_stats().get("bytes_pulled", 0) > 2 * 8192)
    consumer.half.shutdown()
    consumer.wait_for("load")
    assert consumer.reports.failed == {"load": FailureCause.SHUTDOWN}
    consumer.take(late)
    consumer.wait_for("late")
    assert consumer.reports.failed["late"] is FailureCause.SHUTDOWN
