"""Which engines may read each other's pages: a list of named factors, compared by name.

A bare hash tells an operator that something differs; a name and two values tell what to change. The hash (the
*fingerprint*) only shortens the common case. Factors fall into two kinds: *layout* factors say where bytes lie, and no
setting may overrule them; the others say what the bytes mean (weights' shape, dtype, rope, ...), and
``enforce_handshake_compat: false`` accepts a difference in them at the user's own risk.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Final

from kvlease.core.messages import Difference

LAYOUT_FACTORS: Final = frozenset({"block_size", "kv_cache_dtype", "kv_layout", "num_regions", "page_bytes", "tp_size"})
"""Factors without which a page cannot even be copied."""


def is_layout(name: str) -> bool:
    """Whether the factor ``name`` says where bytes lie, rather than what they mean."""
    return name in LAYOUT_FACTORS


def fingerprint(factors: Mapping[str, str]) -> str:
    """32 hex digits that are equal for equal factors, in whatever order they come."""
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(factors):
        for part in (name, factors[name]):
            encoded = part.encode()
            digest.update(len(encoded).to_bytes(4, "little"))
            digest.update(encoded)
    return digest.hexdigest()


def differences(ours: Mapping[str, str], theirs: Mapping[str, str]) -> list[Difference]:
    """The factors in which two engines differ, sorted by name; a factor one side lacks is None there."""
    names = sorted(ours.keys() | theirs.keys())
    return [
        Difference(name=name, ours=ours.get(name), theirs=theirs.get(name))
        for name in names
        if ours.get(name) != theirs.get(name)
    ]
