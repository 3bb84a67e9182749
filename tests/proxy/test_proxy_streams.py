"""Event streams, consumers that die in the middle of one, and clients that leave."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from proxy_fleet import HANDOFF, PREFILLED, Call, Fleet, StubEngine, answers, consumer, fleet, producer

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]

ASK = {"model": "m", "prompt": "hello", "stream": True, "stream_options": {"include_usage": True}}


async def test_the_first_event_arrives_before_the_last_is_made() -> None:
    first_seen = asyncio.Event()

    async def decode(call: Call) -> None:
        await call.start_events()
        await call.event({"text": "a"})
        await first_seen.wait()
        await call.event({"text": "b"})
        await call.end_events()

    p, d = producer(), StubEngine(decode)
    async with fleet([p], [d]) as proxy, proxy.client.stream("POST", "/v1/completions", json=ASK) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert answer.headers["x-kvlease-handoff"] == "engine-p/req-1"
        lines = answer.aiter_lines()
        assert await anext(lines) == 'data: {"text": "a"}'
        first_seen.set()
        assert [line async for line in lines if line] == ['data: {"text": "b"}', "data: [DONE]"]
    assert d.bodies == [ASK | {"kv_transfer_params": HANDOFF}]
    assert (p.bodies[0]["stream"], "stream_options" in p.bodies[0]) == (False, False)


async def test_events_cut_anywhere_arrive_byte_for_byte() -> None:
    raw = b'data: {"text": "\xc3\xa4"}\r\n\r\n: comment\n\ndata: [DONE]\n\nno newline at the end'

    async def decode(call: Call) -> None:
        await call.start_events()
        for i in range(len(raw)):
            await call.chunk(raw[i : i + 1])
        await call.write(b"0\r\n\r\n")

    async with fleet([producer()], [StubEngine(decode)]) as proxy:
        assert (await proxy.complete(ASK)).content == raw


@pytest.mark.parametrize("cut", [b"", b"data: {", b'data: {"text": "c"}\n'])
async def test_a_consumer_that_dies_mid_stream_leaves_an_error_event_and_no_done(cut: bytes) -> None:
    async def decode(call: Call) -> None:
        await call.start_events()
        await call.event({"text": "a"})
        await call.event({"text": "b"})
        if cut:
            await call.chunk(cut)

    p, ds = producer(), [StubEngine(decode), consumer()]
    async with fleet([p], ds) as proxy:
        answer = await proxy.complete(ASK)
        assert answer.status_code == 200
        events = [event.strip() for event in answer.text.split("\n\n") if event]
        assert events[:2] == ['data: {"text": "a"}', 'data: {"text": "b"}']
        error = json.loads(events[-1].removeprefix("data: "))["error"]
        assert (error["code"], error["type"]) == ("consumer_lost", "upstream_error")
        assert "[DONE]" not in answer.text
        assert "data: {\n" not in answer.text
        assert await proxy.count('upstream_errors_total{cause="lost",role="consumer"}') == 1
    assert (len(p.calls), ds[1].calls) == (1, [])


class Leaver:
    """An engine's script that waits at one place until its caller has gone, and tells both moments."""

    def __init__(self, events_first: int | None = None) -> None:
        self.reached, self.gone = asyncio.Event(), asyncio.Event()
        self._events_first = events_first

    async def __call__(self, call: Call) -> None:
        if self._events_first is not None:
            await call.start_events()
            for i in range(self._events_first):
                await call.event({"i": i})
        self.reached.set()
        await call.caller_leaves()
        self.gone.set()


async def leave_when(reached: asyncio.Event, proxy: Fleet, body: dict[str, Any]) -> None:
    """Send a request, and close the connection as soon as the engine is where the test wants it."""
    url = str(proxy.client.base_url)
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=30) as client:
        asked = asyncio.create_task(client.post("/v1/completions", json=body))
        await reached.wait()
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_during_the_prefill_ends_it(stream: bool) -> None:
    leaver, d = Leaver(), consumer()
    async with fleet([StubEngine(leaver)], [d]) as proxy:
        await leave_when(leaver.reached, proxy, {"prompt": "x", "stream": stream})
        await leaver.gone.wait()
        await proxy.comes_true('cancels_total{stage="prefill"}', 1)
        assert await proxy.count('prefills_total{outcome="cancelled"}') == 1
        assert (await proxy.client.get("/health")).json()["producers"].popitem()[1] == "live"
    assert d.calls == []


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_before_the_consumer_answers_ends_the_decode(stream: bool) -> None:
    leaver = Leaver()
    async with fleet([producer()], [StubEngine(leaver)]) as proxy:
        await leave_when(leaver.reached, proxy, {"prompt": "x", "stream": stream})
        await leaver.gone.wait()
        await proxy.comes_true('cancels_total{stage="decode"}', 1)
        assert proxy.dropped == ["req-1"]


@pytest.mark.parametrize("events", [0, 1, 5])
async def test_a_client_that_leaves_mid_stream_ends_the_decode(events: int) -> None:
    leaver = Leaver(events_first=events)
    async with fleet([producer()], [StubEngine(leaver)]) as proxy:
        await leave_when(leaver.reached, proxy, ASK)
        await leaver.gone.wait()
        await proxy.comes_true('cancels_total{stage="decode"}', 1)
        assert await proxy.count('upstream_errors_total{cause="lost",role="consumer"}') == 0


async def test_a_client_that_does_not_read_and_leaves_ends_a_fast_decode() -> None:
    gone = asyncio.Event()

    async def flood(call: Call) -> None:
        await call.start_events()
        try:
            while True:
                await call.event({"text": "x" * 10_000})
        except ConnectionError:
            gone.set()

    async with fleet([producer()], [StubEngine(flood)]) as proxy:
        async with proxy.client.stream("POST", "/v1/completions", json=ASK) as answer:
            assert answer.status_code == 200
        await gone.wait()
        await proxy.comes_true('cancels_total{stage="decode"}', 1)


async def test_a_client_that_leaves_in_the_middle_of_its_own_request() -> None:
    p = producer()
    async with fleet([p], [consumer()]) as proxy:
        host, port = proxy.client.base_url.host, proxy.client.base_url.port
        _, writer = await asyncio.open_connection(host, port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
        await writer.drain()
        await proxy.comes_true('requests_total{endpoint="/v1/completions"}', 1)
        writer.close()
        await proxy.comes_true('cancels_total{stage="body"}', 1)
    assert p.calls == []


async def test_clients_that_stay_are_never_counted_as_leavers() -> None:
    async def decode(call: Call) -> None:
        await call.start_events()
        await call.event({"text": "a"})
        await call.end_events()

    d = StubEngine(decode)
    async with fleet([producer()], [d]) as proxy:
        done = await asyncio.gather(*(proxy.complete(ASK) for _ in range(30)))
        assert all(answer.text.endswith("data: [DONE]\n\n") for answer in done)
        d.script = answers(200, PREFILLED)
        await asyncio.gather(*(proxy.complete() for _ in range(30)))
        assert "cancels_total{" not in (await proxy.client.get("/metrics")).text
        assert proxy.dropped == []
