"""Rows: handoffs that are not what the router thinks they are."""

from __future__ import annotations

import json
import secrets
import socket
import statistics
import time
from contextlib import ExitStack
from typing import Any

from tests.engines.support import together
from tests.faults.adapters import ADAPTERS
from tests.faults.fleets import KVLEASE
from tests.faults.rows import COMMITTED, UNCLAIMED, Case, Side, row
from tests.faults.verdict import POLICY, SERVED

NAMES_THE_LEASE = ("remote_host", "remote_port", "remote_request_id", "remote_engine_id")


def copied(handoff: dict[str, Any]) -> dict[str, Any]:
    """A deep copy."""
    made: dict[str, Any] = json.loads(json.dumps(handoff))
    return made


@row("main", bound_s=COMMITTED)
def replayed(case: Case) -> None:
    """A handoff is used a second time, for the same prompt, after it was committed."""
    prompt = case.prompt(300)
    expected = case.reference(prompt)
    for side in case.sides:
        handoff = case.handoff(prompt)
        for _ in range(2):
            side.expect(side.ask(prompt, copied(handoff)), expected, SERVED)


@row("small", bound_s=COMMITTED)
def replayed_for_another_prompt(case: Case) -> None:
    """A used handoff is used again, for another prompt of equal length."""
    secret, other = case.prompt(300), case.prompt(300)
    expected_secret, expected = case.reference(secret), case.reference(other)
    for side in case.sides:
        handoff = case.handoff(secret)
        side.expect(side.ask(secret, copied(handoff)), expected_secret, SERVED)
        side.expect(side.ask(other, copied(handoff)), expected, SERVED)


@row("main", bound_s=COMMITTED)
def swapped(case: Case) -> None:
    """The handoffs of two prompts of equal length are swapped; then each is used for its own."""
    one, two = case.prompt(300), case.prompt(300)
    expected = [case.reference(one), case.reference(two)]
    for side in case.sides:
        handoffs = [case.handoff(one), case.handoff(two)]
        rounds = [(handoffs[::-1], POLICY)]
        if case.is_kvlease:  # a refused claim ends nothing
            rounds.append((handoffs, SERVED))
        for used, wants in rounds:  # both at once: the leases are young
            calls = [lambda side=side, i=i, used=used: side.ask((one, two)[i], copied(used[i])) for i in range(2)]
            for answer, right in zip(together(calls), expected, strict=True):
                side.expect(answer, right, wants)


@row("main", bound_s=UNCLAIMED)
def other_cache_salt(case: Case) -> None:
    """A handoff is used for the same prompt under the cache salt of another tenant."""
    prompt = case.prompt(300)
    expected = case.reference(prompt)
    for side in case.sides:
        handoff = case.handoff(prompt, cache_salt="tenant-one")
        side.expect(side.ask(prompt, handoff, cache_salt="tenant-two"), expected, POLICY)


@row("small", bound_s=UNCLAIMED)
def other_lora(case: Case) -> None:
    """A handoff that one LoRA adapter computed is used for another adapter; then one for its own."""
    prompt = case.prompt(150)
    for side in case.sides:
        texts = {name: case.reference(prompt, model=name) for name in ADAPTERS}
        side.require(texts[ADAPTERS[0]] != texts[ADAPTERS[1]], "the adapters say the same: the row shows nothing")
        handoff = case.handoff(prompt, model=ADAPTERS[0])
        side.expect(side.ask(prompt, handoff, model=ADAPTERS[1]), texts[ADAPTERS[1]], POLICY)
        handoff = case.handoff(prompt, model=ADAPTERS[1])
        side.expect(side.ask(prompt, handoff, model=ADAPTERS[1]), texts[ADAPTERS[1]], SERVED)


@row("main", bound_s=UNCLAIMED, connectors=[KVLEASE])
def forged_token(case: Case) -> None:
    """One bit of the lease token is flipped."""
    prompt = case.prompt(300)
    expected = case.reference(prompt)
    for side in case.sides:
        handoff = copied(case.handoff(prompt))
        token = bytearray.fromhex(handoff["kvlease"]["token"])
        token[5] ^= 0x10
        handoff["kvlease"]["token"] = token.hex()
        side.expect(side.ask(prompt, handoff), expected, POLICY)


@row("main", bound_s=UNCLAIMED)
def truncated(case: Case) -> None:
    """Four requests at once, and each lacks another of the keys that name the lease and its producer."""
    prompt = case.prompt(140)
    expected = case.reference(prompt)
    handoff = case.handoff(prompt)
    for side in case.sides:
        cut = [{name: value for name, value in copied(handoff).items() if name != key} for key in NAMES_THE_LEASE]
        for answer in together([lambda side=side, params=params: side.ask(prompt, params) for params in cut]):
            side.expect(answer, expected, POLICY)


