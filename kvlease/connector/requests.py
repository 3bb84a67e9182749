"""The few things kvlease wants to know about a vLLM request, read in one place because vLLM's fields move."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from kvlease.core.digest import PromptIdentity

if TYPE_CHECKING:
    from vllm.v1.request import Request

_SAMPLE: Final = re.compile(r"\d+_")
"""How the ids of the n > 1 samples of one request begin; other ids of vLLM's servers begin with a word."""

_SERVED: Final = ("FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED")


def is_served(request: Request) -> bool:
    """Whether the request ended well, so that its KV can be handed over."""
    return request.status.name in _SERVED


def has_failed(request: Request) -> bool:
    """Whether vLLM itself ended the request, because its load failed under the policy ``fail``."""
    name: str = request.status.name
    return name == "FINISHED_ERROR"


def is_sample(request_id: str) -> bool:
    """Whether the request is one of several samples of one prompt, which vLLM runs as requests of their own.

    An id of somebody's making may look like one. That costs its lease a grace; the other way round, a sample that comes
    too late prefills its prompt itself.
    """
    return _SAMPLE.match(request_id) is not None


def prompt_identity(request: Request, num_tokens: int) -> PromptIdentity | None:
    """What the KV of the first ``num_tokens`` prompt tokens depends on, besides the model.

    None for a request whose prompt is not made of token ids alone (embeddings), which cannot be compared.
    """
    token_ids = request.prompt_token_ids
    if token_ids is None or request.prompt_embeds is not None or len(token_ids) < num_tokens:
        return None
    lora = request.lora_request
    return PromptIdentity(
        token_ids=token_ids,
        num_tokens=num_tokens,
        lora=None if lora is None else lora.lora_name,
        cache_salt=request.cache_salt,
        mm_hashes=tuple(f"{feature.identifier}@{feature.mm_position.offset}" for feature in request.mm_features),
    )
