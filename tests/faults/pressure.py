"""Rows: too few blocks on either side. The fleet's engines have 23 blocks of 32 tokens each."""

from __future__ import annotations

from tests.engines.support import together
from tests.faults.rows import COMMITTED, UNCLAIMED, Case, Side, row
from tests.faults.verdict import SERVED

REQUESTS = 20
PREEMPTIONS = "vllm:num_preemptions_total"


def _handed_over(case: Case, side: Side, prompt: list[int], expected: list[int], max_tokens: int) -> None:
    side.expect(side.ask(prompt, case.handoff(prompt), max_tokens), expected, SERVED)


@row("small", bound_s=COMMITTED)
def both_too_small_for_twenty(case: Case) -> None:
    """20 requests at once through two engines that hold four of them."""
    prompts = [case.prompt(150) for _ in range(REQUESTS)]
    expected = together([lambda prompt=prompt: case.reference(prompt, 12) for prompt in prompts])
    for side in case.sides:
        together([
            lambda side=side, prompt=prompt, right=right: _handed_over(case, side, prompt, right, 12)
            for prompt, right in zip(prompts, expected, strict=True)
        ])  # fmt: skip


@row("small", bound_s=UNCLAIMED, policies=["fail"])
def producer_full_of_unused_leases(case: Case) -> None:
    """12 prefills whose handoffs nobody uses, on a producer that holds four: they wait for leases to run out."""
    prompts = [case.prompt(150) for _ in range(12)]
    together([lambda prompt=prompt: case.handoff(prompt) for prompt in prompts])
    case.blocks_from_now()


@row("small", bound_s=COMMITTED)
def preempted_after_the_load(case: Case) -> None:
    """Four requests that fit when they are loaded and grow until the consumer must preempt."""
    prompts = [case.prompt(120) for _ in range(4)]
    expected = together([lambda prompt=prompt: case.reference(prompt, 150) for prompt in prompts])
    for side in case.sides:
        before = side.consumer.metrics().total(PREEMPTIONS)
        together([
            lambda side=side, prompt=prompt, right=right: _handed_over(case, side, prompt, right, 150)
            for prompt, right in zip(prompts, expected, strict=True)
        ])  # fmt: skip
        preempted = side.consumer.metrics().total(PREEMPTIONS) - before
        side.note(f"{preempted:.0f} preemptions")
        side.require(preempted > 0, "nothing was preempted: the row shows nothing")
