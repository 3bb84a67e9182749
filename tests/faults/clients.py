"""Rows: what clients do to a fleet."""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor

from tests.engines.clients import CONNECTION_LOST, NO_ANSWER, ask
from tests.faults.rows import COMMITTED, UNCLAIMED, Case, Side, row
from tests.faults.verdict import REFUSED, SERVED

CUT_REQUESTS, CUT_AT_ONCE = 200, 12
HUNG_UP = frozenset({NO_ANSWER, CONNECTION_LOST})
SAMPLED = {"n": 3, "temperature": 0.8, "seed": 11}


@row("main", policies=["fail"], bound_s=UNCLAIMED)
def two_hundred_cut_off(case: Case) -> None:
    """200 requests of which each is cut off at a random moment of its prefill, wait, pull or answer (seeded)."""
    (side,) = case.sides
    rng = random.Random(20)
    prompts = [case.prompt(length) for length in (10, 40, 130, 260)]
    expected = [case.reference(prompt, 24) for prompt in prompts]
    # From "at once" to longer than the longest takes, evenly in the logarithm; every fifth in its prefill already.
    plan = [(index % len(prompts), index % 5 == 0, 0.01 * 800 ** rng.random()) for index in range(CUT_REQUESTS)]
    with ThreadPoolExecutor(CUT_AT_ONCE) as pool:
        ends = list(pool.map(lambda one: _cut(case, side, prompts[one[0]], expected[one[0]], *one[1:]), plan))
    case.blocks_from_now()
    side.note(f"{ends.count('prefill')} cut off in their prefill, {ends.count('decode')} after it")


def _cut(case: Case, side: Side, prompt: list[int], expected: list[int], in_prefill: bool, after_s: float) -> str:
    """Prefill here, decode there, and hang up ``after_s`` after the beginning of one of them; which one it was."""
    first_s = after_s if in_prefill else case.patience_s
    first = ask(case.producer, prompt, {"do_remote_decode": True}, 1, timeout_s=first_s)
    if first.status in HUNG_UP:
        return "prefill"
    handoff = json.loads(first.text)["kv_transfer_params"]
    answer = ask(side.consumer, prompt, handoff, 24, timeout_s=case.patience_s if in_prefill else after_s)
    if answer.status in HUNG_UP:
        return "decode"
    side.expect(answer, expected, SERVED)
    return ""


@row("main", bound_s=COMMITTED)
def three_samples(case: Case) -> None:
    """n = 3: three readers of one lease."""
    prompt = case.prompt(200)
    expected = case.reference(prompt, 12, **SAMPLED)
    for side in case.sides:
        side.expect(side.ask(prompt, case.handoff(prompt), 12, **SAMPLED), expected, SERVED)


@row("main", bound_s=UNCLAIMED)
def three_samples_cut_off(case: Case) -> None:
    """n = 3, cut off at eight moments from at once to its answer (two places: the third sample is still queued)."""
    prompt = case.prompt(200)
    expected = case.reference(prompt, 40, **SAMPLED)
    for side in case.sides:
        for step in range(8):
            handoff = case.handoff(prompt)
            answer = ask(side.consumer, prompt, handoff, 40, timeout_s=0.02 * 2.2**step, **SAMPLED)
            if answer.status not in HUNG_UP:
                side.expect(answer, expected, SERVED)
    case.blocks_from_now()


@row("main", bound_s=COMMITTED)
def prompt_of_one_token(case: Case) -> None:
    """A prompt of one token: nothing is left for the consumer to compute but the next."""
    for side in case.sides:
        prompt = case.prompt(1)
        expected = case.reference(prompt)
        side.expect(side.ask(prompt, case.handoff(prompt)), expected, SERVED)


@row("main", bound_s=COMMITTED)
def first_token_ends_it(case: Case) -> None:
    """The first token is the end of the text, on the producer as on the consumer."""
    prompt = case.prompt(129)
    ends = {"logit_bias": {"2": 100}}
    expected = case.reference(prompt, 8, **ends)
    for side in case.sides:
        side.require(len(expected) <= 1, f"the text does not end at once: {expected}")
        side.expect(side.ask(prompt, case.handoff(prompt, **ends), **ends), expected, SERVED)


@row("main", bound_s=UNCLAIMED)
def prompt_beyond_the_limit(case: Case) -> None:
    """A handoff with a prompt that is longer than the model takes: refused, and its lease let go."""
    prompt = case.prompt(130)
    for side in case.sides:
        side.expect(side.ask(case.prompt(8193), case.handoff(prompt)), None, REFUSED)
    case.blocks_from_now()


@row("main", bound_s=UNCLAIMED)
def max_tokens_beyond_the_limit(case: Case) -> None:
    """A handoff with more tokens asked for than the engine can hold: refused, and its lease let go."""
    prompt = case.prompt(130)
    for side in case.sides:
        side.expect(side.ask(prompt, case.handoff(prompt), 8193), None, REFUSED)
    case.blocks_from_now()


@row("small", bound_s=COMMITTED)
def answer_that_fills_the_engine(case: Case) -> None:
    """As many tokens asked for as the engine can hold, prompt and all: it answers until it is full."""
    prompt = case.prompt(450)
    stubborn = {"ignore_eos": True}
    expected = case.reference(prompt, 512, **stubborn)
    for side in case.sides:
        side.require(len(expected) == 512 - 450, f"it stops after {len(expected)} tokens")
        side.expect(side.ask(prompt, case.handoff(prompt), 512, **stubborn), expected, SERVED)
