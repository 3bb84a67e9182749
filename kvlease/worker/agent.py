"""NIXL behind a handful of verbs; the only place that imports it.

What was found out about NIXL 1.5 (UCX) and is relied on here:

* A posted read ends in ``DONE`` or in one of three errors (peer disconnected, backend error, cancelled). Everything
  else that ``getXferStatus`` raises says something about our books, not about the read: it may still be writing.
* Releasing the handle of an unfinished read succeeds and **withdraws nothing**; so does forgetting its peer, after
  which the state of the read can no longer be asked. So neither is ever done while a read is busy.
* Reading from a killed peer fails at once; reading from a frozen one that never connected stays busy for ever;
  reading from a frozen one in the same host succeeds.
* A peer that was forgotten may be added again; lists prepared before are then refused.
* Without NIXL's progress thread a new peer connects only while its other side calls :meth:`Agent.tick`.
"""

from __future__ import annotations

import enum
import os
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol, TypeVar

import numpy as np

from kvlease.config import Settings
from kvlease.core.plan import Indices
from kvlease.worker.regions import MemoryRange

Rows = Sequence[tuple[int, int, int, int, int]]
"""``(address, length, device, stride, count)`` for each region, in bytes."""

QUIET_ENV: Final = {"NIXL_LOG_LEVEL": "ERROR", "UCX_LOG_LEVEL": "error"}
"""What NIXL and UCX print by default unless the user has set these."""

_T = TypeVar("_T")


class AgentError(Exception):
    """NIXL refused or failed; the text is NIXL's and says what was tried."""


class ReadState(enum.Enum):
    """Where a posted read stands. ``DONE`` and ``ERROR`` are terminal: nothing is written to our memory any more."""

    BUSY = "busy"
    DONE = "done"
    ERROR = "error"


class Agent(Protocol):
    """One life of one transfer engine. Not thread-safe: one thread owns it. Handles are opaque."""

    name: str

    def register(self, ranges: Sequence[MemoryRange], memory: str) -> None:
        """Make memory readable for peers and writable for our reads."""

    def metadata(self) -> bytes:
        """What a peer needs to reach us; complete after :meth:`register`."""

    def add_peer(self, metadata: bytes) -> str:
        """Make a peer reachable; its name. Adding it twice is harmless. Our own metadata gives ourselves."""

    def remove_peer(self, peer: str) -> None:
        """Forget a peer. Not while a read from it is busy."""

    def prepare(self, peer: str | None, rows: Rows, memory: str) -> Any:
        """A list of pages to be read by index: row after row, page after page. ``peer`` None: our own, as targets."""

    def discard(self, prepared: Any) -> None:
        """Give a prepared list back."""

    def post(self, local: Any, local_pages: Indices, remote: Any, remote_pages: Indices) -> Any:
        """Start to read ``remote_pages[i]`` into ``local_pages[i]``. When it raises, nothing was started."""

    def state(self, read: Any) -> ReadState:
        """How a read goes; asking also drives it. When it raises, the read may still be busy."""

    def error(self, read: Any) -> str:
        """Why a read is in ``ERROR``."""

    def release(self, read: Any) -> None:
        """Give a terminal read back."""

    def tick(self) -> None:
        """Serve the side of peers: connections, and transports that need our progress."""

    def close(self) -> None:
        """Unregister and end. Not while a read is busy."""


@dataclass
class _Read:
    handle: Any
    error: str | None = None


