"""Chunked prefill on both sides, and a consumer with prefix caching: it pulls only what it does not have.

All that is pulled is compared with the producer's checksums, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from devtools.engines import Engine, engine_set
from devtools.metrics import BYTES_PULLED
from devtools.prompts import PromptMaker
from tests.engines.support import check_settled, hand_over, new_outcomes, outcomes, spec, together

CHUNKED = ["--max-num-batched-tokens", "256", "--block-size", "32"]


@pytest.fixture(scope="module")
def pair(log_dir: Path) -> Iterator[tuple[Engine, Engine]]:
    specs = [
        spec("producer", "kv_producer", CHUNKED, kv_checksum="full"),
        spec("consumer", "kv_consumer", CHUNKED, kv_checksum="full"),
    ]
    with engine_set(specs, log_dir) as engines:
        yield engines[0], engines[1]


@pytest.mark.parametrize("length", [1, 31, 32, 33, 257, 1500])
def test_the_text_is_that_of_one_engine(pair: tuple[Engine, Engine], prompts: PromptMaker, length: int) -> None:
    producer, consumer = pair
    prompt = prompts.prompt_of(length, seed=length).token_ids
    reference = producer.complete(prompt, 16)
    before = outcomes(consumer)
    assert hand_over(producer, consumer, prompt).token_ids == reference.token_ids
    assert new_outcomes(consumer, before) == {"done": 1}


def test_a_repeated_prompt_is_not_pulled_again(pair: tuple[Engine, Engine], prompts: PromptMaker) -> None:
    producer, consumer = pair
    prompt = prompts.prompt_of(333, seed=5).token_ids
    first = hand_over(producer, consumer, prompt)
    pulled = consumer.metrics().total(BYTES_PULLED)
    assert pulled > 0
    assert hand_over(producer, consumer, prompt).token_ids == first.token_ids
    page_bytes = 32 * 30 * 2 * 3 * 64 * 4
    assert consumer.metrics().total(BYTES_PULLED) - pulled <= page_bytes  # the last, partial block at most


def test_a_longer_prompt_pulls_only_what_is_new(pair: tuple[Engine, Engine], prompts: PromptMaker) -> None:
    producer, consumer = pair
    prompt = prompts.prompt_of(640, seed=6).token_ids
    reference = producer.complete(prompt, 16)
    hand_over(producer, consumer, prompt[:320], 1)
    pulled = consumer.metrics().total(BYTES_PULLED)
    assert hand_over(producer, consumer, prompt).token_ids == reference.token_ids
    assert consumer.metrics().total(BYTES_PULLED) - pulled == 10 * 32 * 30 * 2 * 3 * 64 * 4


def test_several_at_once(pair: tuple[Engine, Engine], prompts: PromptMaker) -> None:
    producer, consumer = pair
    batch = [prompts.prompt_of(100 + 97 * index, seed=500 + index).token_ids for index in range(8)]
    reference = together([lambda prompt=prompt: producer.complete(prompt, 8) for prompt in batch])
    handed = together([lambda prompt=prompt: hand_over(producer, consumer, prompt, 8) for prompt in batch])
    assert [one.token_ids for one in handed] == [one.token_ids for one in reference]


def test_three_samples_share_the_prefix(pair: tuple[Engine, Engine], prompts: PromptMaker) -> None:
    producer, consumer = pair
    prompt = prompts.prompt_of(200, seed=7).token_ids
    sampled = {"n": 3, "temperature": 0.8, "seed": 3}
    reference = producer.complete(prompt, 8, **sampled).raw["choices"]
    handed = hand_over(producer, consumer, prompt, 8, **sampled).raw["choices"]
    assert [one["token_ids"] for one in handed] == [one["token_ids"] for one in reference]


def test_what_was_pulled_was_compared_and_equal(pair: tuple[Engine, Engine]) -> None:
    found = pair[1].metrics()
    assert found.by_label("vllm:kvlease_checksums_total", "result").keys() <= {"equal", "left_out"}
    assert 0.5 * found.total(BYTES_PULLED) < found.total("vllm:kvlease_bytes_checked_total")


def test_nothing_is_left_behind(pair: tuple[Engine, Engine], prompts: PromptMaker) -> None:
    producer, consumer = pair
    check_settled(producer, [consumer], prompts, within_s=5.0)
