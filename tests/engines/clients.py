"""Clients of one consumer, as the fault tests and the fault suite need them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from devtools.engines import REQUEST_TIMEOUT_S, SERVED_NAME, Engine, completion_body
from devtools.metrics import RUNNING
from tests.engines.relay import Relay
from tests.engines.support import wait_until

POLICIES = ["recompute", "fail"]
NO_ANSWER, CONNECTION_LOST = 0, -1
"""In place of an HTTP status: none came in time, or the server went away."""


@dataclass
class Answer:
    """What a client of one consumer got."""

    status: int
    token_ids: list[int] | None
    text: str

    def check(self, policy: str, expected: list[int]) -> None:
        """The right text under `recompute`, an error under `fail`; anything else is a wrong text."""
        if policy == "recompute":
            assert (self.status, self.token_ids) == (200, expected), self.text
        else:
            assert self.status == 500, self.text


def ask(
    consumer: Engine,
    prompt: list[int],
    params: dict[str, Any] | None,
    max_tokens: int = 8,
    *,
    timeout_s: float = REQUEST_TIMEOUT_S,
    **body: Any,
) -> Answer:
    """One completion, whatever comes of it. The tokens of n choices come one after the other."""
    wanted = completion_body(prompt, max_tokens, kv_transfer_params=params, **body)
    try:
        response = consumer.post("/v1/completions", wanted, timeout_s)
    except httpx.TimeoutException:
        return Answer(NO_ANSWER, None, f"no answer in {timeout_s:.0f} s")
    except httpx.TransportError as error:
        return Answer(CONNECTION_LOST, None, repr(error))
    token_ids = None
    if response.status_code == 200:
        token_ids = [token for choice in response.json()["choices"] for token in choice["token_ids"]]
    return Answer(response.status_code, token_ids, response.text)


@contextmanager
def occupied(consumer: Engine, places: int = 2) -> Iterator[None]:
    """All of the consumer's places are taken until the block ends, however fast the machine is."""
    body = completion_body([1, 2, 3], 8000, ignore_eos=True, stream=True, model=SERVED_NAME)
    with ExitStack() as streams:
        for _ in range(places):
            streams.enter_context(consumer.http.stream("POST", "/v1/completions", json=body))
        wait_until(lambda: consumer.metrics().total(RUNNING) == places, "all places are taken")
        yield


def through(relay: Relay, handoff: dict[str, Any]) -> dict[str, Any]:
    """The same handoff, with the relay's address as its hint."""
    return {**handoff, "remote_host": "127.0.0.1", "remote_port": relay.port}
