"""How one thread wakes another that sleeps on sockets, without losing the interpreter to it.

Whoever wakes is usually the engine's thread in the middle of a step. An ordinary write would let go of the interpreter
lock; the thread that was woken takes it, and the engine waits until it is given back: milliseconds for a byte. So the
byte is written by a call that keeps the lock, and only when none is waiting already. The woken thread gets its turn
when the engine's thread next waits for something, or has used up its switch interval.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from typing import Final

_write_keeping_lock: Final = ctypes.PyDLL(None).eventfd_write
_write_keeping_lock.argtypes = (ctypes.c_int, ctypes.c_uint64)


class Waker:
    """One file descriptor that turns readable by :meth:`wake`, until :meth:`clear`."""

    def __init__(self) -> None:
        self.fd: Final = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._is_set = False
        self._is_closed = False

    def wake(self) -> None:
        """Let whoever waits for :attr:`fd` return, now or the next time. From any thread, at any time."""
        if self._is_set:
            return
        with self._lock:  # or a wake could write into whatever gets the descriptor after a close
            if not self._is_closed:
                self._is_set = True
                _write_keeping_lock(self.fd, 1)

    def clear(self) -> None:
        """Wait anew. What was queued before a wake that found another one waiting is to be looked for after this.

        Read first: were the mark taken away before, a wake in between would set it again and its byte be read here, and
        no later wake would write another.
        """
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.fd)
        self._is_set = False

    def close(self) -> None:
        """Close the descriptor. A second call does nothing."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                os.close(self.fd)
