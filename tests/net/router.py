"""A producer's side of the wire that does only what a test tells it to."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import zmq

from kvlease.core.ids import EngineId, Incarnation, PeerKey
from kvlease.core.messages import AnyReply, AnyRequest, Ping, Pong, decode_request, encode

ROUNDS = 400
"""How often :func:`drive` tries; each round waits for at most a few hundredths of a second."""


@dataclass(frozen=True)
class Heard:
    """One request, and the connection it came by."""

    identity: bytes
    request: AnyRequest


class Router:
    """A ROUTER socket on loopback, driven by the test. What it hears waits in ``heard`` until it is answered."""

    def __init__(self, incarnation: bytes = b"p" * 16, host: str = "127.0.0.1") -> None:
        self.incarnation = Incarnation(incarnation)
        self._context: Any = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.IPV6, int(":" in host))
        bare = f"[{host}]" if ":" in host else host
        self.port: int = self._socket.bind_to_random_port(f"tcp://{bare}")
        self.key = PeerKey(EngineId("P"), self.incarnation, host, self.port)
        self.heard: list[Heard] = []
        self.history: list[AnyRequest] = []

    def pump(self) -> None:
        """Take in what arrived."""
        while self._socket.poll(0):
            identity, frame = self._socket.recv_multipart()
            heard = Heard(identity, decode_request(frame))
            self.heard.append(heard)
            self.history.append(heard.request)

    def has_heard(self) -> bool:
        """Whether something waits to be answered."""
        self.pump()
        return bool(self.heard)

    def take(self) -> list[Heard]:
        """What was heard since the last taking."""
        self.pump()
        heard, self.heard = self.heard, []
        return heard

    def send(self, to: Heard, *frames: bytes) -> None:
        """Send any frames at all."""
        self._socket.send_multipart([to.identity, *frames])

    def reply(self, to: Heard, reply: AnyReply) -> None:
        """Send one reply."""
        self.send(to, encode(reply))

    def pong(self, to: Heard, *, seq: int | None = None, incarnation: bytes | None = None) -> None:
        """Answer a ping, rightly or not."""
        self.reply(to, Pong(seq=to.request.seq if seq is None else seq, incarnation=incarnation or self.incarnation))

    def answer_pings(self) -> None:
        """Answer whatever pings have arrived."""
        for heard in self.take():
            assert isinstance(heard.request, Ping)
            self.pong(heard)

    def close(self) -> None:
        self._socket.close(0)
        self._context.term()


def drive(step: Callable[[], object], done: Callable[[], bool]) -> None:
    """Repeat ``step`` until ``done``; fail when it takes too long."""
    for _ in range(ROUNDS):
        if done():
            return
        step()
    assert done(), "it never happened"


@contextmanager
def black_hole() -> Iterator[PeerKey]:
    """A port that accepts connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield PeerKey(EngineId("X"), Incarnation(b"x" * 16), "127.0.0.1", server.getsockname()[1])


def free_port() -> int:
    """A port that nobody listens at."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
