"""The endpoint asks its workers for checksums: for whom, and what becomes of questions that are not answered."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import zmq

from kvlease.core.leases import LeaseTiming
from kvlease.core.messages import Checksum, Checksums, Gone, GoneReason, Invalid, Ping, Pong, encode
from kvlease.net import hashing
from kvlease.net.endpoint import Endpoint
from kvlease.net.hashing import OPEN_MAX, Asked, HasherAddress, HashReply, HashRequest

from .test_endpoint import PATIENCE_S, TOKEN, US, Client, item, wait_for

SECRET = b"s" * 32
TIMING = LeaseTiming(600.0, 600.0, 600.0, 0.0, 600.0, 1000)
POSITIONS = [[(1, 2)], [(0, 1)]]


class Worker:
    """A rank's hasher that answers when it is told to."""

    def __init__(self, context: zmq.Context) -> None:
        self.socket = context.socket(zmq.ROUTER)
        port = self.socket.bind_to_random_port("tcp://127.0.0.1")
        self.address = HasherAddress(f"tcp://127.0.0.1:{port}", SECRET)

    def hear(self) -> tuple[bytes, HashRequest]:
        assert self.socket.poll(PATIENCE_S * 1000), "not asked"
        sender, payload = self.socket.recv_multipart()
        return sender, msgspec.msgpack.decode(payload, type=HashRequest)

    def answer(self, *sums: int, **fields: Any) -> HashRequest:
        sender, request = self.hear()
        self.say(sender, msgspec.msgpack.encode(HashReply(request.number, list(sums), **fields)))
        return request

    def say(self, sender: bytes, payload: bytes) -> None:
        self.socket.send_multipart([sender, payload])

    @property
    def is_asked(self) -> bool:
        return bool(self.socket.poll(0))


@pytest.fixture
def workers() -> Iterator[list[Worker]]:
    context = zmq.Context()
    yield [Worker(context), Worker(context)]
    context.destroy(linger=0)


@pytest.fixture
def endpoint(workers: list[Worker]) -> Iterator[Endpoint]:
    endpoint = Endpoint(US, TIMING, "127.0.0.1")
    endpoint.start()
    endpoint.ask_hashers([worker.address for worker in workers])
    endpoint.grant(item())  # blocks 7, 8, 9 and 3
    yield endpoint
    endpoint.close()


@pytest.fixture
def client(endpoint: Endpoint) -> Iterator[Client]:
    client = Client(endpoint.port)
    client.acquire()
    yield client
    client.close()


def question(seq: int = 1, **fields: Any) -> bytes:
    ours: dict[str, Any] = {"lease": "L", "token": TOKEN, "reader": "c/1", "rank": 0, "positions": POSITIONS}
    return encode(Checksum(seq=seq, to=US, **(ours | fields)))


def answer(client: Client, **fields: Any) -> Any:
    client.send(question(**fields))
    return client.receive()


def test_the_rank_that_is_meant_is_asked_for_the_leases_blocks(client: Client, workers: list[Worker]) -> None:
    client.send(question(rank=1))
    request = workers[1].answer(10, 20)
    assert (request.secret, request.blocks) == (SECRET, [[(8, 2)], [(3, 1)]])
    assert client.receive() == Checksums(seq=1, incarnation=US, sums=[10, 20])
    assert not workers[0].is_asked


def test_of_a_lease_that_is_not_settled_the_last_blocks_are_left_out(
    endpoint: Endpoint, client: Client, workers: list[Worker]
) -> None:
    endpoint.grant(item("M", is_settled=False))
    client.acquire("M")
    client.send(question(lease="M"))
    assert workers[0].answer(10).blocks == [[(8, 1)], []]
    assert client.receive() == Checksums(seq=1, incarnation=US, sums=[10], is_whole=False)


def test_nobody_else_waits_meanwhile(client: Client, workers: list[Worker]) -> None:
    client.send(question())
    assert isinstance(client.ask(Ping), Pong)
    workers[0].answer(1)
    assert isinstance(client.receive(), Checksums)


def test_a_question_that_is_repeated_while_it_is_open_is_passed_on_once(client: Client, workers: list[Worker]) -> None:
    client.send(question(1))
    client.send(question(1))
    client.send(question(2))  # its consumer has begun anew
    assert isinstance(client.ask(Ping), Pong)
    workers[0].answer(1)
    assert client.receive() == Checksums(seq=2, incarnation=US, sums=[1])
    assert not workers[0].is_asked
    client.send(question())  # its answer was lost
    workers[0].answer(1)
    assert client.receive().sums == [1]


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"token": b"x" * 16}, GoneReason.BAD_TOKEN),
        ({"lease": "another"}, GoneReason.UNKNOWN),
        ({"reader": "c/2"}, GoneReason.UNKNOWN),
    ],
)
def test_who_may_not_read_learns_nothing(
    client: Client, workers: list[Worker], fields: dict[str, Any], why: GoneReason
) -> None:
    reply = answer(client, **fields)
    assert (type(reply), reply.why) == (Gone, why)
    assert not workers[0].is_asked


