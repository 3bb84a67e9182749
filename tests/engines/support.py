"""What the engine tests share: settings, requests, and what must hold after every fault."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from devtools.engines import Completion, Engine, EngineSpec, completion_body
from devtools.metrics import LOADS
from devtools.prompts import PromptMaker

NO_PREFIX_CACHE = "--no-enable-prefix-caching"

PATIENCE = {"acquire_timeout_s": 8.0, "commit_timeout_s": 8.0, "peer_timeout_s": 6.0}
"""Three engines on two cores keep each other, and a relay between them, waiting for a second and more. No
test of a lost message may depend on that.
"""


def spec(
    name: str, role: str, flags: Iterable[str] = (), *, policy: str = "recompute", port: int = 0, **knobs: Any
) -> EngineSpec:
    """One engine with our connector, on loopback."""
    transfer = {
        "kv_connector": "KVLeaseConnector",
        "kv_role": role,
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": {"host": "127.0.0.1", "port": port, **PATIENCE, **knobs},
    }
    return EngineSpec(name, kv_transfer=transfer, flags=tuple(flags))


def wait_until(done: Callable[[], bool], what: str, timeout_s: float = 20.0) -> float:
    """Poll a real engine until ``done``; the seconds it took."""
    started = time.monotonic()
    while not done():
        assert time.monotonic() - started < timeout_s, f"not within {timeout_s} s: {what}"
        time.sleep(0.02)
    return time.monotonic() - started


def handoff_of(producer: Engine, prompt: list[int], **body: Any) -> dict[str, Any]:
    """Prefill on ``producer``; its handoff."""
    params = producer.prefill(prompt, **body).kv_transfer_params
    assert params is not None
    return params


def hand_over(producer: Engine, consumer: Engine, prompt: list[int], max_tokens: int = 16, **body: Any) -> Completion:
    """What a router does: prefill here, decode there."""
    return consumer.complete(prompt, max_tokens, kv_transfer_params=handoff_of(producer, prompt), **body)


def together(calls: Iterable[Callable[[], Any]]) -> list[Any]:
    """Run all calls at once; their results in order."""
    calls = list(calls)
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


def outcomes(consumer: Engine) -> dict[str, float]:
    """Loads of ``consumer`` so far, as ``outcome`` or ``outcome/cause``."""
    counted: dict[str, float] = {}
    for labels, value in consumer.metrics().samples.get(LOADS, ()):
        if value:
            counted["/".join(filter(None, (labels["outcome"], labels["cause"])))] = value
    return counted


def new_outcomes(consumer: Engine, before: Mapping[str, float]) -> dict[str, float]:
    """Which outcomes were counted since ``before``."""
    after = outcomes(consumer)
    return {key: after[key] - before.get(key, 0) for key in after if after[key] != before.get(key, 0)}


def check_settled(producer: Engine, consumers: Iterable[Engine], prompts: PromptMaker, within_s: float) -> None:
    """After a fault: all engines healthy, no blocks held, and the next ordinary handoff is right."""
    consumers = list(consumers)
    for engine in (producer, *consumers):
        assert engine.healthy(5.0), engine.process.log_tail()
        wait_until(lambda engine=engine: engine.kv_usage() == 0, f"{engine.name} gives its blocks back", within_s)
    for index, consumer in enumerate(consumers):
        prompt = prompts.prompt_of(60, seed=77_000 + index).token_ids
        before, log_from = outcomes(consumer), consumer.process.log_len_bytes()
        body = completion_body(prompt, 4, kv_transfer_params=handoff_of(producer, prompt))
        response = consumer.post("/v1/completions", body)
        seen = (response.status_code, new_outcomes(consumer, before))
        assert seen == (200, {"done": 1}), response.text + consumer.log_text(log_from)
        assert response.json()["choices"][0]["token_ids"] == consumer.complete(prompt, 4).token_ids
