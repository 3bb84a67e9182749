"""What is known of one client request, and how the two HTTP sides are read and written: headers, bodies, errors."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
from bodies import Body, Handoff, handoff_name, printable

_TO_ENGINE = ("authorization", "traceparent", "tracestate", "x-session-id", "x-vllm-priority")
_NOT_TO_CLIENT = frozenset(
    {
        "connection",
        "content-encoding",
        "content-length",
        "date",
        "keep-alive",
        "proxy-authenticate",
        "server",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "x-request-id",
    }
)


class ProxyError(Exception):
    """The answer is our own error: an HTTP status, a machine-readable code, and a sentence."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


@dataclass
class Flight:
    """One client request while it lasts.

    `headers` go to both engines. `handoff` is the one in hand, `is_taken` once a consumer accepted it; `fallback` is
    why there is none. `ended` is true from the moment the last bytes go to the client.
    """

    endpoint: str
    headers: dict[str, str]
    body: Body = field(default_factory=dict)
    stage: str = "body"
    handoff: Handoff | None = None
    is_taken: bool = False
    fallback: str | None = None
    ended: bool = False

    @property
    def request_id(self) -> str:
        """The client's X-Request-Id, or the one made for it."""
        return self.headers["x-request-id"]

    def response_headers(self) -> dict[str, str]:
        """What the proxy adds to an answer, so that its logs and both engines' logs can be matched."""
        headers = {"x-request-id": self.request_id}
        if self.fallback:
            headers["x-kvlease-proxy"] = f"fallback={self.fallback}"
        if self.handoff is not None:
            headers["x-kvlease-handoff"] = handoff_name(self.handoff)
        return headers


def parsed(raw: bytes) -> Body:
    """The client's JSON object; ProxyError 400 when it is not one."""
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ProxyError(400, "bad_json", f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise ProxyError(400, "bad_json", "the body is not a JSON object")
    return body


def encoded(body: Mapping[str, Any]) -> bytes:
    """JSON in ASCII: it can carry whatever `parsed` let in (lone surrogates, NaN), for the engine to judge."""
    return json.dumps(body, separators=(",", ":")).encode("ascii")


def error_body(status: int, code: str, message: str) -> dict[str, Any]:
    """An error in OpenAI's shape."""
    kind = "invalid_request_error" if status < 500 else "upstream_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def engine_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """The headers both legs carry: one request id, made if the client sent none, and what concerns the engine."""
    kept = {name: value for name in _TO_ENGINE if (value := headers.get(name)) and value.isascii()}
    request_id = printable(headers.get("x-request-id", "")) or uuid.uuid4().hex
    return kept | {"x-request-id": request_id, "content-type": "application/json"}


def client_headers(answer: httpx.Response, flight: Flight) -> dict[str, str]:
    """An engine's end-to-end headers and the proxy's own."""
    kept = {name: value for name, value in answer.headers.items() if name not in _NOT_TO_CLIENT and value.isascii()}
    return kept | flight.response_headers()


def is_event_stream(answer: httpx.Response) -> bool:
    """Whether an answer comes event by event."""
    return bool(answer.headers.get("content-type", "").startswith("text/event-stream"))


def cause_of(error: httpx.RequestError) -> tuple[str, str]:
    """A transport error as one word for counters and codes, and as words that follow an engine's address."""
    if isinstance(error, (httpx.ConnectError, httpx.ConnectTimeout)):
        return "unreachable", f"cannot be reached ({type(error).__name__})"
    if isinstance(error, httpx.TimeoutException):
        return "timeout", "gave no answer in time"
    return "lost", f"closed the connection ({type(error).__name__})"
