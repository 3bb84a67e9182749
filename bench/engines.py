"""The engine benchmark: two real engines with kvlease, against two with the connector that ships in vLLM.

A is kvlease, B is vLLM's NixlConnector, B' is B without NIXL's progress thread and without core pinning. All three
have the same model, flags, prompts and lease times. Each round visits each pair once, in an order that rotates, so that
a slow minute of the machine falls on all of them (see `engines_pair.py`).
"""

import math
import shutil
import time
from dataclasses import asdict
from typing import Any

import msgspec

from bench.engines_findings import measurements_of
from bench.engines_load import Joined, Stream, free_memory_gib, hand_over, handoffs_of, idle_cpu, requests_during
from bench.engines_pair import CONTENDERS, LEASE_S, ROOT, Pair, pairs_of
from bench.measure import Findings, Show
from devtools.model import ensure_model
from devtools.prompts import PromptMaker

PROMPT_TOKENS = 15 * 128 + 1
"""16 blocks, 94 MB, all but the last token of them in the producer's prefix cache once it has seen the prompt."""
STREAM_PROMPT_TOKENS = 32
LOG_DIR = ROOT / ".cache" / "bench"

ABOUT = f"""\
Two real engines, a producer and a consumer (one core each on a machine with two), run SmolLM2-135M in float32. A is
kvlease, B the NixlConnector that ships in vLLM, B' the same connector with NIXL's progress thread and its core
pinning switched off by `devtools/quiet_nixl.py`. Model, flags, prompts and lease times ({LEASE_S} s) are equal. The
three pairs live side by side, two of them stopped by SIGSTOP while the third is measured; visits alternate, and their
order rotates. In all of them `os.sched_yield` sleeps a moment (`devtools/engine_site`), because vLLM's processes wait
for each other by spinning on it, and on a machine with fewer cores than engines that would be most of what is measured.

* *Idle*: CPU time of the busier of the two workers, after both engines were used and while they hold nothing.
* *Handover*: a prompt of {PROMPT_TOKENS} tokens, all but the last one in the producer's prefix cache, is prefilled;
  then the consumer, which has no prefix cache, is asked for one token. Timed by the client, from that request to its
  answer. Part of it is no connector's: the HTTP request and one step of the model, which is what the producer's own
  answer to the same request takes.
* *Decode gap*: time between tokens of one stream on the consumer, first left alone, then while another request with a
  {PROMPT_TOKENS}-token handoff arrives every half second. In between the handoffs exist already, so that the other
  engine steps to hold their leases: *leases out*. *Nothing pulled* is a stream on the producer, with requests that find
  all but the last token in its own prefix cache: what the model's step with a long request costs a stream when no
  connector has any part in it.
* *Pulled whole*: loads and bytes that the consumer counted. A load that fails is an error here, never recomputed.
"""


class Plan(msgspec.Struct, frozen=True):
    """How much of everything one run does."""

    rounds: int = 4
    settle_s: float = 2.5
    """Before the idle engines are looked at: vLLM's workers look for work for about a second after a step."""
    idle_s: float = 5.0
    handovers: int = 10
    quiet_s: float = 8.0
    leased_s: float = 3.0
    pulls: int = 16
    pull_every_s: float = 0.5


class Prompts(msgspec.Struct, frozen=True):
    """Token ids: what is handed over, and what the stream starts from."""

    long: list[int]
    short: list[int]

    @classmethod
    def of_our_model(cls) -> "Prompts":
        """The same ones in every run."""
        maker = PromptMaker(ensure_model())
        return cls(
            maker.prompt_of(PROMPT_TOKENS, seed=1).token_ids, maker.prompt_of(STREAM_PROMPT_TOKENS, seed=2).token_ids
        )


QUICK = Plan(rounds=1, idle_s=2.0, handovers=4, quiet_s=3.0, pulls=6)


