"""From the host a handoff names to an address that can be connected to, without ever making the asker wait.

ZeroMQ would look names up in its one I/O thread, where a name server that does not answer stops the traffic of every
peer. So names are looked up here, each in a thread of its own, and ZeroMQ gets numbers only.
"""

from __future__ import annotations

import ipaddress
import re
import socket
import threading
from collections import deque
from collections.abc import Callable
from typing import Final

THREADS_MAX: Final = 16
"""How many names are looked up at once; the others wait for their turn."""

_NAME: Final = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,252})")

Lookup = Callable[[str], str | None]


def is_host_name(host: str) -> bool:
    """Whether ``host`` may be asked of a name server at all."""
    return _NAME.fullmatch(host) is not None


def numeric_host(host: str) -> str | None:
    """``host`` as the IP address it is, or None. IPv6 may come in brackets."""
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    try:
        return str(ipaddress.ip_address(bare))
    except ValueError:
        return None


def zmq_address(host: str, port: int) -> str:
    """The TCP endpoint of a numeric ``host``."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def look_up(name: str) -> str | None:
    """The first address of ``name``, or None. Blocks for as long as the name server makes it."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return None
    return str(found[0][4][0]) if found else None


class Resolver:
    """Looks names up in short-lived daemon threads. ``wake`` is called from them after each answer."""

    def __init__(self, wake: Callable[[], None], lookup: Lookup = look_up) -> None:
        self._wake = wake
        self._lookup = lookup
        self._waiting: deque[str] = deque()
        self._answers: deque[tuple[str, str | None]] = deque()
        self._lock = threading.Lock()
        self._threads = 0

    def ask(self, name: str) -> None:
        """Look ``name`` up; the answer is among :meth:`take_answers` later."""
        with self._lock:
            self._waiting.append(name)
            if self._threads == THREADS_MAX:
                return
            self._threads += 1
        threading.Thread(target=self._run, name="kvlease-resolver", daemon=True).start()

    def take_answers(self) -> list[tuple[str, str | None]]:
        """Names and their addresses; None for a name that has none."""
        answers = []
        while self._answers:
            answers.append(self._answers.popleft())
        return answers

    def _run(self) -> None:
        while (name := self._next()) is not None:
            address = None
            try:
                address = self._lookup(name)
            finally:
                self._answers.append((name, address))
                self._wake()

    def _next(self) -> str | None:
        with self._lock:
            if self._waiting:
                return self._waiting.popleft()
            self._threads -= 1
            return None
