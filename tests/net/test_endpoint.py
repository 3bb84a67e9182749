"""The endpoint over real sockets: what consumers get, and what no consumer can do to it."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import zmq

from kvlease.core.compat import fingerprint
from kvlease.core.digest import prompt_digest
from kvlease.core.ids import Incarnation, LeaseId, LeaseToken
from kvlease.core.leases import LeaseTiming
from kvlease.core.messages import (
    PROTOCOL_VERSION,
    REQUEST_BYTES_MAX,
    Acquire,
    Commit,
    Committed,
    Gone,
    GoneReason,
    Granted,
    Hello,
    Holding,
    Invalid,
    Ping,
    Pong,
    RankInfo,
    Refused,
    Release,
    Released,
    Renew,
    Renewed,
    Welcome,
    decode_reply,
    encode,
)
from kvlease.net.endpoint import Endpoint, EndpointError, GrantItem, GrantRefusedError
from kvlease.net.lifeline import Lifeline, LifelineAddress

US = Incarnation(b"producer-life-01")
TOKEN = LeaseToken(b"token-of-lease-1")
PROMPT = list(range(100, 148))
DIGEST = prompt_digest(PROMPT, 48, None, "salt", ["image"])
TIMING = LeaseTiming(30.0, 10.0, 600.0, 0.0, 600.0, 1000)
PATIENCE_S = 20.0


class Client:
    """A consumer's socket that asks one thing at a time."""

    def __init__(self, port: int) -> None:
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.SNDTIMEO, int(PATIENCE_S * 1000))
        self.socket.connect(f"tcp://127.0.0.1:{port}")
        self._seq = 1 << 40  # apart from the numbers that tests make up

    def close(self) -> None:
        self._context.destroy(linger=0)

    def send(self, *frames: bytes) -> None:
        self.socket.send_multipart(frames)

    def receive(self) -> Any:
        assert self.socket.poll(PATIENCE_S * 1000), "no answer"
        return decode_reply(self.socket.recv())

    def ask(self, kind: Any, to: Incarnation = US, **fields: Any) -> Any:
        self._seq += 1
        self.send(encode(kind(seq=self._seq, to=to, **fields)))
        while (reply := self.receive()).seq != self._seq:
            pass  # to something else that was sent without waiting
        return reply

    def acquire(self, lease: str = "L", reader: str = "c/1", **fields: Any) -> Any:
        fields = {"token": TOKEN, "digest": DIGEST, "channel": "c"} | fields
        return self.ask(Acquire, lease=lease, reader=reader, **fields)

    def commit(self, lease: str = "L", reader: str = "c/1", **fields: Any) -> Any:
        fields = {"token": TOKEN, "rank": 0, "of_ranks": 1} | fields
        return self.ask(Commit, lease=lease, reader=reader, **fields)

    def release(self, lease: str = "L", reader: str | None = "c/1") -> Any:
        return self.ask(Release, lease=lease, token=TOKEN, reader=reader)


def item(lease: str = "L", **fields: Any) -> GrantItem:
    ours: dict[str, Any] = {"token": TOKEN, "token_ids": [*PROMPT, 1, 2], "num_tokens": 48, "lora": None}
    ours |= {"cache_salt": "salt", "mm_hashes": ["image"], "block_ids": [[7, 8, 9], [3]]}
    return GrantItem(lease=LeaseId(lease), **(ours | fields))


def ended(endpoint: Endpoint) -> list[tuple[str, str]]:
    return [(one.lease, one.why.value) for one in endpoint.take_ended()]


