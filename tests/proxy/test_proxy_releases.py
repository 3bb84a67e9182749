"""Leases that no consumer took go back to a real endpoint; whatever stands in the way is only logged."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from proxy import Settings, create_app
from proxy_fleet import PREFILLED, StubEngine, answers, dead_address, serving
from releases import TRIES, Releases

from kvlease.core.handoff import Handoff, emit_handoff
from kvlease.core.ids import EngineId, Incarnation, LeaseId, LeaseToken
from kvlease.core.leases import Ended, LeaseTiming
from kvlease.core.messages import GoneReason
from kvlease.net.endpoint import Endpoint, GrantItem

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]

LIFE, TOKEN = Incarnation(b"one life of many"), LeaseToken(b"t" * 16)
TIMING = LeaseTiming(60.0, 60.0, 600.0, 0.0, 600.0, 10)


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    made = Endpoint(LIFE, TIMING, "127.0.0.1")
    made.start()
    made.grant(GrantItem(LeaseId("lease"), TOKEN, [1, 2, 3], 3, None, None, [], [[7]]))
    yield made
    made.close()


def params(port: int, host: str = "127.0.0.1", token: LeaseToken = TOKEN) -> dict[str, Any]:
    handoff = Handoff(EngineId("engine-p"), LIFE, LeaseId("lease"), token, host, port, 3)
    return emit_handoff(handoff, block_ids=[[7]], tp_size=1, ttl_s=60.0)


async def ended(endpoint: Endpoint) -> list[Ended]:
    while not (found := endpoint.take_ended()):
        await asyncio.sleep(0.001)
    return found


async def logged(caplog: pytest.LogCaptureFixture, words: str) -> None:
    while words not in caplog.text:
        await asyncio.sleep(0.001)


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.INFO, logger="kvlease.proxy"):
        yield caplog


async def test_a_lease_is_given_back_at_once(endpoint: Endpoint, log: pytest.LogCaptureFixture) -> None:
    releases = Releases()
    releases(params(endpoint.port))
    (one,) = await ended(endpoint)
    assert (one.lease, one.why) == ("lease", GoneReason.RELEASED)
    await logged(log, "handoff engine-p/lease was not used and given back: Released")
    await releases.close()
    assert TOKEN.hex() not in log.text


async def test_the_proxy_gives_back_what_no_consumer_took(endpoint: Endpoint) -> None:
    prefilled = StubEngine(answers(200, PREFILLED | {"kv_transfer_params": params(endpoint.port)}))
    async with prefilled.running(), dead_address() as dead:
        app = create_app(Settings([prefilled.url], [dead]))
        async with serving(app) as url, httpx.AsyncClient(base_url=url, trust_env=False, timeout=30) as client:
            assert (await client.post("/v1/completions", json={"prompt": "x"})).status_code == 502
            assert [one.why for one in await ended(endpoint)] == [GoneReason.RELEASED]


async def test_a_wrong_token_ends_nothing(endpoint: Endpoint, log: pytest.LogCaptureFixture) -> None:
    releases = Releases()
    releases(params(endpoint.port, token=LeaseToken(b"x" * 16)))
    await logged(log, "given back: Gone")
    await releases.close()
    assert endpoint.take_ended() == []


async def test_a_producer_that_does_not_answer_is_asked_a_few_times(log: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        releases = Releases(patience_s=0.01)
        releases(params(silent.getsockname()[1]))
        await logged(log, "ends by itself: no answer")
        await releases.close()
    assert TRIES > 1


@pytest.mark.parametrize(("host", "why"), [("no host", ""), ("", "remote_host")])
async def test_an_address_that_leads_nowhere_is_only_logged(log: pytest.LogCaptureFixture, host: str, why: str) -> None:
    releases = Releases(patience_s=0.01)
    releases(params(1, host=host))
    await logged(log, "ends by itself")
    assert why in log.text
    await releases.close()


async def test_a_handoff_of_another_connector_is_left_to_end_by_itself(log: pytest.LogCaptureFixture) -> None:
    releases = Releases()
    releases({key: value for key, value in params(1).items() if key != "kvlease"})
    await logged(log, "has no 'kvlease' key")
    await releases.close()


async def test_closing_waits_for_nobody() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        releases = Releases(patience_s=60.0)
        releases(params(silent.getsockname()[1]))
        await asyncio.sleep(0)
        await asyncio.wait_for(releases.close(), 30.0)
