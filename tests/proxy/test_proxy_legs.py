"""The two legs end to end: what reaches whom, what is relayed, and what happens when an engine fails."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from proxy_fleet import (
    DECODED,
    HANDOFF,
    PREFILLED,
    Call,
    StubEngine,
    answers,
    consumer,
    dead_address,
    fleet,
    hang_up,
    producer,
)

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]

ERROR = {"object": "error", "message": "max_tokens is too large", "type": "BadRequestError", "code": 400}


@pytest.mark.parametrize("endpoint", ["/v1/completions", "/v1/chat/completions"])
async def test_prefill_then_decode(endpoint: str) -> None:
    p, d = producer(), consumer()
    body = {"model": "m", "prompt": "hello", "messages": [], "max_tokens": 9, "user": "\ud800"}
    async with fleet([p], [d]) as proxy:
        answer = await proxy.client.post(
            endpoint, content=json.dumps(body), headers={"x-request-id": "r-7", "authorization": "Bearer k"}
        )
        assert (answer.status_code, answer.json()) == (200, DECODED)
        assert answer.headers["x-kvlease-handoff"] == "engine-p/req-1"
        assert answer.headers["x-request-id"] == "r-7"
        assert "x-kvlease-proxy" not in answer.headers
        assert [(c.path, c.headers["x-request-id"], c.headers["authorization"]) for c in p.calls + d.calls] == [
            (endpoint, "r-7", "Bearer k")
        ] * 2
        assert p.bodies[0]["max_tokens"] == 1
        assert p.bodies[0]["kv_transfer_params"]["do_remote_decode"] is True
        assert d.bodies == [body | {"kv_transfer_params": HANDOFF}]
        assert await proxy.count(f'requests_total{{endpoint="{endpoint}"}}') == 1
        assert await proxy.count('prefills_total{outcome="handed"}') == 1
        assert proxy.dropped == []


async def test_a_request_id_is_made_and_both_legs_have_it() -> None:
    p, d = producer(), consumer()
    async with fleet([p], [d]) as proxy:
        answer = await proxy.complete()
    made = answer.headers["x-request-id"]
    assert len(made) == 32
    assert [c.headers["x-request-id"] for c in p.calls + d.calls] == [made, made]


async def test_what_a_client_says_about_peers_reaches_no_engine() -> None:
    p, d = StubEngine(answers(200, {"choices": []})), consumer()
    evil = {"do_remote_prefill": True, "remote_host": "10.0.0.1", "remote_port": 1}
    async with fleet([p], [d]) as proxy:
        await proxy.complete(
            {"prompt": "x", "kv_transfer_params": evil, "vllm_xargs": {"kv_transfer_params": "x", "k": 1}}
        )
    assert "10.0.0.1" not in json.dumps(p.bodies + d.bodies)
    assert d.bodies == [{"prompt": "x", "vllm_xargs": {"k": 1}}]


async def test_both_roles_take_turns() -> None:
    ps, ds = [producer(), producer()], [consumer(), consumer(), consumer()]
    async with fleet(ps, ds) as proxy:
        for _ in range(6):
            await proxy.complete()
    assert [len(p.calls) for p in ps] == [3, 3]
    assert [len(d.calls) for d in ds] == [2, 2, 2]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"prompt": ["a", "b"]}, "many_prompts"),
        ({"prompt": [[1], [2]], "stream": True}, "many_prompts"),
        ({"prompt": "a", "echo": True}, "prompt_logprobs"),
        ({"prompt": "a", "prompt_logprobs": 1}, "prompt_logprobs"),
    ],
)
async def test_what_one_handoff_cannot_serve_goes_to_a_consumer_alone(body: dict[str, Any], reason: str) -> None:
    p, d = producer(), consumer()
    async with fleet([p], [d]) as proxy:
        answer = await proxy.complete(body)
        assert answer.headers["x-kvlease-proxy"] == f"fallback={reason}"
        assert (p.bodies, d.bodies) == ([], [body])
        assert await proxy.count(f'fallbacks_total{{reason="{reason}"}}') == 1


async def test_several_samples_of_one_prompt_share_one_prefill() -> None:
    p, d = producer(), consumer()
    async with fleet([p], [d]) as proxy:
        await proxy.complete({"prompt": "a", "n": 3})
    assert [b["n"] for b in p.bodies + d.bodies] == [1, 3]


@pytest.mark.parametrize("status", [400, 401, 404, 422, 429])
async def test_a_producers_refusal_is_the_answer(status: int) -> None:
    p, d = StubEngine(answers(status, ERROR, {"retry-after": "3"})), consumer()
    async with fleet([p], [d]) as proxy:
        for _ in range(2):
            answer = await proxy.complete({"prompt": "x", "stream": True})
            assert (answer.status_code, answer.json(), answer.headers["retry-after"]) == (status, ERROR, "3")
        assert await proxy.count('prefills_total{outcome="refused"}') == 2
    assert d.calls == []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("status", [400, 429, 500, 503])
async def test_a_consumers_error_is_relayed_and_never_retried(status: int, stream: bool) -> None:
    p, ds = producer(), [StubEngine(answers(status, ERROR, {"retry-after": "3"})), consumer()]
    async with fleet([p], ds) as proxy:
        answer = await proxy.complete({"prompt": "x", "stream": stream})
        assert (answer.status_code, answer.json(), answer.headers["retry-after"]) == (status, ERROR, "3")
        assert answer.headers["content-type"] == "application/json"
        assert answer.headers["x-kvlease-handoff"] == "engine-p/req-1"
        assert await proxy.count('upstream_errors_total{cause="server_error",role="consumer"}') == (status >= 500)
        assert proxy.dropped == ["req-1"]
    assert ds[1].calls == []


@pytest.mark.parametrize(
    ("script", "outcome"),
    [(answers(500, ERROR), "server_error"), (hang_up, "lost"), (answers(302, ERROR), "server_error")],
)
async def test_a_failing_producer_is_passed_over_until_its_back_off_ends(script: Any, outcome: str) -> None:
    bad, good, d = StubEngine(script), producer(), consumer()
    async with fleet([bad, good], [d]) as proxy:
        for _ in range(4):
            answer = await proxy.complete()
            assert answer.headers["x-kvlease-handoff"] == "engine-p/req-1"
        assert (len(bad.calls), len(good.calls), len(d.calls)) == (1, 4, 4)
        assert await proxy.count(f'prefills_total{{outcome="{outcome}"}}') == 1

        proxy.clock.now += 0.5
        bad.script = answers(200, PREFILLED)
        for _ in range(2):
            await proxy.complete()
        assert (len(bad.calls), len(good.calls)) == (2, 5)


async def test_a_dead_producer_is_replaced_by_the_next() -> None:
    p, d = producer(), consumer()
    async with dead_address() as dead, fleet([dead, p], [d]) as proxy:
        answer = await proxy.complete()
        assert answer.headers["x-kvlease-handoff"] == "engine-p/req-1"
        assert await proxy.count('prefills_total{outcome="unreachable"}') == 1
        assert await proxy.count('upstream_errors_total{cause="unreachable",role="producer"}') == 1


async def test_a_silent_producer_is_given_up() -> None:
    async def silent(call: Call) -> None:
        await call.caller_leaves()

    p, d = StubEngine(silent), consumer()
    async with fleet([p], [d], prefill_timeout_s=0.05) as proxy:
        answer = await proxy.complete()
        assert answer.headers["x-kvlease-proxy"] == "fallback=no_producer"
        assert await proxy.count('prefills_total{outcome="timeout"}') == 1


async def test_without_a_live_producer_the_consumer_serves_alone_and_says_so() -> None:
    d = consumer()
    async with dead_address() as dead, fleet([dead], [d]) as proxy:
        for _ in range(3):
            answer = await proxy.complete()
            assert (answer.status_code, answer.json()) == (200, DECODED)
            assert answer.headers["x-kvlease-proxy"] == "fallback=no_producer"
        assert await proxy.count('prefills_total{outcome="unreachable"}') == 1
        assert await proxy.count('fallbacks_total{reason="no_producer"}') == 3
    assert all("kv_transfer_params" not in body for body in d.bodies)


async def test_a_proxy_without_producers() -> None:
    async with fleet([], [consumer()]) as proxy:
        assert (await proxy.complete()).headers["x-kvlease-proxy"] == "fallback=no_producer"


async def test_two_producers_are_tried_and_no_more() -> None:
    ps, d = [StubEngine(answers(500, ERROR)) for _ in range(3)], consumer()
    async with fleet(ps, [d]) as proxy:
        assert (await proxy.complete()).headers["x-kvlease-proxy"] == "fallback=prefill_failed"
        assert [len(p.calls) for p in ps] == [1, 1, 0]


@pytest.mark.parametrize("content", [{"choices": []}, {"kv_transfer_params": None}, b"not json", [1]])
async def test_a_prefill_without_a_handoff(content: object) -> None:
    d = consumer()
    async with fleet([StubEngine(answers(200, content))], [d]) as proxy:
        assert (await proxy.complete()).headers["x-kvlease-proxy"] == "fallback=no_handoff"
        assert await proxy.count('prefills_total{outcome="no_handoff"}') == 1
    assert "kv_transfer_params" not in d.bodies[0]


async def test_an_unreachable_consumer_is_replaced_with_a_new_prefill() -> None:
    handed = iter(["req-1", "req-2"])

    async def prefill(call: Call) -> None:
        await call.answer(200, PREFILLED | {"kv_transfer_params": HANDOFF | {"remote_request_id": next(handed)}})

    p, d = StubEngine(prefill), consumer()
    async with dead_address() as dead, fleet([p], [dead, d]) as proxy:
        answer = await proxy.complete()
        assert answer.headers["x-kvlease-handoff"] == "engine-p/req-2"
        assert d.bodies[0]["kv_transfer_params"]["remote_request_id"] == "req-2"
        assert proxy.dropped == ["req-1"]


async def test_no_consumer_can_be_reached() -> None:
    p = producer()
    async with dead_address() as dead, fleet([p], [dead]) as proxy:
        for _ in range(2):
            answer = await proxy.complete()
            error = answer.json()["error"]
            assert (answer.status_code, error["code"], error["type"]) == (502, "consumer_unreachable", "upstream_error")
            assert f"{dead} cannot be reached" in error["message"]
        assert len(p.calls) == 1
        assert proxy.dropped == ["req-1"]
        assert (await proxy.client.get("/health")).status_code == 503
        assert (await proxy.client.get("/v1/models")).status_code == 502


async def half_an_answer(call: Call) -> None:
    await call.head(200, {"content-type": "application/json", "content-length": "1000"})
    await call.write(b'{"id": "cmpl-1", ')


@pytest.mark.parametrize("script", [hang_up, half_an_answer])
async def test_a_consumer_that_dies_with_the_handoff_in_its_hands_is_not_retried(script: Any) -> None:
    p, ds = producer(), [StubEngine(script), consumer()]
    async with fleet([p], ds) as proxy:
        answer = await proxy.complete()
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (502, "consumer_lost")
        assert f"consumer {ds[0].url} closed the connection" in error["message"]
        assert answer.headers["x-kvlease-handoff"] == "engine-p/req-1"
        assert await proxy.count('upstream_errors_total{cause="lost",role="consumer"}') == 1
        assert (len(p.calls), len(ds[1].calls)) == (1, 0)
        assert (await proxy.complete()).json() == DECODED


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'"x"', b"[" * 100_000])
async def test_a_body_that_is_no_json_object(content: bytes) -> None:
    p, d = producer(), consumer()
    async with fleet([p], [d]) as proxy:
        answer = await proxy.client.post("/v1/completions", content=content)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "bad_json")
    assert p.calls + d.calls == []


async def test_the_other_routes() -> None:
    models = {"object": "list", "data": [{"id": "m"}]}
    d = StubEngine(answers(200, models))
    async with dead_address() as dead, fleet([dead], [dead, d]) as proxy:
        assert (await proxy.client.get("/v1/models")).json() == models
        assert d.calls[0].path == "/v1/models"

        health = await proxy.client.get("/health")
        assert health.status_code == 200
        assert health.json()["consumers"] == {dead: "down: cannot be reached (ConnectError)", d.url: "live"}

        unknown = await proxy.client.post("/v1/responses", json={})
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "no_route")
        assert (await proxy.client.get("/v1/completions")).status_code == 405


async def test_requests_do_not_wait_for_each_other() -> None:
    all_here, waiting = asyncio.Event(), []

    async def together(call: Call) -> None:
        waiting.append(call)
        if len(waiting) == 20:
            all_here.set()
        await all_here.wait()
        await call.answer(200, PREFILLED)

    async with fleet([StubEngine(together)], [consumer()]) as proxy:
        done = await asyncio.gather(*(proxy.complete() for _ in range(20)))
    assert {answer.status_code for answer in done} == {200}