def wait_for(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + PATIENCE_S
    while not (result := condition()):
        assert time.monotonic() < deadline, "it did not happen"
        threading.Event().wait(0.002)
    return result


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    endpoint = Endpoint(US, TIMING, "127.0.0.1")
    endpoint.start()
    yield endpoint
    endpoint.close()


@pytest.fixture
def client(endpoint: Endpoint) -> Iterator[Client]:
    client = Client(endpoint.port)
    yield client
    client.close()


# What a consumer gets.


def test_a_lease_from_grant_to_end(endpoint: Endpoint, client: Client) -> None:
    endpoint.grant(item())
    assert endpoint.num_live == 1
    reply = client.acquire()
    assert isinstance(reply, Granted)
    assert (reply.num_tokens, reply.blocks, reply.ttl_s) == (48, [[(7, 3)], [(3, 1)]], 10.0)
    assert isinstance(client.ask(Renew, channel="c", base=0, generation=0), Renewed)
    assert endpoint.take_ended() == []
    assert isinstance(client.commit(), Committed)
    assert ended(endpoint) == [("L", "committed")]
    assert endpoint.take_ended() == []
    assert endpoint.num_live == 0


def test_grants_are_in_force_before_any_message_that_follows_them(endpoint: Endpoint, client: Client) -> None:
    for number in range(300):
        endpoint.grant(item(f"L{number}"))
        assert isinstance(client.acquire(f"L{number}", f"c/{number}"), Granted)


def test_messages_that_come_twice_are_answered_twice_alike(endpoint: Endpoint, client: Client) -> None:
    endpoint.grant(item())
    endpoint.grant(item("M"))
    for expected, ask in (
        (Granted, client.acquire),
        (Committed, client.commit),
        (Released, lambda: client.release("M")),
        (Released, lambda: client.release("L")),
    ):
        assert [type(ask()) for _ in range(3)] == [expected] * 3
    assert ended(endpoint) == [("L", "committed"), ("M", "released")]


def test_another_prompt_or_token_or_incarnation_gets_nothing(endpoint: Endpoint, client: Client) -> None:
    endpoint.grant(item())
    for why, fields in (
        (GoneReason.MISMATCH, {"digest": prompt_digest(PROMPT, 48, None, "another tenant's salt", ["image"])}),
        (GoneReason.BAD_TOKEN, {"token": b"token-of-nobody!"}),
        (GoneReason.UNKNOWN, {"to": Incarnation(b"producer-life-00")}),
        (GoneReason.UNKNOWN, {"lease": "X"}),
    ):
        reply = client.acquire(**fields)
        assert isinstance(reply, Gone)
        assert (reply.why, reply.incarnation) == (why, US)
    assert isinstance(client.acquire(), Granted)


def test_anybody_may_ping_whatever_they_think_who_lives_here(client: Client) -> None:
    assert client.ask(Ping, to=Incarnation(bytes(16))) == Pong(seq=(1 << 40) + 1, incarnation=US)


def test_workers_are_welcome_once_ours_are_up(endpoint: Endpoint, client: Client) -> None:
    factors = {"block_size": "16"}
    hello: dict[str, Any] = {"version": PROTOCOL_VERSION, "factors": factors, "fingerprint": fingerprint(factors)}
    reply = client.ask(Hello, ranks=[0], **hello)
    assert isinstance(reply, Refused)
    assert reply.why == "starting"
    ranks = [RankInfo(rank=0, agent_metadata=b"metadata", regions=[(1, 2, 3, 4, 0, 0)])]
    endpoint.set_ranks(ranks, factors, fingerprint(factors), True)
    reply = client.ask(Hello, ranks=[0], **hello)
    assert isinstance(reply, Welcome)
    assert reply.ranks == ranks
    assert isinstance(client.ask(Hello, ranks=[1], **hello), Refused)
    counters = endpoint.stats().counters
    assert (counters["welcomed"], counters["refused_hello"]) == (1, 2)


def test_what_nobody_claims_ends_without_any_message() -> None:
    endpoint = Endpoint(US, LeaseTiming(0.05, 10.0, 600.0, 0.0, 600.0, 10), "127.0.0.1")
    endpoint.start()
    endpoint.grant(item())
    assert wait_for(lambda: ended(endpoint)) == [("L", "expired")]
    endpoint.close()


def test_leases_end_during_a_flood() -> None:
    endpoint = Endpoint(US, LeaseTiming(0.05, 10.0, 600.0, 0.0, 600.0, 10), "127.0.0.1")
    endpoint.start()
    client = Client(endpoint.port)
    endpoint.grant(item())
    ping = encode(Ping(seq=1, to=US))

    def flood() -> list[tuple[str, str]]:
        for _ in range(500):
            client.send(ping)
        return ended(endpoint)

    assert wait_for(flood) == [("L", "expired")]
    client.close()
    endpoint.close()


# What no consumer can do.


def mangled(valid: list[bytes], numbers: random.Random) -> bytes:
    frame = bytearray(numbers.choice(valid))
    match numbers.randrange(6):
        case 0:
            return bytes(frame[: numbers.randrange(len(frame))])
        case 1:
            for _ in range(numbers.randrange(1, 4)):
                frame[numbers.randrange(len(frame))] ^= 1 << numbers.randrange(8)
            return bytes(frame)
        case 2:
            return numbers.randbytes(numbers.randrange(200))
        case 3:
            return bytes(frame) + numbers.randbytes(numbers.randrange(1, 9))
        case 4:
            return b"\x81" * numbers.randrange(1, 5000)
        case _:
            start = numbers.randrange(len(frame))
            return bytes(frame[:start] + numbers.randbytes(4) + frame[start + 4 :])


def test_two_thousand_mangled_messages_do_no_harm(endpoint: Endpoint, client: Client) -> None:
    endpoint.grant(item())
    ids: dict[str, Any] = {"seq": 1, "to": US, "lease": "L", "token": TOKEN, "reader": "x/1"}
    holding = Holding(lease="L", token=TOKEN, reader="x/1")
    valid = [
        encode(Acquire(**ids, channel="x", digest=b"not the prompt's")),
        encode(Commit(**ids, rank=0, of_ranks=2)),
        encode(Renew(seq=2, to=US, channel="x", base=0, generation=3, added=[holding] * 3, removed=["y"], full=True)),
        encode(Hello(seq=3, to=US, version=1, factors={"a": "b"}, fingerprint="c", ranks=[0])),
        encode(Ping(seq=4, to=US)),
    ]
    numbers = random.Random(20_240_601)
    for _ in range(2000):
        frames = [mangled(valid, numbers) for _ in range(numbers.choice([1, 1, 1, 1, 1, 1, 2, 3]))]
        client.send(*frames)
    assert isinstance(client.acquire(), Granted)
    assert isinstance(client.commit(), Committed)
    assert ended(endpoint) == [("L", "committed")]
    stats = endpoint.stats()
    assert stats.counters["invalid_malformed"] > 500
    assert "invalid_internal" not in stats.counters
    assert stats.gauges["alive"] == stats.gauges["accepting"] == 1.0


def test_a_request_that_makes_no_sense_is_refused_in_words(endpoint: Endpoint, client: Client) -> None:
    endpoint.grant(item())
    client.acquire()
    reply = client.commit(rank=4, of_ranks=2)
    assert isinstance(reply, Invalid)
    assert (reply.reason, reply.text) == ("bad_rank", "rank 4 of 2")
    assert isinstance(client.commit(), Committed)


def test_an_oversized_message_is_thrown_away_before_it_is_read(endpoint: Endpoint, client: Client) -> None:
    endpoint.grant(item())
    assert isinstance(client.ask(Ping), Pong)
    big = Client(endpoint.port)
    big.send(b"x" * (REQUEST_BYTES_MAX + 1))
    assert isinstance(client.acquire(), Granted)
    assert endpoint.stats().counters.keys().isdisjoint({"invalid_oversized", "invalid_malformed"})
    big.close()


def test_a_consumer_that_never_reads_its_answers_delays_nobody(endpoint: Endpoint, client: Client) -> None:
    deaf = Client(endpoint.port)
    deaf.socket.setsockopt(zmq.RCVHWM, 1)
    for _ in range(5000):
        deaf.send(encode(Ping(seq=1, to=US)))
    assert isinstance(client.ask(Ping), Pong)
    deaf.close()


def test_a_consumer_that_has_gone_is_not_an_error(endpoint: Endpoint, client: Client) -> None:
    for _ in range(20):
        hasty = Client(endpoint.port)
        hasty.send(encode(Ping(seq=1, to=US)))
        hasty.close()
    assert isinstance(client.ask(Ping), Pong)


def test_nothing_that_is_logged_or_shown_has_a_token(
    endpoint: Endpoint, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("DEBUG"):
        endpoint.grant(item())
        client.acquire(token=b"token-of-nobody!")
        client.send(encode(Ping(seq=1, to=US)) + TOKEN)
        client.acquire()
    assert "token-of" not in caplog.text + repr(endpoint) + repr(endpoint.stats())
    assert TOKEN.hex() not in caplog.text


# Starting.


def test_a_port_that_is_taken_is_named_with_the_setting_to_change(endpoint: Endpoint) -> None:
    second = Endpoint(US, TIMING, "127.0.0.1", endpoint.port)
    with pytest.raises(EndpointError, match=f"127.0.0.1:{endpoint.port}: Address already in use.*'port'.*kv_port"):
        second.start()
    assert not second.is_alive
    second.close()


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid", "not a host"])
def test_a_host_that_is_not_ours_is_named_with_the_setting_to_change(host: str) -> None:
    with pytest.raises(EndpointError, match=f"{host}.*'host'"):
        Endpoint(US, TIMING, host).start()


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "0.0.0.0"])
def test_hosts_may_be_names_or_numbers(host: str) -> None:
    endpoint = Endpoint(US, TIMING, host)
    endpoint.start()
    assert endpoint.port > 0
    endpoint.close()


