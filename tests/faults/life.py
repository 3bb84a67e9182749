"""Rows: the life of engines and of the consumer's knowledge of them."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import psutil

from devtools.engines import Engine
from devtools.processes import free_port
from kvlease.core import messages
from tests.engines.clients import occupied, through
from tests.engines.support import wait_until
from tests.faults.fleets import KVLEASE, PLACES
from tests.faults.rows import Case, row
from tests.faults.signals import LONG, ask_at_once, relay_to
from tests.faults.verdict import POLICY


def reset(engine: Engine) -> bool:
    """Ask an engine to empty its prefix cache and its connector; whether it says that it did."""
    answer = engine.http.post("/reset_prefix_cache", params={"reset_external": "true"})
    return bool(answer.raise_for_status().json()["success"])


@row("main")
def producer_cache_reset(case: Case) -> None:
    """The producer's cache is reset while leases are out: the first call fails and revokes them, a later one succeeds.
    Then the handoffs are used.
    """
    prompt = case.prompt(300)
    expected = case.reference(prompt)
    handoffs = [case.handoff(prompt) for _ in case.sides]
    first = reset(case.producer)
    wait_until(lambda: case.producer.kv_usage() == 0, "the leases are revoked", 60.0)
    second = reset(case.producer)
    case.reference(case.prompt(LONG))
    case.ask_each(prompt, handoffs, POLICY, expected)
    case.note(f"first call {'succeeds' if first else 'fails'}, second {'succeeds' if second else 'fails'}")
    for side in case.sides:
        side.require(second, "the second call fails, too")


@row("main", connectors=[KVLEASE])
def consumer_cache_reset(case: Case) -> None:
    """The consumer's cache is reset while it is full and holds a claim: what is under way must not end up in it."""
    prompt = case.prompt(300)
    expected = case.reference(prompt)
    with ThreadPoolExecutor(len(case.sides)) as pool:
        for side in case.sides:
            handoff = case.handoff(prompt)
            with ExitStack() as stack:
                relay = stack.enter_context(relay_to(handoff))
                with occupied(side.consumer, PLACES):
                    asked = ask_at_once(side, pool, prompt, through(relay, handoff))
                    wait_until(lambda relay=relay: relay.seen[messages.Renewed] > 0, "the claim is renewed", 60.0)
                    side.note(f"the call {'succeeds' if reset(side.consumer) else 'fails'}")
                side.expect(asked.result(), expected, POLICY)


LIVES, WARM_UP = 100, 20
GROWTH_BYTES = 32 << 20


@row(None, connectors=[KVLEASE], policies=["fail"])
def hundred_producer_lives(case: Case) -> None:
    """100 lives of a producer process at one address, each pulled from and killed (no vLLM, real NIXL): nothing of the
    consumer grows.
    """
    from devtools.pair import Consumer, Producer, Shape
    from kvlease.config import Settings

    (side,) = case.sides
    settings = Settings(num_threads=0)
    shape = Shape(3, 64, 4096)
    port = free_port()
    consumer = Consumer(settings, shape)
    blocks = {1: 9, 2: 5, 3: 6}
    warm: Mapping[str, float] = {}
    try:
        for life in range(LIVES):
            producer = Producer(settings, shape, together=True, method="forkserver", port=port)
            try:
                load = f"load-{life}"
                consumer.take(producer.order(load, blocks))
                consumer.wait_for(load, timeout_s=60.0)
                right = not consumer.reports.failed and consumer.holds(producer, blocks)
                side.require(right, f"life {life}: wrong bytes or a failed load: {consumer.reports.failed}")
                for cache in consumer.caches.values():
                    cache.zero_()
            finally:
                producer.close()
            if life + 1 == WARM_UP:
                warm = _sizes(consumer)
        end = _sizes(consumer)
    finally:
        consumer.half.shutdown()
    for name in end:
        side.note(f"{name} {_shown(name, warm[name])} → {_shown(name, end[name])}")
    side.require(end["RSS"] - warm["RSS"] < GROWTH_BYTES, "the memory grows")
    for name in ("threads", "file descriptors", "peers"):
        side.require(end[name] <= warm[name] + 2, f"the {name} grow")


def _sizes(consumer: object) -> Mapping[str, float]:
    """What could grow, when the consumer has had time to forget the dead."""
    from devtools.pair import Consumer

    assert isinstance(consumer, Consumer)

    def peers() -> float:
        return sum(value for key, value in consumer.half.take_stats().items() if key.startswith("peers|"))

    wait_until(lambda: peers() <= 1, "dead peers are forgotten", 180.0)
    gc.collect()
    me = psutil.Process()
    return {
        "RSS": float(me.memory_info().rss),
        "file descriptors": float(me.num_fds()),
        "threads": float(me.num_threads()),
        "peers": peers(),
    }


def _shown(name: str, value: float) -> str:
    return f"{value / (1 << 20):.0f} MiB" if name == "RSS" else f"{value:.0f}"
