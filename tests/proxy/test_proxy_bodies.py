"""What each leg is asked, for a table of bodies; where vLLM is installed, its request models judge the producer's."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
from bodies import (
    CHAT,
    COMPLETIONS,
    consumer_body,
    handoff_in,
    handoff_name,
    producer_body,
    served_alone,
)

SIX_KEYS = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}

EITHER: dict[str, dict[str, Any]] = {
    "plain": {},
    "max_tokens": {"max_tokens": 100},
    "no max_tokens": {"max_tokens": None},
    "min_tokens": {"max_tokens": 100, "min_tokens": 50},
    "min_tokens alone": {"min_tokens": 5},
    "stream": {"stream": True},
    "stream with usage": {"stream": True, "stream_options": {"include_usage": True}},
    "stream interval": {"stream": True, "stream_interval": 4},
    "n": {"n": 3, "temperature": 0.7},
    "n null": {"n": 1, "best_of": None},
    "best_of": {"n": 2, "best_of": 4, "temperature": 0.7},
    "stop": {"stop": ["\n", "END"], "include_stop_str_in_output": True},
    "stop string": {"stop": " "},
    "stop ids": {"stop_token_ids": [1, 2, 3], "ignore_eos": True},
    "sampling": {"temperature": 0, "top_p": 0.9, "seed": 7, "logit_bias": {"5": 100}, "presence_penalty": 1.0},
    "bad words": {"bad_words": ["no"], "repetition_detection": None},
    "guided json": {"structured_outputs": {"json": SCHEMA}, "guided_json": SCHEMA},
    "guided choice": {"structured_outputs": {"choice": ["yes", "no"]}},
    "token ids back": {"return_token_ids": True},
    "salt and lora": {"model": "my-lora", "cache_salt": "pepper", "priority": 0},
    "xargs": {"vllm_xargs": {"mine": 1, "kv_transfer_params": "evil"}},
    "client's handoff": {"kv_transfer_params": {"do_remote_prefill": True, "remote_host": "10.0.0.1"}},
    "client's encoder handoff": {"ec_transfer_params": {"x": {"peer_host": "10.0.0.1"}}},
    "unknown key": {"something_new": {"x": 1}},
}
COMPLETION_ONLY: dict[str, dict[str, Any]] = {
    "logprobs": {"logprobs": 5, "return_tokens_as_token_ids": True},
    "logprob ids": {"logprobs": 2, "logprob_token_ids": [1, 2]},
    "response format": {"response_format": JSON_SCHEMA},
    "token prompt": {"prompt": [1, 2, 3]},
    "list of one prompt": {"prompt": ["hello"]},
    "list of one token prompt": {"prompt": [[1, 2, 3]]},
}
CHAT_ONLY: dict[str, dict[str, Any]] = {
    "max_completion_tokens": {"max_completion_tokens": 100},
    "both limits": {"max_completion_tokens": 100, "max_tokens": 50, "min_tokens": 10},
    "logprobs": {"logprobs": True, "top_logprobs": 5},
    "logprob ids": {"logprobs": True, "logprob_token_ids": [1, 2]},
    "tools": {"tools": TOOLS},
    "tools forced": {"tools": TOOLS, "tool_choice": "required"},
    "tool named": {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "f"}}},
    "json object": {"response_format": {"type": "json_object"}},
    "json schema": {"response_format": JSON_SCHEMA},
    "template": {"chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "low"},
    "thinking budget": {"thinking_token_budget": 10, "include_reasoning": False},
    "prompt text back": {"return_prompt_text": True},
}
BASE: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"model": "m", "prompt": "hello"},
    CHAT: {"model": "m", "messages": [{"role": "user", "content": "hello"}]},
}
TABLE = [
    pytest.param(endpoint, BASE[endpoint] | extra, id=f"{'chat' if endpoint == CHAT else 'text'}: {name}")
    for endpoint, rows in ((COMPLETIONS, EITHER | COMPLETION_ONLY), (CHAT, EITHER | CHAT_ONLY))
    for name, extra in rows.items()
]
# What may be on the producer's leg beside what the proxy sets: all that can change the prompt, and harmless rest.
KEPT = {
    "model", "prompt", "messages", "tools", "tool_choice", "response_format", "chat_template_kwargs",
    "reasoning_effort", "include_reasoning", "temperature", "top_p", "seed", "logit_bias", "presence_penalty",
    "ignore_eos", "cache_salt", "priority", "something_new",
}  # fmt: skip


@pytest.mark.parametrize(("endpoint", "body"), TABLE)
def test_the_producer_is_asked_for_one_token_and_a_handoff(endpoint: str, body: dict[str, Any]) -> None:
    before = copy.deepcopy(body)
    asked = producer_body(endpoint, body)

    assert body == before
    assert served_alone(endpoint, body) is None
    expected = {key: value for key, value in body.items() if key in KEPT}
    if endpoint == COMPLETIONS:
        expected.pop("response_format", None)
    if "vllm_xargs" in body:
        expected["vllm_xargs"] = {"mine": 1}
    if "max_completion_tokens" in body:
        expected["max_completion_tokens"] = 1
    assert asked == expected | {"max_tokens": 1, "n": 1, "stream": False, "kv_transfer_params": SIX_KEYS}


@pytest.mark.parametrize(("endpoint", "body"), TABLE)
def test_the_consumer_gets_the_clients_body_and_the_handoff_unread(endpoint: str, body: dict[str, Any]) -> None:
    handoff = {"do_remote_prefill": True, "remote_engine_id": "e", "kvlease": {"v": 9}}
    topology = {"kv_transfer_params", "ec_transfer_params"}
    expected = {key: value for key, value in body.items() if key not in topology}
    if "vllm_xargs" in body:
        expected["vllm_xargs"] = {"mine": 1}

    assert consumer_body(body, None) == expected
    assert consumer_body(body, handoff) == expected | {"kv_transfer_params": handoff}


@pytest.fixture(scope="module")
def request_models() -> dict[str, Any]:
    pytest.importorskip("vllm", reason="judges the bodies", exc_type=ImportError)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    return {CHAT: ChatCompletionRequest, COMPLETIONS: CompletionRequest}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("endpoint", "body"), TABLE)
def test_vllm_accepts_what_the_producer_is_asked(
    endpoint: str, body: dict[str, Any], request_models: dict[str, Any]
) -> None:
    request = request_models[endpoint].model_validate(producer_body(endpoint, body))
    params = request.to_sampling_params(max_tokens=1, default_sampling_params={})

    assert (params.max_tokens, params.min_tokens, params.n, params.stop) == (1, 0, 1, [])
    assert params.extra_args["kv_transfer_params"] == SIX_KEYS


@pytest.mark.parametrize(
    ("endpoint", "extra", "reason"),
    [
        (COMPLETIONS, {"prompt": ["a", "b"]}, "many_prompts"),
        (COMPLETIONS, {"prompt": [[1, 2], [3]]}, "many_prompts"),
        (COMPLETIONS, {"prompt_embeds": "AAAA"}, "prompt_embeds"),
        (COMPLETIONS, {"echo": True}, "prompt_logprobs"),
        (COMPLETIONS, {"prompt_logprobs": 0}, "prompt_logprobs"),
        (CHAT, {"prompt_logprobs": 5}, "prompt_logprobs"),
        (CHAT, {"echo": True}, "prompt_logprobs"),
        (CHAT, {"use_beam_search": True, "n": 4}, "beam_search"),
        (COMPLETIONS, {"echo": False, "use_beam_search": False, "prompt_logprobs": None}, None),
        (COMPLETIONS, {"prompt": []}, None),
        (CHAT, {"prompt": ["not", "looked", "at"]}, None),
    ],
)
def test_what_only_one_engine_can_answer_goes_to_the_consumer_alone(
    endpoint: str, extra: dict[str, Any], reason: str | None
) -> None:
    assert served_alone(endpoint, BASE[endpoint] | extra) == reason


@pytest.mark.parametrize(
    "answer",
    [{}, {"kv_transfer_params": None}, {"kv_transfer_params": {}}, {"kv_transfer_params": "x"}, [], None, "text"],
)
def test_an_answer_without_a_handoff(answer: object) -> None:
    assert handoff_in(answer) is None


def test_a_handoffs_name_fits_a_header_whatever_it_holds() -> None:
    assert handoff_name({"remote_engine_id": "e-1", "remote_request_id": "cmpl-2"}) == "e-1/cmpl-2"
    assert handoff_name({"remote_engine_id": "e\r\nx: y", "remote_request_id": "\u00fc"}) == "e??x:?y/?"
    assert handoff_name({}) == "None/None"
    assert len(handoff_name({"remote_engine_id": "e" * 9999})) == 256
