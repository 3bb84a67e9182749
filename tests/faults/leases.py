"""Rows: the lease runs out at the worst moment, and heartbeats are lost."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

from kvlease.core import messages
from tests.engines.clients import occupied, through
from tests.engines.support import together, wait_until
from tests.faults.fleets import BEAT_S, CLAIM_S, KVLEASE, LEASE_S, LIFETIME_S, PLACES, SMALL_BLOCK, SMALL_BLOCKS
from tests.faults.rows import COMMITTED, UNCLAIMED, Case, row
from tests.faults.signals import FOREVER, LONG, ask_at_once, first_only, relay_to, waiting
from tests.faults.verdict import POLICY, SERVED

GIVE_UP_S = 90.0


SHORT = 300
"""Tokens, for the fleet with few blocks: 14 MB, in 4 chunks."""


def overwritten(case: Case) -> None:
    """Wait until the producer of the small fleet holds nothing, and fill all its blocks with something else."""
    wait_until(lambda: case.producer.kv_usage() == 0, "the leases run out", GIVE_UP_S)
    prompts = [case.prompt(SMALL_BLOCK - 1) for _ in range(SMALL_BLOCKS)]
    together([lambda prompt=prompt: case.reference(prompt, 1) for prompt in prompts])


@row("main", bound_s=UNCLAIMED)
def handoff_never_used(case: Case) -> None:
    """Handoffs that nobody uses."""
    prompt = case.prompt(300)
    case.reference(prompt)
    for _ in range(5):
        case.handoff(prompt)
    case.blocks_from_now()


@row("small")
def handoff_used_after_its_lease(case: Case) -> None:
    """The handoff is used when its lease has run out and its blocks hold another prompt."""
    prompt = case.prompt(SHORT)
    expected = case.reference(prompt)
    handoffs = [case.handoff(prompt) for _ in case.sides]
    overwritten(case)
    case.ask_each(prompt, handoffs, POLICY, expected)


@row("main", connectors=[KVLEASE])
def lease_ends_while_queued(case: Case) -> None:
    """Heartbeats are cut for longer than the lease while the consumer is full."""
    prompt = case.prompt(300)
    expected = case.reference(prompt)
    for side in case.sides:
        handoff = case.handoff(prompt)
        with relay_to(handoff) as relay, ThreadPoolExecutor(1) as pool:
            relay.drops[messages.Renew] = FOREVER
            with occupied(side.consumer, PLACES):
                asked = ask_at_once(side, pool, prompt, through(relay, handoff))
                wait_until(lambda: relay.seen[messages.Renew] > 1, "heartbeats are lost")
                wait_until(lambda: case.producer.kv_usage() == 0, "the lease runs out")
            side.expect(asked.result(), expected, POLICY)


@row("main")
def queued_for_longer_than_the_lease(case: Case) -> None:
    """The consumer is full for longer than a lease lasts without heartbeats; nothing is cut."""
    prompt = case.prompt(300)
    expected = case.reference(prompt)
    with ThreadPoolExecutor(len(case.sides)) as pool:
        with ExitStack() as stack:
            for side in case.sides:
                stack.enter_context(occupied(side.consumer, PLACES))
            asked = [ask_at_once(side, pool, prompt, case.handoff(prompt)) for side in case.sides]
            began = time.monotonic()
            wait_until(lambda: all(waiting(side.consumer) > 0 for side in case.sides), "they are queued", GIVE_UP_S)
            wait_until(lambda: time.monotonic() - began > LEASE_S + CLAIM_S, "time passes", GIVE_UP_S)
        for side, future in zip(case.sides, asked, strict=True):
            side.expect(future.result(), expected, SERVED)


@row("main", connectors=[KVLEASE])
def lifetime_ends_while_queued(case: Case) -> None:
    """The consumer is full for longer than a lease may live at all; every heartbeat arrives."""
    prompt = case.prompt(300)
    expected = case.reference(prompt)
    with ThreadPoolExecutor(len(case.sides)) as pool:
        with ExitStack() as stack:
            for side in case.sides:
                stack.enter_context(occupied(side.consumer, PLACES))
            granted = time.monotonic()
            asked = [ask_at_once(side, pool, prompt, case.handoff(prompt)) for side in case.sides]
            wait_until(lambda: case.producer.kv_usage() == 0, "the lifetime ends", GIVE_UP_S)
            held_s = time.monotonic() - granted
        case.note(f"held for {held_s:.1f} s")
        for side, future in zip(case.sides, asked, strict=True):
            side.require(held_s > LIFETIME_S - 2 * BEAT_S, f"the lease ended before its {LIFETIME_S:.0f} s")
            side.expect(future.result(), expected, POLICY)


@row("small", connectors=[KVLEASE])
def lease_ends_while_pulled(case: Case) -> None:
    """The consumer is frozen when its pull begins, and thawed when the lease has run out and the blocks hold another
    prompt.
    """
    for side in case.sides:
        prompt = case.prompt(SHORT)
        expected = case.reference(prompt)
        handoff = case.handoff(prompt)
        with relay_to(handoff) as relay, ThreadPoolExecutor(1) as pool:
            relay.on[messages.Welcome] = first_only(side.consumer.freeze)
            try:
                asked = ask_at_once(side, pool, prompt, through(relay, handoff))
                wait_until(lambda: relay.seen[messages.Welcome] > 0, "the pull begins", GIVE_UP_S)
                overwritten(case)
            finally:
                side.consumer.thaw()
            side.expect(asked.result(), expected, POLICY)
            side.require(relay.seen[messages.Commit] > 0, "nothing was read in the end: the row shows nothing")


@row("main", connectors=[KVLEASE])
def lease_ends_before_the_commit(case: Case) -> None:
    """All bytes are read; the commit is withheld until the lease has run out."""
    for side in case.sides:
        prompt = case.prompt(LONG)
        expected = case.reference(prompt)
        handoff = case.handoff(prompt)
        with relay_to(handoff) as relay, ThreadPoolExecutor(1) as pool:
            relay.drops.update({messages.Commit: FOREVER, messages.Renew: FOREVER})
            asked = ask_at_once(side, pool, prompt, through(relay, handoff))
            wait_until(lambda: relay.seen[messages.Commit] > 0, "the commit is sent", GIVE_UP_S)
            wait_until(lambda: case.producer.kv_usage() == 0, "the lease runs out", GIVE_UP_S)
            relay.drops[messages.Commit] = 0
            side.expect(asked.result(), expected, POLICY)


@row("main", connectors=[KVLEASE])
def heartbeats_lost_for_less_than_the_lease(case: Case) -> None:
    """Three heartbeats in a row are lost while the consumer is full."""
    prompt = case.prompt(300)
    expected = case.reference(prompt)
    for side in case.sides:
        handoff = case.handoff(prompt)
        with relay_to(handoff) as relay, ThreadPoolExecutor(1) as pool:
            relay.drops[messages.Renew] = 3
            with occupied(side.consumer, PLACES):
                asked = ask_at_once(side, pool, prompt, through(relay, handoff))
                wait_until(lambda: relay.seen[messages.Renewed] > CLAIM_S / BEAT_S, "it is renewed again", GIVE_UP_S)
            side.expect(asked.result(), expected, SERVED)


@row("main", bound_s=COMMITTED, connectors=[KVLEASE])
def replies_lost_and_requests_repeated(case: Case) -> None:
    """One reply of each kind is lost, every request of a load arrives a second time."""
    prompt = case.prompt(300)
    expected = case.reference(prompt)
    for side in case.sides:
        handoff = case.handoff(prompt)
        with relay_to(handoff) as relay:
            relay.drops.update({messages.Granted: 1, messages.Welcome: 1, messages.Committed: 1})
            relay.repeats.update({messages.Acquire: 1, messages.Commit: 1})
            side.expect(side.ask(prompt, through(relay, handoff)), expected, SERVED)
            wait_until(lambda: not any(relay.repeats.values()), "all was repeated")
