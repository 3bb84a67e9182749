"""The digest: equal for equal prompts, different for everything that makes KV pages differ."""

from __future__ import annotations

import random
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlease.core.digest import DIGEST_BYTES, PromptIdentity, prompt_digest

TOKENS = [101, 7, 7, 2023, 0, 151_643]


def digest(tokens: Any = TOKENS, num: int = 6, lora: str | None = None, salt: str | None = None, mm: Any = ()) -> bytes:
    return prompt_digest(tokens, num, lora, salt, mm)


def test_it_is_32_bytes_and_repeatable() -> None:
    assert len(digest()) == DIGEST_BYTES
    assert digest() == digest(list(TOKENS)) == digest(tuple(TOKENS))


def test_it_never_changes_its_encoding_silently() -> None:
    # Both engines of a fleet must agree across releases: change the version tag whenever this changes.
    fixed = prompt_digest([1, 2, 3], 3, "adapter", "salt", ["image"])
    assert fixed.hex() == "1a468b7175ae20a97f9fa499e64aad321a8ac8abc0985416e394ed513dcc3347"


def test_tokens_beyond_num_tokens_do_not_count() -> None:
    assert digest([*TOKENS, 1, 2, 3]) == digest()
    assert digest(num=5) == digest([*TOKENS[:5], 999], num=5)


def test_everything_that_changes_pages_changes_it() -> None:
    different = [
        digest(),
        digest(num=5),
        digest([101, 7, 7, 2023, 1, 151_643]),
        digest([7, 101, 7, 2023, 0, 151_643]),
        digest(lora="a"),
        digest(lora=""),
        digest(salt="a"),
        digest(salt=""),
        digest(lora="a", salt="b"),
        digest(lora="ab"),
        digest(mm=["a"]),
        digest(mm=["a", "b"]),
        digest(mm=["b", "a"]),
        digest(mm=["ab"]),
        digest(mm=[""]),
    ]
    assert all(one != other for one, other in combinations(different, 2))


def test_long_prompts_are_hashed_in_pieces_that_leave_no_trace() -> None:
    numbers = random.Random(1)
    tokens = [numbers.randrange(200_000) for _ in range(50_000)]
    assert digest(tokens, 50_000) == digest(tuple(tokens), 50_000)
    for place in (0, 8191, 8192, 49_999):
        other = list(tokens)
        other[place] += 1
        assert digest(other, 50_000) != digest(tokens, 50_000)


@pytest.mark.parametrize(("tokens", "num"), [([1, 2], 3), ([], 1), ([1], -1), ([1 << 70], 1), ([None], 1)])
def test_what_cannot_be_hashed_raises_value_error(tokens: Any, num: int) -> None:
    with pytest.raises(ValueError, match="token"):
        digest(tokens, num)


def test_half_a_surrogate_pair_is_a_salt_like_any_other() -> None:
    assert digest(salt="\ud800") != digest(salt="?")


Inputs = st.tuples(
    st.lists(st.integers(0, 3), max_size=4),
    st.none() | st.text("ab\x00", max_size=3),
    st.none() | st.text("ab\x00", max_size=3),
    st.lists(st.text("ab\x00", max_size=2), max_size=3),
)


@given(Inputs, Inputs)
def test_two_inputs_share_a_digest_only_if_they_are_the_same(one: Any, other: Any) -> None:
    first, second = (prompt_digest(x[0], len(x[0]), *x[1:]) for x in (one, other))
    assert (first == second) == (one == other)


def test_an_identity_shows_neither_prompt_nor_salt_and_digests_alike() -> None:
    identity = PromptIdentity(TOKENS, 5, "adapter", "salt-of-a-tenant", ("image",))
    assert identity.digest() == prompt_digest(TOKENS, 5, "adapter", "salt-of-a-tenant", ["image"])
    assert "151643" not in repr(identity)
    assert "tenant" not in repr(identity)
