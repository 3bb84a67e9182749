"""ZeroMQ DEALER sockets by peer: none ever blocks, and waiting for thousands costs no more than those that stir.

ZeroMQ gives one file descriptor per socket that becomes readable when something *may* have changed, and only a receive
that found nothing (or a look at ``EVENTS``) settles it. A send may settle it too and swallow the news of a message.
Hence the two lists: ``_unchecked`` sockets were sent on and must be looked at before the next wait; ``_stirred`` ones
are to be received from until there is nothing left.
"""

from __future__ import annotations

import select
from typing import Any, Final

import zmq

from kvlease.core.ids import PeerKey
from kvlease.core.messages import REPLY_BYTES_MAX
from kvlease.net.wake import Waker

BATCH_MAX: Final = 64
"""How many frames one socket may deliver at a time, so that a flood from one peer delays nobody else."""

_SEND_QUEUE: Final = 4096
_RECEIVE_QUEUE: Final = 256
_RECONNECT_MS: Final = 50
_RECONNECT_MAX_MS: Final = 500


class Sockets:
    """Everything but :meth:`wake` belongs to one thread."""

    def __init__(self, max_sockets: int) -> None:
        self._context: Any = zmq.Context(io_threads=1)
        # ZeroMQ frees a closed socket's place a moment later.
        self._context.set(zmq.MAX_SOCKETS, 2 * max_sockets + 16)
        self._sockets: dict[PeerKey, Any] = {}
        self._keys: dict[int, PeerKey] = {}
        self._unchecked: set[PeerKey] = set()
        self._stirred: dict[PeerKey, None] = {}
        self._waker = Waker()
        self._epoll = select.epoll()
        self._epoll.register(self._waker.fd, select.EPOLLIN)

    def __contains__(self, key: PeerKey) -> bool:
        return key in self._sockets

    def open(self, key: PeerKey, address: str) -> None:
        """Connect to the endpoint ``address``, which must be numeric; the connection itself is made later.

        Raises:
            zmq.ZMQError: ZeroMQ cannot use the address, or has no socket left.
        """
        dealer = self._context.socket(zmq.DEALER)
        try:
            dealer.setsockopt(zmq.LINGER, 0)
            dealer.setsockopt(zmq.SNDHWM, _SEND_QUEUE)
            dealer.setsockopt(zmq.RCVHWM, _RECEIVE_QUEUE)
            dealer.setsockopt(zmq.MAXMSGSIZE, REPLY_BYTES_MAX)
            dealer.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
            dealer.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)
            dealer.setsockopt(zmq.IPV6, int("[" in address))
            dealer.connect(address)
        except zmq.ZMQError:
            dealer.close(linger=0)
            raise
        self._sockets[key] = dealer
        self._keys[dealer.getsockopt(zmq.FD)] = key
        self._epoll.register(dealer.getsockopt(zmq.FD), select.EPOLLIN)
        self._unchecked.add(key)

    def shut(self, key: PeerKey) -> None:
        """Close the socket of ``key``, if there is one, with everything that waits in it."""
        dealer = self._sockets.pop(key, None)
        if dealer is not None:
            fd = dealer.getsockopt(zmq.FD)
            self._epoll.unregister(fd)
            del self._keys[fd]
            self._unchecked.discard(key)
            self._stirred.pop(key, None)
            dealer.close(linger=0)

    def send(self, key: PeerKey, frame: bytes) -> bool:
        """Queue ``frame``; False when the queue is full or the socket is of no use: then it is lost."""
        self._unchecked.add(key)
        try:
            self._sockets[key].send(frame, zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True

    def wait(self, timeout_s: float) -> None:
        """Until a socket stirs or :meth:`wake`, but at most ``timeout_s``."""
        for key in self._unchecked:
            if self._sockets[key].getsockopt(zmq.EVENTS) & zmq.POLLIN:
                self._stirred[key] = None
        self._unchecked.clear()
        for fd, _ in self._epoll.poll(0.0 if self._stirred else max(0.0, timeout_s)):
            if fd == self._waker.fd:
                self._waker.clear()
            else:
                self._stirred[self._keys[fd]] = None

    def receive(self) -> list[tuple[PeerKey, bytes | None]]:
        """What arrived, at most :data:`BATCH_MAX` frames from each socket; the rest comes next time.

        A message that is not a single frame is given as None.
        """
        received: list[tuple[PeerKey, bytes | None]] = []
        for key in list(self._stirred):
            dealer = self._sockets[key]
            try:
                for _ in range(BATCH_MAX):
                    received.append((key, _receive(dealer)))
            except zmq.ZMQError:  # nothing left
                del self._stirred[key]
        return received

    def wake(self) -> None:
        """Let :meth:`wait` return, now or the next time. From any thread, at any time."""
        self._waker.wake()

    def close(self) -> None:
        """Close everything."""
        for key in list(self._sockets):
            self.shut(key)
        self._context.term()
        self._epoll.close()
        self._waker.close()


def _receive(dealer: Any) -> bytes | None:
    frame: bytes | None = dealer.recv(zmq.NOBLOCK)
    while dealer.getsockopt(zmq.RCVMORE):
        dealer.recv(zmq.NOBLOCK)
        frame = None
    return frame