class NixlAgent:
    """The real :class:`Agent`. Make it in the thread that will own it: its threads inherit that thread's CPUs."""

    def __init__(self, settings: Settings) -> None:
        for name, value in QUIET_ENV.items():
            os.environ.setdefault(name, value)
        self.name = f"kvlease-{uuid.uuid4()}"
        self._registered: list[Any] = []
        try:
            from nixl._api import nixl_agent, nixl_agent_config
        except Exception as error:
            raise AgentError(f"NIXL cannot be imported: {error}") from error
        config = nixl_agent_config(
            enable_prog_thread=settings.progress_thread == "on",
            num_threads=settings.num_threads,
            backends=list(settings.backends),
        )
        self._nixl: Any = _try("create the agent", lambda: nixl_agent(self.name, config))
        missing = [name for name in settings.backends if name not in self._nixl.backends]
        if missing:
            raise AgentError(f"NIXL has no backends {missing}; it has {sorted(self._nixl.get_plugin_list())}")

    def register(self, ranges: Sequence[MemoryRange], memory: str) -> None:
        """See :class:`Agent`."""
        rows = [(r.base, r.len_bytes, r.device_id, "") for r in ranges]
        self._registered.append(_try("register memory", lambda: self._nixl.register_memory(rows, memory)))

    def metadata(self) -> bytes:
        """See :class:`Agent`."""
        return bytes(_try("describe ourselves", self._nixl.get_agent_metadata))

    def add_peer(self, metadata: bytes) -> str:
        """See :class:`Agent`."""
        if metadata == self.metadata():
            return self.name
        name = _try("add a peer", lambda: self._nixl.add_remote_agent(metadata))
        return name.decode() if isinstance(name, bytes) else str(name)

    def remove_peer(self, peer: str) -> None:
        """See :class:`Agent`."""
        if peer != self.name:
            _try("remove a peer", lambda: self._nixl.remove_remote_agent(peer))

    def prepare(self, peer: str | None, rows: Rows, memory: str) -> Any:
        """See :class:`Agent`."""
        table = np.array(rows, dtype=np.uint64).reshape(-1, 5)
        side = "NIXL_INIT_AGENT" if peer is None else peer
        return _try("prepare pages", lambda: self._nixl.prep_xfer_dlist(side, table, memory))

    def discard(self, prepared: Any) -> None:
        """See :class:`Agent`."""
        _try("discard pages", prepared.release)

    def post(self, local: Any, local_pages: Indices, remote: Any, remote_pages: Indices) -> _Read:
        """See :class:`Agent`. A read that fails while it is posted is returned, in ``ERROR``."""
        handle = _try(
            "make a read",
            lambda: self._nixl.make_prepped_xfer("READ", local, local_pages, remote, remote_pages),
        )
        read = _Read(handle)
        try:
            state = self._nixl.transfer(handle)
        except Exception as error:
            read.error = f"post a read: {error}"
        else:
            if state == "ERR":
                read.error = "post a read: NIXL says ERR"
        return read

    def state(self, read: _Read) -> ReadState:
        """See :class:`Agent`."""
        try:
            state = self._nixl.check_xfer_state(read.handle)
        except Exception as error:
            if type(error).__name__ not in _ENDED_BY and read.error is None:
                raise AgentError(f"ask for a read: {error}") from error
            read.error = read.error or f"read: {error}"
            return ReadState.ERROR
        if state == "PROC":
            return ReadState.BUSY
        if state == "DONE" and read.error is None:
            return ReadState.DONE
        read.error = read.error or f"read: NIXL says {state}"
        return ReadState.ERROR

    def error(self, read: _Read) -> str:
        """See :class:`Agent`."""
        return read.error or ""

    def release(self, read: _Read) -> None:
        """See :class:`Agent`."""
        _try("release a read", lambda: self._nixl.release_xfer_handle(read.handle))

    def tick(self) -> None:
        """See :class:`Agent`."""
        _try("take notifications", self._nixl.get_new_notifs)

    def close(self) -> None:
        """See :class:`Agent`."""
        registered, self._registered = self._registered, []
        for memory in registered:
            _try("deregister memory", partial(self._nixl.deregister_memory, memory))
        self._nixl = None


_ENDED_BY: Final = frozenset({"nixlRemoteDisconnectError", "nixlBackendError", "nixlCancelledError"})


def _try(what: str, call: Callable[[], _T]) -> _T:
    try:
        return call()
    except Exception as error:
        raise AgentError(f"{what}: {type(error).__name__}: {error}") from error
