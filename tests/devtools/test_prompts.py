"""Prompts have the very length that was asked for, in the model's own tokens."""

from __future__ import annotations

import pytest

from devtools.model import ensure_model
from devtools.prompts import PromptMaker


@pytest.fixture(scope="module")
def prompts() -> PromptMaker:
    return PromptMaker(ensure_model())


@pytest.mark.parametrize("num_tokens", [1, 7, 8, 9, 127, 128, 129, 4000])
def test_a_prompt_has_the_length_asked_for(prompts: PromptMaker, num_tokens: int) -> None:
    for seed in range(5):
        assert len(prompts.prompt_of(num_tokens, seed).token_ids) == num_tokens


def test_the_seed_decides_the_text(prompts: PromptMaker) -> None:
    assert prompts.prompt_of(40, 1) == prompts.prompt_of(40, 1)
    first_blocks = {tuple(prompts.prompt_of(200, seed).token_ids[:16]) for seed in range(50)}
    assert len(first_blocks) == 50
