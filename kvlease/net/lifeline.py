"""The lifeline: a TCP connection whose end tells the endpoint that a worker's KV memory is going away.

The endpoint vouches for pages that live in worker processes. It must stop before they are unregistered or freed, and
vLLM tears its workers down before it tells the scheduler half. So each worker listens, the endpoint connects and proves
by a secret that it is the endpoint; then nothing is ever sent. A worker that shuts down calls :meth:`Lifeline.sever`
and waits until the endpoint has hung up; of a worker that died, the kernel closes the connection. Either way the
endpoint revokes every lease before it closes its end.

No thread is needed here: the kernel completes connections by itself, and they are looked at only when severing.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import select
import socket
import time
from dataclasses import dataclass, field
from typing import Final

SECRET_BYTES: Final = 32
_BACKLOG: Final = 64


@dataclass(frozen=True)
class LifelineAddress:
    """Where a worker's lifeline can be reached. Pickled only by vLLM's own local RPC; ``secret`` is never logged."""

    host: str
    port: int
    secret: bytes = field(repr=False)


class Lifeline:
    """The worker's end. Used from one thread."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        """Listen on any free port of ``host``.

        Raises:
            OSError: ``host`` is no address of this machine.
        """
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        self._listener: socket.socket | None = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._listener.bind(address)
            self._listener.listen(_BACKLOG)
        except OSError:
            self._listener.close()
            raise
        self._listener.setblocking(False)
        port: int = self._listener.getsockname()[1]
        self.address = LifelineAddress(host, port, secrets.token_bytes(SECRET_BYTES))

    def sever(self, timeout_s: float = 1.0) -> bool:
        """Tell the endpoint that the pages are going away, and wait until it vouches for them no longer.

        Returns:
            True if every endpoint that was connected has hung up; False if one had not after ``timeout_s`` seconds: it
            is stuck. A second call does nothing.
        """
        listener, self._listener = self._listener, None
        if listener is None:
            return True
        connections = _accept_all(listener)
        listener.close()
        try:
            return self._wait_for_hang_up(connections, time.monotonic() + timeout_s)
        finally:
            for connection in connections:
                connection.close()

    def _wait_for_hang_up(self, connections: list[socket.socket], deadline: float) -> bool:
        received = {connection.fileno(): (connection, b"") for connection in connections}
        poller = select.poll()
        for connection in connections:
            poller.register(connection, select.POLLIN)
            _say_goodbye(connection)
        while received and (left_s := deadline - time.monotonic()) > 0:
            for fd, _ in poller.poll(left_s * 1000):
                connection, data = received[fd]
                chunk = _try_receive(connection)
                if chunk is None:
                    continue
                data += chunk
                if chunk and hmac.compare_digest(data, self.address.secret[: len(data)]):
                    received[fd] = (connection, data)
                else:  # it hung up, or it is a stranger
                    poller.unregister(connection)
                    del received[fd]
        return not received


def connect(address: LifelineAddress, timeout_s: float) -> socket.socket:
    """The endpoint's end, non-blocking from then on. It turns readable when the worker goes: see :func:`is_severed`.

    Raises:
        OSError: nobody listens there, or not within ``timeout_s`` seconds.
    """
    connection = socket.create_connection((address.host, address.port), timeout=timeout_s)
    try:
        connection.sendall(address.secret)
    except OSError:
        connection.close()
        raise
    connection.setblocking(False)
    return connection


def is_severed(connection: socket.socket) -> bool:
    """Whether the worker behind ``connection`` severed its lifeline or is dead."""
    return _try_receive(connection) == b""


def _accept_all(listener: socket.socket) -> list[socket.socket]:
    connections: list[socket.socket] = []
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:  # nobody else is waiting
            return connections
        connection.setblocking(False)
        connections.append(connection)


def _say_goodbye(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it has hung up already, which the poll will see
        connection.shutdown(socket.SHUT_WR)


def _try_receive(connection: socket.socket) -> bytes | None:
    """What came; empty when the other end has hung up, None when nothing came."""
    try:
        return connection.recv(4096)
    except BlockingIOError:
        return None
    except OSError:
        return b""
