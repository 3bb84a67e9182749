"""One producer, one consumer that pulls every time: the texts of every kind of request equal those of one engine."""

from __future__ import annotations

import json
import random
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from devtools.engines import Engine, engine_set
from devtools.idle import cpu_shares
from devtools.metrics import BYTES_PULLED
from devtools.prompts import PromptMaker
from kvlease.config import Settings
from kvlease.core import messages
from tests.engines.support import (
    NO_PREFIX_CACHE,
    check_settled,
    hand_over,
    handoff_of,
    new_outcomes,
    outcomes,
    spec,
    together,
    wait_until,
)

BLOCK = 128
LEASE_S = Settings().lease_duration_s
KV_BYTES_PER_TOKEN = 30 * 2 * 3 * 64 * 4


@pytest.fixture(scope="module")
def pair(log_dir: Path) -> Iterator[tuple[Engine, Engine]]:
    with engine_set(
        [spec("producer", "kv_producer"), spec("consumer", "kv_consumer", [NO_PREFIX_CACHE])], log_dir
    ) as engines:
        yield engines[0], engines[1]


@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2500])
def test_the_text_is_that_of_one_engine(pair: tuple[Engine, Engine], prompts: PromptMaker, length: int) -> None:
    producer, consumer = pair
    prompt = prompts.prompt_of(length, seed=length).token_ids
    reference = consumer.complete(prompt, 16)
    before, bytes_before = outcomes(consumer), consumer.metrics().total(BYTES_PULLED)
    assert hand_over(producer, consumer, prompt).token_ids == reference.token_ids
    assert new_outcomes(consumer, before) == {"done": 1}
    pages = -(-length // BLOCK)
    assert consumer.metrics().total(BYTES_PULLED) - bytes_before == pages * BLOCK * KV_BYTES_PER_TOKEN
    wait_until(lambda: producer.kv_usage() == 0, "the producer's blocks come back after the commit", 2.0)


def test_twenty_four_at_once(pair: tuple[Engine, Engine], prompts: PromptMaker) -> None:
    producer, consumer = pair
    batch = [prompts.prompt_of(20 + 13 * index, seed=1000 + index).token_ids for index in range(24)]
    reference = together([lambda prompt=prompt: consumer.complete(prompt, 12) for prompt in batch])
    before = outcomes(consumer)
    handed = together([lambda prompt=prompt: hand_over(producer, consumer, prompt, 12) for prompt in batch])
    assert [one.token_ids for one in handed] == [one.token_ids for one in reference]
    assert new_outcomes(consumer, before) == {"done": 24}


MESSAGES = [{"role": "user", "content": "Name the capital of France, then say why rivers matter to cities."}]


def chat(engine: Engine, **more: Any) -> dict[str, Any]:
    answer = engine.post("/v1/chat/completions", {"messages": MESSAGES, "temperature": 0, **more})
    assert answer.status_code == 200, answer.text
    parsed: dict[str, Any] = answer.json()
    return parsed


def test_chat(pair: tuple[Engine, Engine]) -> None:
    producer, consumer = pair
    reference = chat(consumer, max_tokens=24)["choices"][0]["message"]["content"]
    handoff = chat(producer, max_tokens=1, kv_transfer_params={"do_remote_decode": True})["kv_transfer_params"]
    before = outcomes(consumer)
    handed = chat(consumer, max_tokens=24, kv_transfer_params=handoff)
    assert handed["choices"][0]["message"]["content"] == reference
    assert "Paris" in reference
    assert new_outcomes(consumer, before) == {"done": 1}


def test_streamed(pair: tuple[Engine, Engine], prompts: PromptMaker) -> None:
    producer, consumer = pair
    prompt = prompts.prompt_of(300, seed=31).token_ids
    reference = consumer.complete(prompt, 24)
    body = {"prompt": prompt, "max_tokens": 24, "temperature": 0, "stream": True, "model": "kvlease-model"}
    body["kv_transfer_params"] = handoff_of(producer, prompt)
    with consumer.http.stream("POST", "/v1/completions", json=body) as response:
        chunks = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]
    assert chunks[-1] == "[DONE]"
    texts = [json.loads(chunk)["choices"][0]["text"] for chunk in chunks[:-1] if json.loads(chunk)["choices"]]
    assert "".join(texts) == reference.text
    assert len(texts) > 5


