"""Rows: engines that are killed, frozen and restarted with real signals."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from devtools.engines import Engine
from devtools.metrics import KV_USAGE
from kvlease.core import messages
from tests.engines.clients import Answer, occupied, through
from tests.engines.relay import Relay
from tests.engines.support import wait_until
from tests.faults.fleets import KVLEASE, PLACES
from tests.faults.rows import COMMITTED, UNRENEWED, Case, Side, row
from tests.faults.verdict import CLEAN, GONE, GONE_OR_SERVED, POLICY, SERVED

LONG = 1500
"""Tokens: 70 MB, in 17 chunks."""
FOREVER = 1_000_000


def relay_to(handoff: dict[str, Any]) -> Relay:
    """A relay before the endpoint that a handoff names."""
    return Relay(handoff["remote_host"], handoff["remote_port"])


@contextmanager
def once(act: Callable[[], None]) -> Iterator[Callable[[Any], None]]:
    """A hook for a relay that does ``act`` in a thread of its own, the first time only; ended on the way out."""
    thread = threading.Thread(target=act)
    yield lambda _: None if thread.ident else thread.start()
    if thread.ident:
        thread.join()


def first_only(act: Callable[[], None]) -> Callable[[Any], None]:
    """A hook for a relay that does ``act`` before the first message of its kind is passed on."""
    acts = [act]
    return lambda _: acts.pop()() if acts else None


def ask_at_once(side: Side, pool: ThreadPoolExecutor, prompt: list[int], handoff: dict[str, Any]) -> Future[Answer]:
    """A request that is not waited for yet."""
    return pool.submit(side.ask, prompt, handoff)


def frozen_until_refused(case: Case, prompt: list[int], handoffs: list[dict[str, Any]], expected: list[int]) -> None:
    """Ask all sides while the producer is frozen, then thaw it."""
    try:
        case.ask_each(prompt, handoffs, POLICY, expected)
    finally:
        case.producer.thaw()
    case.blocks_from_now(UNRENEWED)


@row("main", bound_s=COMMITTED)
def producer_killed_before_the_claim(case: Case) -> None:
    """kill -9 of the producer after the prefill, before the consumer has asked; then a restart on the same address:
    old handoffs, a short prompt, one of 2,000 tokens.
    """
    prompt = case.prompt(300)
    expected = case.reference(prompt)
    handoffs = [case.handoff(prompt) for _ in range(2 * len(case.sides))]
    case.producer.kill()
    case.ask_each(prompt, handoffs[: len(case.sides)], POLICY, expected)
    case.fleet.restart_producer()
    case.ask_each(prompt, handoffs[len(case.sides) :], POLICY, expected)
    for length in (20, 2000):
        again = case.prompt(length)
        right = case.reference(again)
        for side in case.sides:
            side.expect(side.ask(again, case.handoff(again)), right, SERVED)


@row("main", bound_s=COMMITTED)
def producer_killed_while_pulled_from(case: Case) -> None:
    """kill -9 of the producer while its blocks are read."""
    prompt = case.prompt(LONG)
    expected = case.reference(prompt)
    handoffs = [case.handoff(prompt) for _ in case.sides]
    if case.is_kvlease:
        with relay_to(handoffs[0]) as relay, once(case.producer.kill) as kill:
            relay.drops[messages.Commit] = FOREVER  # whatever was read by then, nothing is proven
            relay.on[messages.Welcome] = kill
            case.ask_each(prompt, [through(relay, handoff) for handoff in handoffs], POLICY, expected)
    else:
        with once(case.producer.kill) as kill, ThreadPoolExecutor(len(case.sides)) as pool:
            asked = [ask_at_once(side, pool, prompt, one) for side, one in zip(case.sides, handoffs, strict=True)]
            wait_until(lambda: any(has_blocks(side.consumer) for side in case.sides), "blocks are there to pull into")
            kill(None)
            for side, future in zip(case.sides, asked, strict=True):
                side.expect(future.result(), expected, CLEAN)
    case.fleet.restart_producer()


def has_blocks(engine: Engine) -> bool:
    """Whether an engine uses any block."""
    return engine.metrics().total(KV_USAGE) > 0


@row("main", bound_s=COMMITTED, connectors=[KVLEASE])
def producer_killed_before_the_commit(case: Case) -> None:
    """kill -9 of the producer when all bytes are read and the commit is under way."""
    prompt = case.prompt(LONG)
    expected = case.reference(prompt)
    handoffs = [case.handoff(prompt) for _ in case.sides]
    with relay_to(handoffs[0]) as relay, once(case.producer.kill) as kill:
        relay.drops[messages.Commit] = FOREVER
        relay.on[messages.Commit] = kill
        case.ask_each(prompt, [through(relay, handoff) for handoff in handoffs], POLICY, expected)
        case.note(f"{relay.seen[messages.Commit]} commits sent")
    case.fleet.restart_producer()


@row("main")
def producer_frozen_before_the_claim(case: Case) -> None:
    """SIGSTOP of the producer before the consumer has asked, SIGCONT after the answers."""
    prompt = case.prompt(300)
    expected = case.reference(prompt)
    handoffs = [case.handoff(prompt) for _ in case.sides]
    case.producer.freeze()
    frozen_until_refused(case, prompt, handoffs, expected)


@row("main", connectors=[KVLEASE])
def producer_frozen_while_pulled_from(case: Case) -> None:
    """SIGSTOP of the producer while its blocks are read (a frozen process can still be read),
    SIGCONT after the answers.
    """
    prompt = case.prompt(LONG)
    expected = case.reference(prompt)
    handoffs = [case.handoff(prompt) for _ in case.sides]
    with relay_to(handoffs[0]) as relay, once(case.producer.freeze) as freeze:
        relay.on[messages.Welcome] = freeze
        relay.drops[messages.Commit] = FOREVER
        frozen_until_refused(case, prompt, [through(relay, handoff) for handoff in handoffs], expected)


@row("main", connectors=[KVLEASE])
def producer_frozen_before_the_commit(case: Case) -> None:
    """SIGSTOP of the producer when the commit is on its way; SIGCONT after the answers, and then the commit arrives."""
    prompt = case.prompt(LONG)
    expected = case.reference(prompt)
    handoffs = [case.handoff(prompt) for _ in case.sides]
    with relay_to(handoffs[0]) as relay:
        relay.on[messages.Commit] = first_only(case.producer.freeze)  # before it is passed on
        frozen_until_refused(case, prompt, [through(relay, handoff) for handoff in handoffs], expected)
        case.note(f"{relay.seen[messages.Commit]} commits sent")
        wait_until(lambda: case.producer.kv_usage() == 0, "the late commits are handled", 60.0)


@row("main", policies=["fail"], bound_s=UNRENEWED)
def consumer_killed_while_queued(case: Case) -> None:
    """kill -9 of a full consumer that has claimed a lease and not pulled yet; then its restart."""
    (side,) = case.sides
    prompt = case.prompt(300)
    expected = case.reference(prompt)
    with ThreadPoolExecutor(1) as pool:
        with occupied(side.consumer, PLACES):
            handoff = case.handoff(prompt)
            if case.is_kvlease:
                with relay_to(handoff) as relay:
                    asked = ask_at_once(side, pool, prompt, through(relay, handoff))
                    wait_until(lambda: relay.seen[messages.Renewed] > 0, "the claim is renewed")
                    side.consumer.kill()
            else:
                asked = ask_at_once(side, pool, prompt, handoff)
                wait_until(lambda: waiting(side.consumer) > 0, "the request is queued")
                side.consumer.kill()
            case.blocks_from_now()
        side.expect(asked.result(), expected, GONE)
    back_s = wait_until(lambda: case.producer.kv_usage() == 0, "the producer's blocks come back", 60.0)
    side.note(f"the producer's blocks are back {back_s:.1f} s after the kill")
    side.require(back_s <= case.bound_s + 4.0, "the producer's blocks are back late")
    case.fleet.restart_consumer(side.policy)
    case.blocks_from_now(COMMITTED)


@row("main", policies=["recompute"], bound_s=UNRENEWED)
def consumer_killed_while_pulling(case: Case) -> None:
    """kill -9 of the consumer while it reads; then its restart."""
    (side,) = case.sides
    prompt = case.prompt(LONG)
    expected = case.reference(prompt)
    handoff = case.handoff(prompt)
    with ThreadPoolExecutor(1) as pool:
        if case.is_kvlease:
            with relay_to(handoff) as relay, once(side.consumer.kill) as kill:
                relay.drops[messages.Commit] = FOREVER
                relay.on[messages.Welcome] = kill
                asked = ask_at_once(side, pool, prompt, through(relay, handoff))
                side.expect(asked.result(), expected, GONE)
        else:
            asked = ask_at_once(side, pool, prompt, handoff)
            wait_until(lambda: has_blocks(side.consumer), "blocks are there to pull into")
            side.consumer.kill()
            side.expect(asked.result(), expected, GONE_OR_SERVED)  # nothing holds its pull up: it may be done already
    back_s = wait_until(lambda: case.producer.kv_usage() == 0, "the producer's blocks come back", 60.0)
    side.note(f"the producer's blocks are back {back_s:.1f} s after the kill")
    side.require(back_s <= case.bound_s + 4.0, "the producer's blocks are back late")
    case.fleet.restart_consumer(side.policy)
    case.blocks_from_now(COMMITTED)


def waiting(engine: Engine) -> float:
    """How many requests an engine has not started."""
    return engine.metrics().total("vllm:num_requests_waiting")


@row("main", bound_s=COMMITTED)
def producer_restarted_five_times(case: Case) -> None:
    """Five restarts of the producer at its address, with a live handoff from each life used in the next."""
    for _ in range(5):
        prompt = case.prompt(200)
        expected = case.reference(prompt)
        old = [case.handoff(prompt) for _ in case.sides]
        case.fleet.restart_producer()
        case.ask_each(prompt, old, POLICY, expected)
        again = case.prompt(200)
        right = case.reference(again)
        case.ask_each(again, [case.handoff(again) for _ in case.sides], SERVED, right)