def measure(quick: bool, show: Show) -> Findings:
    """About twenty minutes on two cores; with `quick` a third of that, good for a look and not for a claim."""
    plan = QUICK if quick else Plan()
    shutil.rmtree(LOG_DIR, ignore_errors=True)
    samples: dict[str, Any] = {
        "plan": msgspec.to_builtins(plan),
        "prompt_tokens": PROMPT_TOKENS,
        "contenders": {c.key: {"title": c.title, "visits": []} for c in CONTENDERS},
        "free_memory_gib": free_memory_gib(),
    }
    with pairs_of(CONTENDERS, LOG_DIR, show) as pairs:
        prompts = Prompts.of_our_model()
        visits_done, visits = 0, plan.rounds * len(pairs)
        for number in range(plan.rounds):
            for pair in _rotated(pairs, number):
                show("rounds", visits_done / visits, f"round {number + 1} of {plan.rounds}: {pair.contender.title}")
                seen = visit(pair, prompts, plan, number)
                samples["contenders"][pair.contender.key]["start_s"] = pair.start_s
                samples["contenders"][pair.contender.key]["visits"].append(seen)
                visits_done += 1
        show("rounds", 1.0, "stopping the engines")
    return Findings(measurements=measurements_of(samples), samples=samples, about=ABOUT)


def _rotated(pairs: list[Pair], by: int) -> list[Pair]:
    return [pairs[(index + by) % len(pairs)] for index in range(len(pairs))]


def visit(pair: Pair, prompts: Prompts, plan: Plan, number: int) -> dict[str, Any]:
    """Everything that is measured of one pair in one round, which is `number`."""
    long, short = prompts.long, prompts.short
    with pair.awake():
        began = time.monotonic()
        warm_up = [asdict(hand_over(pair, long)) for _ in range(2)]  # the very first one also computes the prompt
        pair.wait_idle()
        time.sleep(plan.settle_s)
        idle = idle_cpu(pair, plan.idle_s)
        before = pair.counted()
        handovers = [asdict(hand_over(pair, long)) for _ in range(plan.handovers)]
        gaps = _gaps(pair, plan, long, short)
        settle_s = pair.wait_idle()
        counted = pair.counted().since(before)
        return {
            "round": number,
            "seconds": time.monotonic() - began,
            "warm_up": warm_up,
            "idle": idle,
            "handovers": handovers,
            **gaps,
            "settle_s": settle_s,
            "counted": asdict(counted),
        }


def _gaps(pair: Pair, plan: Plan, long: list[int], short: list[int]) -> dict[str, Any]:
    """A stream on the consumer, left alone for a while, then beside leases that are out, then with pulls; one on the
    producer, with what it has cached.

    The time in which those leases are granted is not counted.
    """
    with Stream(pair.consumer, short).running() as stream:
        alone_from_s = stream.now_s()
        time.sleep(plan.quiet_s)
        alone_to_s = stream.now_s()
        handoffs = handoffs_of(pair, long, plan.pulls)
        leased_from_s = stream.now_s()
        time.sleep(plan.leased_s)
        leased_to_s = stream.now_s()
        pulls = requests_during(stream, long, handoffs, plan.pull_every_s)
    with Stream(pair.producer, short).running() as cached_stream:
        cached = requests_during(cached_stream, long, [None] * plan.pulls, plan.pull_every_s)
    return {
        "gaps_alone_s": stream.gaps_s(alone_from_s, alone_to_s),
        "gaps_leased_s": stream.gaps_s(leased_from_s, leased_to_s),
        "gaps_pulling_s": _gaps_during(stream, pulls),
        "gaps_cached_s": _gaps_during(cached_stream, cached),
        "pulls": [asdict(pull) for pull in pulls],
    }


def _gaps_during(stream: Stream, requests: list[Joined]) -> list[float]:
    """From the first request to the last answer."""
    ends = [one.sent_at_s + one.took_s for one in requests if not math.isnan(one.took_s)]
    return stream.gaps_s(requests[0].sent_at_s, max(ends, default=requests[-1].sent_at_s))