@row("main", bound_s=UNCLAIMED, connectors=[KVLEASE])
def no_proof(case: Case) -> None:
    """The key that holds the proof is missing: a router that drops what it does not know."""
    prompt = case.prompt(300)
    expected = case.reference(prompt)
    for side in case.sides:
        handoff = case.handoff(prompt)
        del handoff["kvlease"]
        side.expect(side.ask(prompt, handoff), expected, POLICY)


@row("main", bound_s=COMMITTED)
def twice_at_once(case: Case) -> None:
    """Two requests use the same handoff at the same time."""
    prompt = case.prompt(300)
    expected = case.reference(prompt)
    for side in case.sides:
        handoff = case.handoff(prompt)
        calls = [lambda side=side, handoff=handoff: side.ask(prompt, handoff) for _ in range(2)]
        for answer in together(calls):
            side.expect(answer, expected, SERVED)


@row("main", bound_s=UNCLAIMED)
def producer_that_never_existed(case: Case) -> None:
    """The handoff names an engine that never was, at an address where nobody listens."""
    prompt = case.prompt(300)
    expected = case.reference(prompt)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))  # bound and not listening: nobody else can take the port, and it refuses
        made_up = []
        for _ in case.sides:
            handoff = copied(case.handoff(prompt))
            handoff["remote_engine_id"] = "00000000-0000-4000-8000-000000000000"
            handoff["remote_port"] = probe.getsockname()[1]
            if "kvlease" in handoff:
                handoff["kvlease"]["incarnation"] = secrets.token_hex(16)
            made_up.append(handoff)
        case.ask_each(prompt, made_up, POLICY, expected)


@row("main", bound_s=UNCLAIMED)
def engine_id_that_never_existed(case: Case) -> None:
    """The handoff names an engine that never was, at the address of a living one."""
    prompt = case.prompt(300)
    expected = case.reference(prompt)
    made_up = []
    for _ in case.sides:
        handoff = copied(case.handoff(prompt))
        handoff["remote_engine_id"] = "00000000-0000-4000-8000-000000000000"
        if "kvlease" in handoff:
            handoff["kvlease"]["incarnation"] = secrets.token_hex(16)
        made_up.append(handoff)
    case.ask_each(prompt, made_up, POLICY, expected)


GOOD_ROUNDS = 7
RATIO_BOUND, RATIO_SLACK_S = 3.0, 1.0


@row("main", bound_s=UNCLAIMED)
def four_silent_peers(case: Case) -> None:
    """Four ports accept connections and never answer; handoffs of a good peer come at the same time."""
    bad = case.prompt(40)
    expected = case.reference(bad)
    for side in case.sides:
        with ExitStack() as stack:
            ports = []
            for _ in range(4):
                listener = stack.enter_context(socket.socket())
                listener.bind(("127.0.0.1", 0))
                listener.listen(64)
                ports.append(listener.getsockname()[1])
            alone = [_good(case, side) for _ in range(GOOD_ROUNDS)]
            beside: list[float] = []
            handoffs = [_elsewhere(case.handoff(bad), port) for port in ports]

            def good(into: list[float] = beside, side: Side = side) -> None:
                into.extend(_good(case, side) for _ in range(GOOD_ROUNDS))

            answers = together(
                [good, *(lambda side=side, handoff=handoff: side.ask(bad, handoff) for handoff in handoffs)]
            )
            for answer in answers[1:]:
                side.expect(answer, expected, POLICY)
        quiet_s, busy_s = statistics.median(alone), statistics.median(beside)
        side.note(f"a good handover takes {busy_s:.2f} s instead of {quiet_s:.2f} s (medians of {GOOD_ROUNDS})")
        side.require(
            busy_s < RATIO_BOUND * quiet_s + RATIO_SLACK_S, f"a good handover is slower: {busy_s / quiet_s:.1f} times"
        )


def _elsewhere(handoff: dict[str, Any], port: int) -> dict[str, Any]:
    made = copied(handoff)
    made["remote_port"] = port
    made["remote_engine_id"] = f"00000000-0000-4000-8000-{port:012d}"
    if "kvlease" in made:
        made["kvlease"]["incarnation"] = secrets.token_hex(16)
    return made


def _good(case: Case, side: Side) -> float:
    """Seconds that a good handover takes the consumer."""
    prompt = case.prompt(40)
    expected = case.reference(prompt, 2)
    handoff = case.handoff(prompt)
    began = time.monotonic()
    answer = side.ask(prompt, handoff, 2)
    side.expect(answer, expected, SERVED)
    return time.monotonic() - began
