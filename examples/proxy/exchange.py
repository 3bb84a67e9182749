"""One client request: prefill on a producer, decode on a consumer, and every way in which that can end.

    body ──► prefill ──► decode ──► ended
               │ 4xx: relayed, no decode          nothing goes to the client before
               │ failed: decode without handoff   the consumer's status is known
    the client leaves at any stage ──► the upstream call is cancelled, an unused handoff is dropped

Invariants: a handoff goes to one consumer, once. Nothing is retried after it may have been received, except a prefill:
its worst case is a lease that nobody takes and that ends by itself.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine
from typing import Any

import httpx
from bodies import Handoff, consumer_body, handoff_in, handoff_name, producer_body, served_alone
from flight import (
    Flight,
    ProxyError,
    cause_of,
    client_headers,
    encoded,
    engine_headers,
    error_body,
    is_event_stream,
    parsed,
)
from metrics import Metrics
from pool import Engine, Pool
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

log = logging.getLogger("kvlease.proxy")

PREFILL_TRIES = 2
WARN_EVERY_S = 60.0


class ClientLeftError(Exception):
    """The client closed its connection before it had its answer."""


class Exchange:
    """The ASGI endpoint of both completion routes."""

    def __init__(
        self,
        client: httpx.AsyncClient,
        producers: Pool,
        consumers: Pool,
        metrics: Metrics,
        clock: Callable[[], float],
        prefill_timeout: httpx.Timeout,
        drop_handoff: Callable[[Handoff], None],
    ) -> None:
        self._client = client
        self._producers = producers
        self._consumers = consumers
        self._metrics = metrics
        self._clock = clock
        self._prefill_timeout = prefill_timeout
        self._drop_handoff = drop_handoff
        self._warned_at: dict[str, float] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        request = Request(scope, receive)
        flight = Flight(request.url.path, engine_headers(request.headers))
        self._metrics.requests.labels(flight.endpoint).inc()
        try:
            flight.body = parsed(await request.body())
            await while_connected(receive, flight, self._serve(flight, send))
        except (ClientLeftError, ClientDisconnect):
            self._metrics.cancels.labels(flight.stage).inc()
            log.info("%s: the client left at %s", flight.request_id, flight.stage)
        except ProxyError as error:
            content = encoded(error_body(error.status, error.code, str(error)))
            headers = {"content-type": "application/json"} | flight.response_headers()
            await send_whole(send, flight, error.status, headers, content)
        finally:
            self._drop_unused(flight)

    async def _serve(self, flight: Flight, send: Send) -> None:
        flight.fallback = alone = served_alone(flight.endpoint, flight.body)
        tried: set[Engine] = set()
        while (consumer := self._consumers.pick(self._clock(), tried)) is not None:
            tried.add(consumer)
            refusal = None if alone else await self._prefill(flight)
            if refusal is not None:
                await send_whole(send, flight, refusal.status_code, client_headers(refusal, flight), refusal.content)
                return
            if await self._decode(flight, consumer, send):
                return
            self._drop_unused(flight)
        raise ProxyError(502, "consumer_unreachable", f"no consumer can be reached: {self._consumers.why_down()}")

    async def _prefill(self, flight: Flight) -> httpx.Response | None:
        """Ask a producer, and one more if it fails; sets the handoff or the fallback. Returns a refusal to relay."""
        flight.stage, flight.fallback = "prefill", None
        content = encoded(producer_body(flight.endpoint, flight.body))
        tried: set[Engine] = set()
        while len(tried) < PREFILL_TRIES and (producer := self._producers.pick(self._clock(), tried)) is not None:
            tried.add(producer)
            outcome, answer = await self._ask_producer(flight, producer, content)
            self._metrics.prefills.labels(outcome).inc()
            if outcome == "refused":
                return answer
            if outcome == "handed":
                return None
            if outcome == "no_handoff":
                flight.fallback = outcome
                return None
        flight.fallback = "prefill_failed" if self._producers.is_live(self._clock()) else "no_producer"
        return None

    async def _ask_producer(
        self, flight: Flight, producer: Engine, content: bytes
    ) -> tuple[str, httpx.Response | None]:
        """One prefill call: its outcome (see `Metrics`) and, when refused, the answer."""
        url, timeout = producer.url + flight.endpoint, self._prefill_timeout
        try:
            answer = await self._client.post(url, content=content, headers=flight.headers, timeout=timeout)
        except asyncio.CancelledError:
            self._metrics.prefills.labels("cancelled").inc()
            raise
        except httpx.RequestError as error:
            return self._failed(flight, self._producers, producer, error), None
        if 400 <= answer.status_code < 500:
            producer.answered()
            return "refused", answer
        if not answer.is_success:
            producer.failed(f"answered {answer.status_code}", self._clock())
            self._count_error(flight, self._producers, producer, "server_error", f"status {answer.status_code}")
            return "server_error", None
        producer.answered()
        try:
            flight.handoff = handoff_in(answer.json())
        except ValueError:
            flight.handoff = None
        return ("handed" if flight.handoff is not None else "no_handoff"), None

    async def _decode(self, flight: Flight, consumer: Engine, send: Send) -> bool:
        """Send the consumer's leg and relay its answer; False when nothing was sent: it could not be reached."""
        flight.stage = "decode"
        url, content = consumer.url + flight.endpoint, encoded(consumer_body(flight.body, flight.handoff))
        try:
            async with self._client.stream("POST", url, content=content, headers=flight.headers) as answer:
                consumer.answered()
                self._note_answer(flight, consumer, answer)
                if is_event_stream(answer):
                    await self._relay_events(flight, consumer, answer, send)
                    return True
                await answer.aread()
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            self._failed(flight, self._consumers, consumer, error)
            return False
        except httpx.RequestError as error:
            cause = self._failed(flight, self._consumers, consumer, error)
            raise ProxyError(502, f"consumer_{cause}", f"consumer {consumer.url} {consumer.cause}") from error
        await send_whole(send, flight, answer.status_code, client_headers(answer, flight), answer.content)
        return True

    def _note_answer(self, flight: Flight, consumer: Engine, answer: httpx.Response) -> None:
        """A consumer's status and headers are here: it has the handoff, or serves the request alone, or failed."""
        flight.is_taken = answer.is_success
        if answer.status_code >= 500:
            self._count_error(flight, self._consumers, consumer, "server_error", f"status {answer.status_code}")
        if flight.fallback is None:
            return
        self._metrics.fallbacks.labels(flight.fallback).inc()
        now = self._clock()
        if now - self._warned_at.get(flight.fallback, -math.inf) >= WARN_EVERY_S:
            self._warned_at[flight.fallback] = now
            log.warning("%s: no handoff: %s (told once a minute)", flight.request_id, flight.fallback)

    async def _relay_events(self, flight: Flight, consumer: Engine, answer: httpx.Response, send: Send) -> None:
        """Relay an event stream as it comes, by whole lines: half a line must not swallow the event of an error."""
        await send_start(send, answer.status_code, client_headers(answer, flight))
        tail = b""
        try:
            async for chunk in answer.aiter_bytes():
                lines, newline, tail = (tail + chunk).rpartition(b"\n")
                if newline:
                    await send({"type": "http.response.body", "body": lines + newline, "more_body": True})
        except httpx.RequestError as error:
            cause = self._failed(flight, self._consumers, consumer, error)
            message = f"consumer {consumer.url} {consumer.cause} in the middle of its answer"
            tail = b"\ndata: " + encoded(error_body(502, f"consumer_{cause}", message)) + b"\n\n"
        flight.ended = True
        await send({"type": "http.response.body", "body": tail, "more_body": False})

    def _drop_unused(self, flight: Flight) -> None:
        if flight.handoff is not None and not flight.is_taken:
            self._drop_handoff(flight.handoff)
        flight.handoff = None

    def _failed(self, flight: Flight, pool: Pool, engine: Engine, error: httpx.RequestError) -> str:
        """Put an engine down after a transport error: returns the cause in one word."""
        cause, text = cause_of(error)
        engine.failed(text, self._clock())
        self._count_error(flight, pool, engine, cause, text)
        return cause

    def _count_error(self, flight: Flight, pool: Pool, engine: Engine, cause: str, text: str) -> None:
        self._metrics.upstream_errors.labels(pool.role, cause).inc()
        name = f", handoff {handoff_name(flight.handoff)}" if flight.handoff is not None else ""
        log.warning("%s: %s %s: %s%s", flight.request_id, pool.role, engine.url, text, name)


async def while_connected(receive: Receive, flight: Flight, work: Coroutine[Any, Any, None]) -> None:
    """Run `work`; cancel it and raise ClientLeftError when the client leaves before the flight has ended."""
    task = asyncio.create_task(work)
    left = asyncio.create_task(disconnected(receive))
    try:
        await asyncio.wait((task, left), return_when=asyncio.FIRST_COMPLETED)
        if not (task.done() or flight.ended):
            raise ClientLeftError
        await task
    finally:
        task.cancel()
        left.cancel()
        await asyncio.gather(task, left, return_exceptions=True)


async def disconnected(receive: Receive) -> None:
    """Return when the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def send_start(send: Send, status: int, headers: dict[str, str]) -> None:
    """Send the status and the headers of an answer."""
    raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})


async def send_whole(send: Send, flight: Flight, status: int, headers: dict[str, str], content: bytes) -> None:
    """Send an answer that is here as a whole."""
    flight.ended = True
    await send_start(send, status, headers | {"content-length": str(len(content))})
    await send({"type": "http.response.body", "body": content, "more_body": False})