def test_checksums_of_a_lease_that_ended_meanwhile_are_not_told(
    endpoint: Endpoint, client: Client, workers: list[Worker]
) -> None:
    client.send(question())
    sender, request = workers[0].hear()
    endpoint.revoke_all()
    wait_for(endpoint.take_ended)
    workers[0].say(sender, msgspec.msgpack.encode(HashReply(request.number, [1])))
    reply = client.receive()
    assert (type(reply), reply.why) == (Gone, GoneReason.REVOKED)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"rank": 2}, "no_checksums"),
        ({"positions": [[(0, 9)], []]}, "bad_positions"),
        ({"positions": []}, "bad_positions"),
    ],
)
def test_what_cannot_be_answered_is_invalid(client: Client, fields: dict[str, Any], reason: str) -> None:
    reply = answer(client, **fields)
    assert (type(reply), reply.reason) == (Invalid, reason)


def test_why_a_worker_has_none_is_told(client: Client, workers: list[Worker]) -> None:
    client.send(question())
    workers[0].answer(error="the memory is gone")
    reply = client.receive()
    assert (type(reply), reply.reason, reply.text) == (Invalid, "no_checksums", "the memory is gone")


def test_what_makes_no_sense_from_there_is_counted(endpoint: Endpoint, client: Client, workers: list[Worker]) -> None:
    client.send(question())
    sender, request = workers[0].hear()
    workers[0].say(sender, b"what?")
    workers[0].say(sender, msgspec.msgpack.encode(HashReply(request.number + 1, [9])))
    workers[0].say(sender, msgspec.msgpack.encode(HashReply(request.number, [1])))
    assert client.receive().sums == [1]
    assert wait_for(lambda: endpoint.stats().counters.get("checksums_malformed")) == 1


class Wire:
    """A socket to a worker, and a router that gives nothing else."""

    def __init__(self) -> None:
        self.sent: list[HashRequest] = []
        self.inbox: deque[bytes] = deque()
        self.is_full = False

    def dial(self, _: str) -> Wire:
        return self

    def send(self, payload: bytes, _: int) -> None:
        if self.is_full:
            raise zmq.Again
        self.sent.append(msgspec.msgpack.decode(payload, type=HashRequest))

    def recv(self, _: int) -> bytes:
        if not self.inbox:
            raise zmq.Again
        return self.inbox.popleft()


@pytest.fixture
def wire() -> Wire:
    return Wire()


@pytest.fixture
def hashers(wire: Wire) -> hashing.Hashers:
    made = hashing.Hashers()
    made.connect(wire, [HasherAddress("", SECRET)])  # type: ignore[arg-type]
    return made


def asked(seq: int) -> Asked:
    reader = f"c/{seq}"
    request = Checksum(seq=seq, to=US, lease="L", token=TOKEN, reader=reader, rank=0, positions=POSITIONS)
    return Asked(b"consumer", request, True)


def test_questions_to_a_worker_that_is_silent_are_bounded(wire: Wire, hashers: hashing.Hashers) -> None:
    for seq in range(OPEN_MAX + 1):
        hashers.ask(asked(seq), [])
    assert hashers.counters["checksums_dropped"] == 1
    hashers.ask(asked(1), [])  # still open
    assert len(wire.sent) == OPEN_MAX + 1
    hashers.ask(asked(0), [])  # forgotten, and asked again
    assert len(wire.sent) == OPEN_MAX + 2
    for request in wire.sent:
        wire.inbox.append(msgspec.msgpack.encode(HashReply(request.number, [1])))
    answered = [one.request.seq for one, _ in hashers.take()]
    assert answered == [*range(2, OPEN_MAX + 1), 0]


def test_a_question_that_has_no_way_to_the_worker_is_forgotten(wire: Wire, hashers: hashing.Hashers) -> None:
    wire.is_full = True
    hashers.ask(asked(1), [])
    assert hashers.counters["checksums_dropped"] == 1
    wire.is_full = False
    hashers.ask(asked(1), [])
    assert len(wire.sent) == 1


def test_a_producer_without_hashers_computes_none() -> None:
    endpoint = Endpoint(US, TIMING, "127.0.0.1")
    endpoint.start()
    endpoint.grant(item())
    client = Client(endpoint.port)
    client.acquire()
    reply = answer(client)
    assert (type(reply), reply.reason) == (Invalid, "no_checksums")
    client.close()
    endpoint.close()