def test_it_starts_once(endpoint: Endpoint) -> None:
    with pytest.raises(EndpointError, match="once"):
        endpoint.start()


# Ending.


def test_closing_ends_everything_as_revoked(endpoint: Endpoint, client: Client) -> None:
    endpoint.grant(item())
    client.acquire()
    endpoint.grant(item("M"))
    endpoint.close()
    assert sorted(ended(endpoint)) == [("L", "revoked"), ("M", "revoked")]
    assert not endpoint.is_alive
    with pytest.raises(GrantRefusedError, match="closed"):
        endpoint.grant(item("N"))
    endpoint.close()
    endpoint.revoke_all()
    assert ended(endpoint) == []


def test_an_endpoint_that_was_never_started_refuses_and_closes() -> None:
    endpoint = Endpoint(US, TIMING, "127.0.0.1", 4711)
    with pytest.raises(GrantRefusedError, match="not been started"):
        endpoint.grant(item())
    lifeline = Lifeline()
    endpoint.watch([lifeline.address])
    assert (endpoint.port, endpoint.is_alive, endpoint.num_live, endpoint.take_ended()) == (4711, False, 0, [])
    assert endpoint.stats().gauges["alive"] == 0.0
    endpoint.close()
    assert lifeline.sever(PATIENCE_S)
    with pytest.raises(EndpointError, match="once"):
        endpoint.start()