def test_three_samples_of_one_prompt(pair: tuple[Engine, Engine], prompts: PromptMaker) -> None:
    producer, consumer = pair
    prompt = prompts.prompt_of(200, seed=32).token_ids
    sampled = {"n": 3, "temperature": 0.8, "seed": 11}
    reference = consumer.complete(prompt, 12, **sampled).raw["choices"]
    before = outcomes(consumer)
    handed = consumer.complete(prompt, 12, kv_transfer_params=handoff_of(producer, prompt), **sampled).raw["choices"]
    assert [one["token_ids"] for one in handed] == [one["token_ids"] for one in reference]
    assert new_outcomes(consumer, before) == {"done": 3}
    wait_until(lambda: producer.kv_usage() == 0, "the lease ends after its last reader and the grace", 2.0)


@pytest.mark.parametrize("params", [None, {}, {"do_remote_prefill": False}, {"do_remote_prefill": None}], ids=repr)
def test_requests_without_a_handoff_are_served_as_by_plain_vllm(
    pair: tuple[Engine, Engine], prompts: PromptMaker, params: Any
) -> None:
    prompt = prompts.prompt_of(60, seed=33).token_ids
    expected = pair[1].complete(prompt, 8).token_ids
    for engine in pair:
        before = outcomes(engine)
        assert engine.complete(prompt, 8, kv_transfer_params=params).token_ids == expected
        assert outcomes(engine) == before


def test_a_handoff_used_again_with_another_prompt_of_equal_length(
    pair: tuple[Engine, Engine], prompts: PromptMaker
) -> None:
    producer, consumer = pair
    secret, other = (prompts.prompt_of(400, seed=seed).token_ids for seed in (41, 42))
    expected = consumer.complete(other, 16).token_ids
    handoff = handoff_of(producer, secret)
    before = outcomes(consumer)
    assert consumer.complete(other, 16, kv_transfer_params=handoff).token_ids == expected  # while the lease is live
    consumer.complete(secret, 4, kv_transfer_params=handoff)
    wait_until(lambda: producer.kv_usage() == 0, "the lease ends")
    assert consumer.complete(other, 16, kv_transfer_params=handoff).token_ids == expected  # after it ended
    assert new_outcomes(consumer, before) == {"failed/gone_mismatch": 1, "done": 1, "failed/gone_committed": 1}


JUNK: list[Any] = [None, True, -1, 1 << 62, 1.5, "", "x" * 5000, [], [[]], {"a": {}}]
FIELDS = [
    "remote_engine_id", "remote_request_id", "remote_host", "remote_port", "remote_num_tokens", "remote_block_ids",
    "remote_blocks_expiry_time", "tp_size",
    "kvlease", "kvlease.token", "kvlease.incarnation", "kvlease.v", "kvlease.ttl_s",
]  # fmt: skip


NEEDED = set(FIELDS[:5]) | {"kvlease.token", "kvlease.incarnation", "kvlease.v"}
"""Those without which there is no handoff: none of the junk above may stand in them."""


def refused_input(engine: Engine) -> dict[str, float]:
    return engine.metrics().by_label("vllm:kvlease_refused_input_total", "reason")


def spoil(handoff: dict[str, Any], field: str, junk: Any) -> dict[str, Any]:
    """A copy of ``handoff`` with ``field`` absent (``...``) or replaced."""
    spoilt: dict[str, Any] = json.loads(json.dumps(handoff))
    parent = spoilt["kvlease"] if field.startswith("kvlease.") else spoilt
    key = field.removeprefix("kvlease.")
    parent.pop(key)
    if junk is not ...:
        parent[key] = junk
    return spoilt


