"""A small proxy for prefill/decode pairs that run kvlease: for trying it and for tests, see README.md beside this file.

python examples/proxy/proxy.py --producer http://127.0.0.1:8100 --consumer http://127.0.0.1:8200
"""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpx
import uvicorn
from bodies import CHAT, COMPLETIONS, Handoff
from exchange import Exchange
from flight import cause_of, engine_headers, error_body
from metrics import Metrics
from pool import Engine, Pool
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from releases import Releases
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route


@dataclass(frozen=True)
class Settings:
    """Where the engines are, and how long to wait for them. Without producers the consumers serve everything."""

    producers: Sequence[str]
    consumers: Sequence[str]
    connect_timeout_s: float = 2.0
    prefill_timeout_s: float = 300.0


class Views:
    """The read-only routes."""

    def __init__(
        self, client: httpx.AsyncClient, producers: Pool, consumers: Pool, metrics: Metrics, clock: Callable[[], float]
    ) -> None:
        self._client = client
        self._producers = producers
        self._consumers = consumers
        self._metrics = metrics
        self._clock = clock

    async def health(self, _: Request) -> Response:
        """200 while a consumer may be asked. It asks no engine: it tells what the last requests met."""
        now = self._clock()
        is_well = self._consumers.is_live(now)
        content = {
            "status": "ok" if is_well else "no live consumer",
            "producers": self._producers.state(now),
            "consumers": self._consumers.state(now),
        }
        return JSONResponse(content, 200 if is_well else 503)

    async def models(self, request: Request) -> Response:
        """A consumer's list of models."""
        tried: list[Engine] = []
        while (consumer := self._consumers.pick(self._clock(), tried)) is not None:
            tried.append(consumer)
            try:
                answer = await self._client.get(
                    consumer.url + request.url.path, headers=engine_headers(request.headers)
                )
            except httpx.RequestError as error:
                cause, text = cause_of(error)
                consumer.failed(text, self._clock())
                self._metrics.upstream_errors.labels("consumer", cause).inc()
                continue
            consumer.answered()
            return Response(answer.content, answer.status_code, media_type=answer.headers.get("content-type"))
        message = f"no consumer can be reached: {self._consumers.why_down()}"
        return JSONResponse(error_body(502, "consumer_unreachable", message), 502)

    async def metrics(self, _: Request) -> Response:
        """The proxy's counters."""
        return Response(generate_latest(self._metrics.registry), headers={"content-type": CONTENT_TYPE_LATEST})


async def no_such_route(request: Request, _: Exception) -> Response:
    """An unknown path is refused in OpenAI's shape, never sent to a consumer in silence."""
    message = f"this proxy has no route {request.url.path}"
    return JSONResponse(error_body(404, "no_route", message), 404)


def create_app(
    settings: Settings,
    clock: Callable[[], float] = time.monotonic,
    drop_handoff: Callable[[Handoff], None] | None = None,
) -> Starlette:
    """The proxy as an ASGI application.

    `clock` gives seconds, monotonic; `drop_handoff` is told of each handoff that no consumer took; by default
    its lease is given back.
    """
    # No connection is used twice: on a fresh one, a connect error proves that nothing was sent.
    client = httpx.AsyncClient(
        timeout=httpx.Timeout(None, connect=settings.connect_timeout_s),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
        headers={"accept-encoding": "identity"},
        trust_env=False,
    )
    producers, consumers = Pool("producer", settings.producers), Pool("consumer", settings.consumers)
    metrics = Metrics()
    prefill_timeout = httpx.Timeout(settings.prefill_timeout_s, connect=settings.connect_timeout_s)
    releases = Releases()
    exchange = Exchange(client, producers, consumers, metrics, clock, prefill_timeout, drop_handoff or releases)
    views = Views(client, producers, consumers, metrics, clock)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        try:
            async with client:
                yield
        finally:
            await releases.close()

    return Starlette(
        routes=[
            Route(COMPLETIONS, exchange, methods=["POST"]),
            Route(CHAT, exchange, methods=["POST"]),
            Route("/v1/models", views.models),
            Route("/health", views.health),
            Route("/metrics", views.metrics),
        ],
        exception_handlers={404: no_such_route},
        lifespan=lifespan,
    )


def engine_url(text: str) -> str:
    """An engine's base address as the command line gives it, without a trailing slash."""
    url = httpx.URL(text)
    if url.scheme not in ("http", "https") or not url.host:
        raise argparse.ArgumentTypeError(f"{text!r} is not an address like http://127.0.0.1:8100")
    return text.rstrip("/")


def main(argv: Sequence[str] | None = None) -> None:
    """Run the proxy until it is interrupted."""
    parser = argparse.ArgumentParser(
        description="Proxy for prefill/decode pairs that run kvlease (for trying and tests)."
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="port to listen on (default: %(default)s)")
    parser.add_argument(
        "--producer", action="append", default=[], type=engine_url, metavar="URL", help="may be repeated"
    )
    parser.add_argument(
        "--consumer", action="append", required=True, type=engine_url, metavar="URL", help="may be repeated"
    )
    parser.add_argument("--connect-timeout-s", type=float, default=2.0, help="for each engine (default: %(default)s)")
    parser.add_argument(
        "--prefill-timeout-s", type=float, default=300.0, help="a silent producer (default: %(default)s)"
    )
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    settings = Settings(args.producer, args.consumer, args.connect_timeout_s, args.prefill_timeout_s)
    uvicorn.run(
        create_app(settings), host=args.host, port=args.port, ws="none", access_log=False, timeout_graceful_shutdown=5
    )


if __name__ == "__main__":
    main()