def test_a_name_is_free_again_when_its_end_was_fetched(endpoint: Endpoint, client: Client) -> None:
    endpoint.grant(item())
    with pytest.raises(GrantRefusedError, match="has not ended"):
        endpoint.grant(item())
    client.release()
    with pytest.raises(GrantRefusedError, match="has not ended"):
        endpoint.grant(item())
    assert ended(endpoint) == [("L", "released")]
    endpoint.grant(item())
    assert isinstance(client.acquire(), Granted)


def test_revoking_ends_all_and_the_endpoint_goes_on(endpoint: Endpoint, client: Client) -> None:
    endpoint.grant(item())
    client.acquire()
    endpoint.revoke_all()
    assert client.commit().why is GoneReason.REVOKED
    assert ended(endpoint) == [("L", "revoked")]
    endpoint.grant(item("M"))
    assert isinstance(client.acquire("M"), Granted)


def test_grants_and_ends_from_two_threads_meet_exactly_once(endpoint: Endpoint, client: Client) -> None:
    granted = [f"L{number}" for number in range(500)]
    seen: list[str] = []

    def engine() -> None:
        for name in granted:
            endpoint.grant(item(name))
            seen.extend(one.lease for one in endpoint.take_ended())

    thread = threading.Thread(target=engine)
    thread.start()
    for name in granted:
        client.release(name, None)  # some come before their grant: those leases end at closing
    thread.join()
    endpoint.close()
    seen.extend(one.lease for one in endpoint.take_ended())
    assert sorted(seen) == sorted(granted)


