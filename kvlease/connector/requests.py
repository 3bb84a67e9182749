"""The few things kvlease wants to know about a vLLM request, read in one place because vLLM's fields move."""

from __future__ import annotations

from vllm.v1.request import Request

from kvlease.core.digest import PromptIdentity


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
