"""Two ranks on each side: each pulls its own heads, both commit, and the request hears of it once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from devtools.engines import Engine, EngineSpec, engine_set
from devtools.model import ensure_tiny_model
from devtools.prompts import PromptMaker
from tests.engines.support import NO_PREFIX_CACHE, check_settled, hand_over, new_outcomes, outcomes, spec, together

TWO_RANKS = ["--tensor-parallel-size", "2"]


def two_ranks(name: str, role: str, flags: list[str]) -> EngineSpec:
    plain = spec(name, role, [*TWO_RANKS, *flags])
    return EngineSpec(name, kv_transfer=plain.kv_transfer, flags=plain.flags, model=ensure_tiny_model(), cores="0|1")


@pytest.fixture(scope="module")
def pair(log_dir: Path) -> Iterator[tuple[Engine, Engine]]:
    specs = [two_ranks("producer", "kv_producer", []), two_ranks("consumer", "kv_consumer", [NO_PREFIX_CACHE])]
    with engine_set(specs, log_dir) as engines:
        yield engines[0], engines[1]


@pytest.mark.parametrize("length", [1, 129, 900])
def test_the_text_is_that_of_one_engine(pair: tuple[Engine, Engine], prompts: PromptMaker, length: int) -> None:
    producer, consumer = pair
    prompt = prompts.prompt_of(length, seed=length).token_ids
    reference = consumer.complete(prompt, 16)
    before = outcomes(consumer)
    assert hand_over(producer, consumer, prompt).token_ids == reference.token_ids
    assert new_outcomes(consumer, before) == {"done": 1}
    assert producer.metrics().total("vllm:kvlease_commits_total") > 0


def test_several_at_once(pair: tuple[Engine, Engine], prompts: PromptMaker) -> None:
    producer, consumer = pair
    batch = [prompts.prompt_of(50 + 61 * index, seed=700 + index).token_ids for index in range(8)]
    reference = together([lambda prompt=prompt: consumer.complete(prompt, 8) for prompt in batch])
    handed = together([lambda prompt=prompt: hand_over(producer, consumer, prompt, 8) for prompt in batch])
    assert [one.token_ids for one in handed] == [one.token_ids for one in reference]


def test_nothing_is_left_behind(pair: tuple[Engine, Engine], prompts: PromptMaker) -> None:
    check_settled(pair[0], [pair[1]], prompts, within_s=5.0)
