"""What is read of vLLM's requests, with the requests as vLLM makes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("vllm")

from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.parallel_sampling import ParentRequest

from kvlease.connector.requests import is_sample
from kvlease.net.leaser import Leaser
from tests.connector.harness import prompt

if TYPE_CHECKING:
    from tests.connector.harness import Site

    MakeSite = Callable[..., "Site"]


def request_for(external_id: str, samples: int) -> EngineCoreRequest:
    request = EngineCoreRequest(
        request_id=external_id,
        prompt_token_ids=[1, 2, 3],
        mm_features=None,
        sampling_params=SamplingParams(n=samples),
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )
    InputProcessor.assign_request_id(request)
    return request


@pytest.mark.parametrize("external_id", ["cmpl-1_2-0", "chatcmpl-8f0e", "cmpl-___prefill_addr_1_2_decode-0"])
def test_the_samples_of_one_request_are_told_from_a_request_by_itself(external_id: str) -> None:
    request = request_for(external_id, samples=12)
    parent = ParentRequest(request)
    assert all(is_sample(parent.get_child_info(index)[0]) for index in range(12))
    assert not is_sample(request.request_id)


@pytest.mark.parametrize(("name", "has_siblings"), [("cmpl-d-0", False), ("2_cmpl-d-0", True)])
def test_the_producer_is_told_whether_to_wait_for_siblings(
    make_site: MakeSite, monkeypatch: pytest.MonkeyPatch, name: str, has_siblings: bool
) -> None:
    told: list[bool] = []
    real = Leaser.acquire

    def acquire(*args: Any, has_siblings: bool) -> None:
        told.append(has_siblings)
        real(*args, has_siblings=has_siblings)

    monkeypatch.setattr(Leaser, "acquire", acquire)
    producer, consumer = make_site("kv_producer"), make_site("kv_consumer")
    tokens = prompt(40)
    consumer.submit(name, tokens, producer.prefill("p", tokens))
    assert told == [has_siblings]
