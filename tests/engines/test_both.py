"""Both roles on both engines, selected by module path under the name ``NixlConnector``; leases of two seconds."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from devtools.engines import Engine, EngineSpec, completion_body, engine_set
from devtools.prompts import PromptMaker
from tests.engines.support import (
    NO_PREFIX_CACHE,
    check_settled,
    hand_over,
    handoff_of,
    new_outcomes,
    outcomes,
    spec,
    wait_until,
)


def alias(name: str, policy: str) -> EngineSpec:
    plain = spec(name, "kv_both", [NO_PREFIX_CACHE], policy=policy, lease_duration_s=2.0)
    named = {"kv_connector": "NixlConnector", "kv_connector_module_path": "kvlease.connector"}
    return replace(plain, kv_transfer={**(plain.kv_transfer or {}), **named})


@pytest.fixture(scope="module")
def pair(log_dir: Path) -> Iterator[tuple[Engine, Engine]]:
    with engine_set([alias("one", "fail"), alias("two", "recompute")], log_dir) as engines:
        yield engines[0], engines[1]


@pytest.mark.parametrize("length", [100, 700])
@pytest.mark.parametrize("turn", [0, 1], ids=["one-to-two", "two-to-one"])
def test_each_hands_over_to_the_other(
    pair: tuple[Engine, Engine], prompts: PromptMaker, length: int, turn: int
) -> None:
    producer, consumer = pair[turn], pair[1 - turn]
    prompt = prompts.prompt_of(length, seed=length + turn).token_ids
    reference = consumer.complete(prompt, 16)
    before = outcomes(consumer)
    assert hand_over(producer, consumer, prompt).token_ids == reference.token_ids
    assert new_outcomes(consumer, before) == {"done": 1}


def test_an_engine_that_is_handed_its_own_lease_serves_the_request(
    pair: tuple[Engine, Engine], prompts: PromptMaker
) -> None:
    engine = pair[0]
    prompt = prompts.prompt_of(200, seed=9).token_ids
    reference = engine.complete(prompt, 16)
    before = outcomes(engine)
    assert hand_over(engine, engine, prompt).token_ids == reference.token_ids
    assert new_outcomes(engine, before) == {"own_lease": 1}


@pytest.mark.parametrize("turn", [0, 1], ids=["recompute", "fail"])
def test_a_handoff_delivered_five_seconds_after_a_lease_of_two(
    pair: tuple[Engine, Engine], prompts: PromptMaker, turn: int
) -> None:
    producer, consumer = pair[turn], pair[1 - turn]
    prompt = prompts.prompt_of(300, seed=1).token_ids
    expected = consumer.complete(prompt, 8).token_ids
    handoff = handoff_of(producer, prompt)
    time.sleep(5.0)
    wait_until(lambda: producer.kv_usage() == 0, "the blocks are back, and may be somebody else's", 2.0)
    before, log_from = outcomes(consumer), consumer.process.log_len_bytes()
    response = consumer.post("/v1/completions", completion_body(prompt, 8, kv_transfer_params=handoff))
    if consumer is pair[1]:
        assert response.json()["choices"][0]["token_ids"] == expected
    else:
        assert response.status_code == 500, response.text
    assert new_outcomes(consumer, before) == {"failed/gone_expired": 1}
    assert "cause gone_expired" in consumer.log_text(log_from)


def test_nothing_is_left_behind(pair: tuple[Engine, Engine], prompts: PromptMaker) -> None:
    check_settled(pair[0], [pair[1]], prompts, within_s=5.0)
