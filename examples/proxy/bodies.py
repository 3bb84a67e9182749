"""What each leg is asked: pure functions from the client's JSON body to the producer's and the consumer's.

The rule for the producer's body: keep whatever can change the *prompt* (messages, tools, tool_choice, template
arguments, salt, LoRA model name, and for chat `response_format`, which some chat templates print), because the consumer
proves that it was handed the KV of the very same tokens. Drop whatever only steers or reports the *output*: the
producer makes one token that nobody reads, and a limit that does not fit one token (`min_tokens: 5`), or an option
whose partner was dropped, would refuse the request.

A handoff belongs to one prompt, and only the engine that computes a prompt can report on it: `served_alone` names the
requests that go to the consumer without a prefill.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

Body = dict[str, Any]
Handoff = Mapping[str, Any]

CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"

# What asks a producer for a handoff; every router sends these six keys.
_ASK_FOR_HANDOFF: Final = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}

# Keys that make an engine dial an address or trust a peer: never taken from a client.
_TOPOLOGY: Final = frozenset({"kv_transfer_params", "ec_transfer_params"})

_OUTPUT_ONLY: Final = frozenset(
    {
        "min_tokens",
        "stream_options",
        "stream_interval",
        "best_of",
        "use_beam_search",
        "echo",
        "logprobs",
        "top_logprobs",
        "logprob_token_ids",
        "prompt_logprobs",
        "stop",
        "stop_token_ids",
        "include_stop_str_in_output",
        "bad_words",
        "repetition_detection",
        "thinking_token_budget",
        "structured_outputs",
        "guided_json",
        "guided_regex",
        "guided_choice",
        "guided_grammar",
        "guided_decoding_backend",
        "guided_whitespace_pattern",
        "return_token_ids",
        "return_tokens_as_token_ids",
        "return_prompt_text",
    }
)


def without_topology(body: Body) -> Body:
    """A copy of a client's body without the keys that only an engine may write, `vllm_xargs` included."""
    kept = {key: value for key, value in body.items() if key not in _TOPOLOGY}
    extra = kept.get("vllm_xargs")
    if isinstance(extra, dict):
        kept["vllm_xargs"] = {key: value for key, value in extra.items() if key not in _TOPOLOGY}
    return kept


def served_alone(endpoint: str, body: Body) -> str | None:
    """Why this request gets no prefill elsewhere, as a fallback reason; None when it gets one."""
    prompt = body.get("prompt")
    if endpoint == COMPLETIONS:
        if body.get("prompt_embeds") is not None:
            return "prompt_embeds"
        if isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int):
            return "many_prompts"
    if body.get("prompt_logprobs") is not None or body.get("echo"):
        return "prompt_logprobs"
    if body.get("use_beam_search"):
        return "beam_search"
    return None


def producer_body(endpoint: str, body: Body) -> Body:
    """The body of the prefill: one unread token, not streamed, and the request for a handoff. `body` is not changed."""
    asked = {key: value for key, value in without_topology(body).items() if key not in _OUTPUT_ONLY}
    if endpoint == COMPLETIONS:
        asked.pop("response_format", None)
    if "max_completion_tokens" in asked:
        asked["max_completion_tokens"] = 1
    asked.update(max_tokens=1, n=1, stream=False, kv_transfer_params=dict(_ASK_FOR_HANDOFF))
    return asked


def consumer_body(body: Body, handoff: Handoff | None) -> Body:
    """The client's own body with the producer's handoff, unread; without one the consumer prefills by itself."""
    asked = without_topology(body)
    if handoff is not None:
        asked["kv_transfer_params"] = handoff
    return asked


def handoff_in(answer: object) -> Handoff | None:
    """The handoff in a producer's parsed answer; None when it gave none."""
    params = answer.get("kv_transfer_params") if isinstance(answer, dict) else None
    return params if isinstance(params, dict) and params else None


def handoff_name(handoff: Handoff) -> str:
    """`<engine id>/<request id>` for headers and log lines. It holds no secret."""
    return printable(f"{handoff.get('remote_engine_id')}/{handoff.get('remote_request_id')}")


def printable(text: str) -> str:
    """The text in visible ASCII, one `?` for each other character, at most 256 characters."""
    return re.sub(r"[^!-~]", "?", text)[:256]