# Lifelines.


@pytest.fixture
def lifelines(endpoint: Endpoint) -> Iterator[list[Lifeline]]:
    lifelines = [Lifeline(), Lifeline()]
    endpoint.watch([lifeline.address for lifeline in lifelines])
    yield lifelines
    for lifeline in lifelines:
        lifeline.sever(PATIENCE_S)


def test_after_a_worker_has_severed_its_lifeline_nothing_is_vouched_for(
    endpoint: Endpoint, client: Client, lifelines: list[Lifeline], caplog: pytest.LogCaptureFixture
) -> None:
    endpoint.grant(item())
    endpoint.grant(item("M"))
    client.acquire()
    client.acquire("M", "c/2")
    assert isinstance(client.commit("M", "c/2"), Committed)
    assert lifelines[0].sever(PATIENCE_S)
    assert client.commit().why is GoneReason.REVOKED
    assert client.acquire(reader="c/3").why is GoneReason.REVOKED
    assert isinstance(client.commit("M", "c/2"), Committed), "its bytes were proven before"
    assert ended(endpoint) == [("M", "committed"), ("L", "revoked")]
    with pytest.raises(GrantRefusedError, match="worker"):
        endpoint.grant(item("N"))
    assert isinstance(client.ask(Ping), Pong)
    assert lifelines[1].sever(PATIENCE_S)
    assert [record.name for record in caplog.records if "worker" in record.getMessage()] == ["kvlease.endpoint"]


def test_a_lifeline_that_comes_too_late_is_hung_up_at_once(
    endpoint: Endpoint, client: Client, lifelines: list[Lifeline]
) -> None:
    assert lifelines[0].sever(PATIENCE_S)
    late = Lifeline()
    endpoint.watch([late.address])
    assert isinstance(client.ask(Ping), Pong)
    assert late.sever(PATIENCE_S)
    endpoint.close()
    later = Lifeline()
    endpoint.watch([later.address])
    assert later.sever(PATIENCE_S)


def test_closing_lets_the_workers_go(endpoint: Endpoint, lifelines: list[Lifeline]) -> None:
    endpoint.close()
    assert all(lifeline.sever(PATIENCE_S) for lifeline in lifelines)


def test_a_worker_that_cannot_be_reached_stops_the_start(endpoint: Endpoint) -> None:
    lifeline = Lifeline()
    lifeline.sever()
    with pytest.raises(EndpointError, match=f"lifeline at 127.0.0.1:{lifeline.address.port}"):
        endpoint.watch([LifelineAddress("127.0.0.1", lifeline.address.port, b"")])


# What is seen from outside.


def test_its_numbers_are_the_same_object_until_something_happened(endpoint: Endpoint, client: Client) -> None:
    endpoint.grant(item())
    client.acquire()
    numbers = endpoint.numbers
    assert endpoint.numbers is numbers
    client.commit()
    assert endpoint.numbers is not numbers
    assert (numbers.counters.get("committed"), endpoint.numbers.counters["committed"]) == (None, 1)


def test_stats_are_flat_and_current_with_the_last_answer(endpoint: Endpoint, client: Client) -> None:
    endpoint.grant(item())
    client.acquire()
    client.acquire(digest=b"")
    client.ask(Renew, channel="c", base=0, generation=0)
    stats = endpoint.stats()
    assert stats.counters == {"granted": 1, "acquired": 1, "refused_mismatch": 1, "renewed": 1}
    assert stats.gauges.pop("oldest_lease_age_s") >= 0.0
    assert stats.gauges == {"leases_live": 1, "tombstones": 0, "channels": 1, "alive": 1, "accepting": 1}
    client.commit()
    stats = endpoint.stats()
    assert (stats.counters["committed"], stats.counters["ended"]) == (1, 1)
    assert (stats.gauges["leases_live"], stats.gauges["oldest_lease_age_s"]) == (0, 0)
