"""A proxy under uvicorn and scripted engines beside it, all on real loopback sockets, in the test's own event loop."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing, suppress
from dataclasses import dataclass, field
from typing import Any

import httpx
import uvicorn
from proxy import Settings, create_app

HANDOFF = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "engine-p",
    "remote_request_id": "req-1",
    "remote_block_ids": [[1, 2, 3]],
    "remote_host": "127.0.0.1",
    "remote_port": 5600,
    "kvlease": {"v": 1, "token": "c2VjcmV0", "some_future_key": [1.5, None]},
}
PREFILLED = {"id": "cmpl-1", "choices": [{"text": "x"}], "kv_transfer_params": HANDOFF}
DECODED = {"id": "cmpl-1", "choices": [{"text": " world"}], "usage": {"prompt_tokens": 3, "completion_tokens": 1}}


@dataclass
class Call:
    """One request that an engine received, and the means to answer it byte by byte."""

    path: str
    headers: dict[str, str]
    body: Any
    _reader: asyncio.StreamReader
    _writer: asyncio.StreamWriter

    async def answer(self, status: int, content: object, headers: Mapping[str, str] | None = None) -> None:
        raw = content if isinstance(content, bytes) else json.dumps(content).encode()
        await self.head(
            status, {"content-type": "application/json", "content-length": str(len(raw))} | dict(headers or {})
        )
        await self.write(raw)

    async def head(self, status: int, headers: Mapping[str, str]) -> None:
        lines = [f"HTTP/1.1 {status} Whatever", "connection: close", *(f"{k}: {v}" for k, v in headers.items())]
        await self.write("\r\n".join(lines).encode() + b"\r\n\r\n")

    async def start_events(self) -> None:
        await self.head(200, {"content-type": "text/event-stream; charset=utf-8", "transfer-encoding": "chunked"})

    async def chunk(self, raw: bytes) -> None:
        await self.write(f"{len(raw):x}\r\n".encode() + raw + b"\r\n")

    async def event(self, content: object) -> None:
        await self.chunk(b"data: " + json.dumps(content).encode() + b"\n\n")

    async def end_events(self) -> None:
        await self.chunk(b"data: [DONE]\n\n")
        await self.write(b"0\r\n\r\n")

    async def write(self, raw: bytes) -> None:
        self._writer.write(raw)
        await self._writer.drain()

    async def caller_leaves(self) -> None:
        with suppress(ConnectionResetError):
            assert await self._reader.read(1) == b""


Script = Callable[[Call], Awaitable[None]]


@dataclass
class StubEngine:
    """An engine that answers every request by its script and hangs up when the script returns."""

    script: Script
    url: str = ""
    calls: list[Call] = field(default_factory=list)

    @property
    def bodies(self) -> list[Any]:
        return [call.body for call in self.calls]

    @asynccontextmanager
    async def running(self) -> AsyncIterator[StubEngine]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with server:
            yield self

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with closing(writer):
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = {k.lower(): v for k, _, v in (line.partition(": ") for line in head[1:] if line)}
            raw = await reader.readexactly(int(headers.get("content-length", "0")))
            call = Call(head[0].split()[1], headers, json.loads(raw) if raw else None, reader, writer)
            self.calls.append(call)
            await self.script(call)


def answers(status: int, content: object, headers: Mapping[str, str] | None = None) -> Script:
    """A script: always this answer."""

    async def script(call: Call) -> None:
        await call.answer(status, content, headers)

    return script


def producer() -> StubEngine:
    return StubEngine(answers(200, PREFILLED))


def consumer() -> StubEngine:
    return StubEngine(answers(200, DECODED))


async def hang_up(_: Call) -> None:
    """A script: close the connection without a word."""


@dataclass
class Clock:
    """The proxy's clock."""

    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Fleet:
    """The proxy as its client sees it."""

    client: httpx.AsyncClient
    clock: Clock
    dropped: list[str]

    async def complete(self, body: Mapping[str, Any] | None = None, **headers: str) -> httpx.Response:
        return await self.client.post(
            "/v1/completions", json=body or {"model": "m", "prompt": "hello"}, headers=headers
        )

    async def count(self, sample: str) -> float:
        """The value of one sample of /metrics, 0 when it is not there."""
        for line in (await self.client.get("/metrics")).text.splitlines():
            name, _, value = line.rpartition(" ")
            if name == f"kvlease_proxy_{sample}":
                return float(value)
        return 0.0

    async def comes_true(self, sample: str, value: float) -> None:
        """Wait until a sample has this value; the test's time limit is the bound."""
        while await self.count(sample) != value:
            await asyncio.sleep(0)


def addresses(engines: Sequence[StubEngine | str]) -> list[str]:
    return [engine if isinstance(engine, str) else engine.url for engine in engines]


@asynccontextmanager
async def fleet(
    producers: Sequence[StubEngine | str], consumers: Sequence[StubEngine | str], prefill_timeout_s: float = 30.0
) -> AsyncIterator[Fleet]:
    """A running proxy in front of running stubs (a string is an address that nobody serves)."""
    clock, dropped = Clock(), list[str]()
    async with AsyncExitStack() as stack:
        for engine in (*producers, *consumers):
            if isinstance(engine, StubEngine):
                await stack.enter_async_context(engine.running())
        settings = Settings(addresses(producers), addresses(consumers), prefill_timeout_s=prefill_timeout_s)
        app = create_app(settings, clock, lambda handoff: dropped.append(handoff["remote_request_id"]))
        url = await stack.enter_async_context(serving(app))
        async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=30) as client:
            yield Fleet(client, clock, dropped)


@asynccontextmanager
async def serving(app: Any) -> AsyncIterator[str]:
    """The app under uvicorn in this event loop, without its signal handlers and its polling main loop."""
    config = uvicorn.Config(app, port=0, log_config=None, ws="none", lifespan="on", timeout_graceful_shutdown=5)
    config.load()
    server = uvicorn.Server(config)
    server.lifespan = config.lifespan_class(config)
    await server.startup()
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        await server.shutdown()


@asynccontextmanager
async def dead_address() -> AsyncIterator[str]:
    """An address that refuses connections for as long as the block lasts: bound, not listening."""
    with closing(socket.socket()) as sock:
        sock.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