@pytest.mark.parametrize("field", FIELDS)
def test_every_field_absent_null_of_the_wrong_type_and_huge(
    pair: tuple[Engine, Engine], prompts: PromptMaker, field: str
) -> None:
    producer, consumer = pair
    prompt = prompts.prompt_of(140, seed=51).token_ids
    expected = consumer.complete(prompt, 4).token_ids
    handoff = handoff_of(producer, prompt)
    before, refused_before = outcomes(consumer), refused_input(consumer)
    spoilt = [spoil(handoff, field, junk) for junk in [..., *JUNK]]
    answers = together([
        lambda params=params: consumer.complete(prompt, 4, kv_transfer_params=params) for params in spoilt
    ])  # fmt: skip
    assert [answer.token_ids for answer in answers] == [expected] * len(spoilt)
    assert sum(new_outcomes(consumer, before).values()) == len(spoilt)
    if field in NEEDED:
        assert refused_input(consumer).get(field, 0) - refused_before.get(field, 0) == len(spoilt)
    assert consumer.complete(prompt, 4, kv_transfer_params=handoff_of(producer, prompt)).token_ids == expected


def random_frames(rng: random.Random, count: int) -> Iterator[list[bytes]]:
    """Noise, truncated and bit-flipped messages, and well-formed ones that make no sense."""
    zero = bytes(16)
    valid = [
        messages.encode(message)
        for message in (
            messages.Ping(seq=1, to=zero),
            messages.Acquire(seq=2, to=zero, lease="x", token=zero, reader="r", channel="c", digest=zero),
            messages.Renew(seq=3, to=zero, channel="c", base=1, generation=2, removed=["r"]),
            messages.Commit(seq=4, to=zero, lease="x", token=zero, reader="r", rank=0, of_ranks=1),
            messages.Release(seq=5, to=zero, lease="x", token=zero),
            messages.Hello(seq=6, to=zero, version=9, factors={"a": "b"}, fingerprint="f", ranks=[99]),
        )
    ]
    for index in range(count):
        frame = bytearray(rng.choice(valid))
        match index % 5:
            case 0:
                yield [rng.randbytes(rng.randrange(200))]
            case 1:
                yield [bytes(frame[: rng.randrange(len(frame))])]
            case 2:
                frame[rng.randrange(len(frame))] ^= 1 << rng.randrange(8)
                yield [bytes(frame)]
            case 3:
                yield [rng.randbytes(8) for _ in range(rng.randrange(2, 5))]
            case _:
                yield [bytes(frame)]


def test_ten_thousand_random_frames_at_the_endpoint(pair: tuple[Engine, Engine], prompts: PromptMaker) -> None:
    producer, consumer = pair
    prompt = prompts.prompt_of(140, seed=61).token_ids
    handoff = handoff_of(producer, prompt)
    address = (handoff["remote_host"], handoff["remote_port"])
    with socket.create_connection(address) as raw:
        raw.sendall(random.Random(1).randbytes(5000))
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(f"tcp://{address[0]}:{address[1]}")
        for frames in random_frames(random.Random(2), 10_000):
            dealer.send_multipart(frames)
        dealer.send(messages.encode(messages.Ping(seq=123_456, to=bytes.fromhex(handoff["kvlease"]["incarnation"]))))
        answered = False
        while not answered:
            assert dealer.poll(20_000), "the endpoint does not answer any more"
            answer = messages.decode_reply(dealer.recv())
            answered = isinstance(answer, messages.Pong) and answer.seq == 123_456
    before = outcomes(consumer)
    assert (
        consumer.complete(prompt, 16, kv_transfer_params=handoff).token_ids == consumer.complete(prompt, 16).token_ids
    )
    assert new_outcomes(consumer, before) == {"done": 1}
    check_settled(producer, [consumer], prompts, within_s=LEASE_S + 5.0)  # other tests left leases that nobody claims
    refused = producer.metrics().by_label("vllm:kvlease_refused_input_total", "reason")
    assert refused["malformed"] > 4000, refused


def test_idle_workers_leave_their_cores_alone(pair: tuple[Engine, Engine]) -> None:
    time.sleep(3.0)  # vLLM's workers look for work for about a second after each step
    shares = cpu_shares([process for engine in pair for process in engine.process.tree()], over_s=20.0)
    assert max(shares.values()) < 0.05, shares
