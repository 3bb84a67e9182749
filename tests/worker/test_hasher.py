"""The checksum thread: serves its own loads and its endpoint, in turns, and nobody else."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from kvlease.net.hashing import HashReply, HashRequest
from kvlease.testing import FakeFabric
from kvlease.worker.hasher import Hasher
from kvlease.worker.regions import Layout, Region

from .conftest import BLOCKS, Memory

PATIENCE_S = 20.0


class Dialled:
    """An endpoint's end of the line."""

    def __init__(self, hasher: Hasher) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.connect(hasher.address.address)
        self.secret = hasher.address.secret

    def ask(self, number: int, blocks: Any, secret: bytes | None = None) -> None:
        self.socket.send(msgspec.msgpack.encode(HashRequest(secret or self.secret, number, blocks)))

    def answer(self) -> HashReply:
        assert self.socket.poll(PATIENCE_S * 1000), "no answer"
        return msgspec.msgpack.decode(self.socket.recv(), type=HashReply)


@pytest.fixture
def memory() -> Memory:
    return Memory(FakeFabric(), fill=1)


@pytest.fixture
def hasher(memory: Memory) -> Iterator[Hasher]:
    made = Hasher(Layout(memory.regions, "DRAM", []))
    made.start()
    yield made
    assert made.shutdown()


@pytest.fixture
def endpoint(hasher: Hasher) -> Iterator[Dialled]:
    made = Dialled(hasher)
    yield made
    made.context.destroy(linger=0)


def told(hasher: Hasher, blocks: list[int]) -> Any:
    found: list[Any] = []
    is_told = threading.Event()
    hasher.submit([np.array(blocks)], lambda result: (found.append(result), is_told.set()))
    assert is_told.wait(PATIENCE_S)
    return found[0]


def test_its_own_loads_get_checksums(memory: Memory, hasher: Hasher) -> None:
    assert told(hasher, [4, 2]) == memory.sums([np.array([4, 2])])


def test_its_own_loads_are_told_what_was_wrong(memory: Memory, hasher: Hasher) -> None:
    assert "outside" in told(hasher, [BLOCKS])
    assert told(hasher, [1]) == memory.sums([np.array([1])])


def test_the_endpoint_gets_checksums(memory: Memory, endpoint: Dialled) -> None:
    endpoint.ask(1, [[(4, 2), (9, 1)]])
    assert endpoint.answer() == HashReply(1, memory.sums([np.array([4, 5, 9])]))
    endpoint.ask(2, [[]])
    assert endpoint.answer() == HashReply(2, [0, 0, 0])


@pytest.mark.parametrize("blocks", [[], [[(BLOCKS, 1)]], [[(1, 0)]], [[(1 << 40, 1)]]], ids=str)
def test_the_endpoint_is_told_what_was_wrong(endpoint: Dialled, blocks: Any) -> None:
    endpoint.ask(1, blocks)
    reply = endpoint.answer()
    assert (reply.number, reply.sums) == (1, [])
    assert reply.error


def test_whoever_does_not_know_the_secret_is_not_answered(memory: Memory, endpoint: Dialled) -> None:
    endpoint.ask(1, [[(1, 1)]], secret=b"guessed")
    endpoint.socket.send(b"what?")
    endpoint.ask(2, [[(1, 1)]])
    assert endpoint.answer() == HashReply(2, memory.sums([np.array([1])]))


def test_a_short_job_does_not_wait_for_a_long_one() -> None:
    pages = np.zeros((2, 1 << 20), dtype=np.uint8)
    made = Hasher(Layout([Region(pages.ctypes.data, 1 << 20, 1 << 20, 2, 0, 0)], "DRAM", []))
    order: list[str] = []
    is_over = threading.Event()
    made.submit([np.zeros(100, dtype=np.int64)], lambda _: (order.append("long"), is_over.set()))
    made.submit([np.zeros(1, dtype=np.int64)], lambda _: order.append("short"))
    made.start()
    assert is_over.wait(PATIENCE_S)
    assert order == ["short", "long"]
    assert made.shutdown()


def test_a_job_that_nobody_wants_any_more_is_given_up() -> None:
    pages = np.zeros((2, 64), dtype=np.uint8)
    made = Hasher(Layout([Region(pages.ctypes.data, 64, 64, 2, 0, 0)], "DRAM", []))
    found: list[Any] = []
    made.submit([np.array([0])], found.append).is_wanted = False
    made.start()
    told(made, [1])
    assert found == []
    assert made.shutdown()


def test_what_a_listener_raises_stops_nothing(memory: Memory, hasher: Hasher, caplog: Any) -> None:
    def tell(_: Any) -> None:
        raise RuntimeError("broken")

    hasher.submit([np.array([1])], tell)
    assert told(hasher, [1]) == memory.sums([np.array([1])])
    assert "broken" in caplog.text


def test_after_its_shutdown_no_page_is_read(memory: Memory) -> None:
    made = Hasher(Layout(memory.regions, "DRAM", []))
    made.start()
    assert made.shutdown()
    found: list[Any] = []
    made.submit([np.array([1])], found.append)
    time.sleep(0)
    assert found == []
    assert made.shutdown()


def test_its_secret_is_never_shown(hasher: Hasher) -> None:
    assert hasher.address.secret.hex() not in repr(hasher.address)
    assert repr(hasher.address.secret)[2:-1] not in repr(hasher.address)
