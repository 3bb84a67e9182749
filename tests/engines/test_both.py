"""Both roles on both engines, selected by module path under the name ``NixlConnector``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from devtools.engines import Engine, EngineSpec, engine_set
from devtools.prompts import PromptMaker
from tests.engines.support import NO_PREFIX_CACHE, check_settled, hand_over, new_outcomes, outcomes, spec


def alias(name: str) -> EngineSpec:
    plain = spec(name, "kv_both", [NO_PREFIX_CACHE])
    named = {"kv_connector": "NixlConnector", "kv_connector_module_path": "kvlease.connector"}
    return replace(plain, kv_transfer={**(plain.kv_transfer or {}), **named})


@pytest.fixture(scope="module")
def pair(log_dir: Path) -> Iterator[tuple[Engine, Engine]]:
    with engine_set([alias("one"), alias("two")], log_dir) as engines:
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


def test_nothing_is_left_behind(pair: tuple[Engine, Engine], prompts: PromptMaker) -> None:
    check_settled(pair[0], [pair[1]], prompts, within_s=5.0)
