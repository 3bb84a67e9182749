"""The endpoint's sockets: one ROUTER, what else is to be watched beside it, and a way to wake who sleeps on them."""

from __future__ import annotations

import math
from typing import Any, Final

import zmq

from kvlease.core.messages import REQUEST_BYTES_MAX
from kvlease.net.resolve import look_up, numeric_host, zmq_address
from kvlease.net.wake import Waker

_HIGH_WATER: Final = 1024
"""How many messages wait in each direction for each peer; beyond it replies are dropped and clients ask again."""


class EndpointError(RuntimeError):
    """The endpoint cannot be set up; the text names the address and the setting to change."""


class Router:
    """One bound ROUTER socket in a context of its own. All methods but :meth:`wake` belong to one thread."""

    def __init__(self, host: str, port: int) -> None:
        """Listen on ``host``; port 0 takes any free one.

        Raises:
            EndpointError: the address cannot be listened on.
        """
        address = _numeric_address(host)
        self._context = zmq.Context(io_threads=1)
        self._socket: Any = self._context.socket(zmq.ROUTER)
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.IPV6, int(":" in address)),
            (zmq.MAXMSGSIZE, REQUEST_BYTES_MAX),
            (zmq.RCVHWM, _HIGH_WATER),
            (zmq.SNDHWM, _HIGH_WATER),
            (zmq.ROUTER_MANDATORY, 1),  # so that a reply that cannot be sent is counted, not lost in silence
        ):
            self._socket.setsockopt(option, value)
        try:
            self._socket.bind(zmq_address(address, port))
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise EndpointError(_bind_failure(host, port, error)) from error
        self.port = int(str(self._socket.getsockopt_string(zmq.LAST_ENDPOINT)).rpartition(":")[2])
        self._waker = Waker()
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._waker.fd, zmq.POLLIN)

    def wake(self) -> None:
        """Let a running or the next :meth:`poll` return at once. Callable from any thread, at any time."""
        self._waker.wake()

    def watch(self, fd: int) -> None:
        """Let :meth:`poll` report ``fd`` when it is readable."""
        self._poller.register(fd, zmq.POLLIN)

    def unwatch(self, fd: int) -> None:
        """Undo :meth:`watch`, before ``fd`` is closed."""
        self._poller.unregister(fd)

    def dial(self, address: str) -> Any:
        """A DEALER socket to a process of this engine; :meth:`poll` returns early when something came there."""
        socket: Any = self._context.socket(zmq.DEALER)
        socket.connect(address)
        self._poller.register(socket, zmq.POLLIN)
        return socket

    def poll(self, timeout_s: float | None) -> list[int]:
        """Sleep until a message, a wake or a watched file is there, at most ``timeout_s`` seconds (None: for ever).

        Returns:
            The watched files that are readable.
        """
        timeout_ms = None if timeout_s is None else math.ceil(timeout_s * 1000)
        ready = [item for item, _ in self._poller.poll(timeout_ms)]
        if self._waker.fd in ready:
            self._waker.clear()
        return [item for item in ready if isinstance(item, int) and item != self._waker.fd]

    def try_receive(self) -> list[Any] | None:
        """The frames of the next message, the peer's routing id first; None when there is none."""
        try:
            frames: list[Any] = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None
        return frames

    def send(self, routing_id: bytes, payload: bytes) -> bool:
        """Answer a peer, never waiting; False when its pipe is full or it has gone."""
        try:
            self._socket.send_multipart([routing_id, payload], zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True

    def close(self) -> None:
        """Stop listening, at once; replies on their way may be lost."""
        self._waker.close()
        self._context.destroy(linger=0)


def peer_address(frames: list[Any]) -> str:
    """From where a message came, for a log line."""
    try:
        return str(frames[-1].get("Peer-Address"))
    except (zmq.ZMQError, IndexError):
        return "an unknown address"


def _numeric_address(host: str) -> str:
    """``host`` as the number that can be bound."""
    address = numeric_host(host) or look_up(host)
    if address is None:
        raise EndpointError(
            f"the kvlease endpoint cannot listen on {host!r}, which is no host that is known here; "
            "set 'host' in kv_connector_extra_config to an address of this machine"
        )
    return address


def _bind_failure(host: str, port: int, error: zmq.ZMQError) -> str:
    text = f"the kvlease endpoint cannot listen on {host}:{port}: {error.strerror}; "
    if error.errno == zmq.EADDRINUSE:
        return text + (
            "another process has that port, perhaps another engine with the same settings. Set 'port' in "
            "kv_connector_extra_config (or kv_port, to which the data-parallel index is added) to a free port, "
            "or 'port' to 0 for any"
        )
    return text + (
        "set 'host' in kv_connector_extra_config to an address of this machine, or 'port' (or kv_port) to one "
        "that may be listened on"
    )
