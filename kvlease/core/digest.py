"""The digest of what a lease is bound to: which prompt, for which adapter, in whose cache, with which media.

Both sides compute it from what they themselves were given and the producer compares (a handoff that passed through a
router proves nothing). KV pages are equal only where all four inputs are, so all four go in.

The encoding is one byte string, hashed with BLAKE2b to 32 bytes::

    version tag | u64 num_tokens | i64 per token | optional lora | optional salt | u64 count, then each media hash

Integers are little-endian. A text is a u64 length and UTF-8; an optional one has a byte 0 (absent) or 1 before it, so
that "no salt" and "empty salt" differ. Everything has its length before it: no two inputs share an encoding.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

DIGEST_BYTES: Final = 32
"""The length of a prompt digest."""

_VERSION_TAG: Final = b"kvlease prompt digest 1\x00"

_CHUNK_TOKENS: Final = 8192
"""Converting a list needs the interpreter lock, hashing does not: small chunks let the engine's thread in between."""


@dataclass(frozen=True)
class PromptIdentity:
    """The first ``num_tokens`` tokens of one request's prompt, and what else their KV depends on.

    ``token_ids`` is a reference to the request's own list, which only ever grows, so that making one costs the
    scheduler's thread nothing; :meth:`digest` is for another thread.
    """

    token_ids: Sequence[int] = field(repr=False)
    num_tokens: int
    lora: str | None = None
    cache_salt: str | None = field(default=None, repr=False)
    mm_hashes: tuple[str, ...] = ()

    def digest(self) -> bytes:
        """See :func:`prompt_digest`, also for what it raises."""
        return prompt_digest(self.token_ids, self.num_tokens, self.lora, self.cache_salt, self.mm_hashes)


def prompt_digest(
    token_ids: Sequence[int], num_tokens: int, lora: str | None, cache_salt: str | None, mm_hashes: Sequence[str]
) -> bytes:
    """The digest of the first ``num_tokens`` of ``token_ids``, with the adapter's name, the salt and the media hashes.

    ``mm_hashes`` count in order. The rest of ``token_ids`` does not count.

    Raises:
        ValueError: ``num_tokens`` is negative or more than there are token ids, or one of those is no 64-bit integer.
    """
    if not 0 <= num_tokens <= len(token_ids):
        raise ValueError(f"a digest over {num_tokens} tokens of {len(token_ids)}")
    state = hashlib.blake2b(_VERSION_TAG, digest_size=DIGEST_BYTES)
    state.update(_u64(num_tokens))
    for start in range(0, num_tokens, _CHUNK_TOKENS):
        state.update(_token_bytes(token_ids[start : min(start + _CHUNK_TOKENS, num_tokens)]))
    for optional in (lora, cache_salt):
        state.update(b"\x00" if optional is None else b"\x01" + _text(optional))
    state.update(_u64(len(mm_hashes)))
    for mm_hash in mm_hashes:
        state.update(_text(mm_hash))
    return state.digest()


def _token_bytes(token_ids: Sequence[int]) -> memoryview:
    try:
        return np.ascontiguousarray(token_ids, dtype="<i8").view(np.uint8).data
    except (OverflowError, TypeError) as error:
        raise ValueError(f"a token id is no 64-bit integer: {error}") from error


def _text(text: str) -> bytes:
    # JSON can carry half of a surrogate pair; such a text is as good as any other here.
    data = text.encode("utf-8", errors="surrogatepass")
    return _u64(len(data)) + data


def _u64(number: int) -> bytes:
    return number.to_bytes(8, "little")
