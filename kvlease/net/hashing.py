"""Checksums of pages that lie in worker processes, for the endpoint, which has none.

Each worker that computes checksums listens at a :class:`HasherAddress` for its own endpoint and nobody else: every
request shows the worker's secret. The endpoint passes a consumer's question on and goes on with its work;
:meth:`Hashers.take` tells when the worker has answered. Belongs to the endpoint's thread.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Final, NamedTuple

import msgspec
import zmq

from kvlease.core.messages import BlockRuns, Checksum, ProtocolError, encode
from kvlease.net.router import Router

OPEN_MAX: Final = 1024
"""Questions that wait for a worker; the oldest is forgotten for one more, and its consumer asks again."""


@dataclass(frozen=True)
class HasherAddress:
    """Where a worker answers its endpoint. Pickled only by vLLM's own local RPC; ``secret`` is never logged."""

    address: str
    secret: bytes = field(repr=False)


class HashRequest(msgspec.Struct, frozen=True):
    """Endpoint to worker: the checksums of these blocks of each KV group, please."""

    secret: bytes
    number: int
    blocks: list[BlockRuns]


class HashReply(msgspec.Struct, frozen=True):
    """Worker to endpoint: one for each region, in order; or why there are none."""

    number: int
    sums: list[int]
    error: str | None = None


_decoder = msgspec.msgpack.Decoder(HashReply)


class Asked(NamedTuple):
    """A consumer's question that was passed on, and who waits for the answer."""

    sender: bytes
    request: Checksum
    is_whole: bool


class Hashers:
    """See the module. ``counters`` only grow."""

    def __init__(self) -> None:
        self.counters: Counter[str] = Counter()
        self._workers: list[tuple[Any, bytes]] = []  # by rank
        self._open: dict[int, Asked] = {}
        self._numbers_of: dict[bytes, int] = {}  # by who asks for what, so that asking again is no new work
        self._numbers = count(1)

    def connect(self, router: Router, addresses: Sequence[HasherAddress]) -> None:
        """Reach the workers, by rank, through ``router``'s sockets."""
        self._workers = [(router.dial(one.address), one.secret) for one in addresses]

    def ask(self, asked: Asked, blocks: list[BlockRuns]) -> None:
        """Pass a question on, unless the same one is open: consumers ask again until they are answered.

        Then the answer is for the latest.

        Raises:
            ProtocolError: ``no_checksums``: the rank that is meant computes none.
        """
        request = asked.request
        if request.rank >= len(self._workers):
            raise ProtocolError("no_checksums", f"rank {request.rank} of this producer computes no checksums")
        key = _key(asked)
        if key in self._numbers_of:
            self._open[self._numbers_of[key]] = asked
            return
        socket, secret = self._workers[request.rank]
        number = next(self._numbers)
        try:
            socket.send(msgspec.msgpack.encode(HashRequest(secret, number, blocks)), zmq.NOBLOCK)
        except zmq.Again:
            self.counters["checksums_dropped"] += 1
            return
        if len(self._open) >= OPEN_MAX:
            self._close(next(iter(self._open)))
            self.counters["checksums_dropped"] += 1
        self._open[number] = asked
        self._numbers_of[key] = number

    def take(self) -> Iterator[tuple[Asked, HashReply]]:
        """The questions that workers have answered since the last call."""
        for socket, _ in self._workers:
            while (frame := _try_receive(socket)) is not None:
                try:
                    reply = _decoder.decode(frame)
                except (msgspec.MsgspecError, ValueError):
                    self.counters["checksums_malformed"] += 1
                    continue
                asked = self._close(reply.number)
                if asked is not None:
                    yield asked, reply

    def _close(self, number: int) -> Asked | None:
        asked = self._open.pop(number, None)
        if asked is not None:
            del self._numbers_of[_key(asked)]
        return asked


def _key(asked: Asked) -> bytes:
    return asked.sender + encode(msgspec.structs.replace(asked.request, seq=0))


def _try_receive(socket: Any) -> bytes | None:
    try:
        frame: bytes = socket.recv(zmq.NOBLOCK)
    except zmq.Again:
        return None
    return frame
