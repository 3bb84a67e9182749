"""Stand-ins for what takes time or hardware, for our tests and for those of whoever embeds kvlease.

Each passes the same contract tests as the real thing.
"""

from __future__ import annotations

import ctypes
import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvlease.core.plan import Indices
from kvlease.worker.agent import AgentError, ReadState, Rows
from kvlease.worker.regions import MemoryRange


class FakeClock:
    """A clock that stands still until it is told otherwise. Seconds."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        """The time."""
        return self.now

    def advance(self, by_s: float) -> float:
        """Let ``by_s`` seconds pass; the time then."""
        self.now += by_s
        return self.now


class Fate(Enum):
    """What becomes of a read that a :class:`FakeAgent` posts."""

    DONE = "done"
    HANG = "hang"  # until FakeAgent.finish or FakeAgent.fail
    ERROR = "error"
    REFUSED = "refused"  # by post: nothing was started
    LOST = "lost"  # asking for it raises, until FakeAgent.finish


@dataclass(eq=False)
class FakeRead:
    """A read that was posted: addresses there, addresses here, and how long each piece is."""

    pieces: list[tuple[int, int, int]]
    fate: Fate
    polls_left: int
    state: ReadState = ReadState.BUSY
    released: bool = False


@dataclass(eq=False)
class _Prepared:
    owner: str
    pages: NDArray[np.uint64]  # rows of address, length
    discarded: bool = False


class _Metadata(msgspec.Struct):
    name: str
    ranges: list[tuple[int, int]]


class FakeFabric:
    """Where fake agents find each other. ``alive`` are those that can be read from."""

    def __init__(self) -> None:
        self.alive: dict[str, FakeAgent] = {}


@dataclass(eq=False)
class FakeAgent:
    """An :class:`~kvlease.worker.agent.Agent` that copies real bytes within this process.

    ``script`` says what becomes of the next reads, ``polls`` how often each is asked for before it ends.
    """

    fabric: FakeFabric
    polls: int = 0
    script: deque[Fate] = field(default_factory=deque)
    reads: list[FakeRead] = field(default_factory=list)
    ticks: int = 0
    closed: bool = False
    _ids = itertools.count()

    def __post_init__(self) -> None:
        self.name = f"fake-{next(self._ids)}"
        self._ranges: list[tuple[int, int]] = []
        self._known: dict[str, _Metadata] = {}

    def finish(self) -> None:
        """Let every hanging read end well: this is when its bytes arrive."""
        for read in self.reads:
            if read.state is ReadState.BUSY:
                read.fate, read.polls_left = Fate.DONE, 0

    def fail(self) -> None:
        """Let every hanging read end in an error."""
        for read in self.reads:
            if read.state is ReadState.BUSY:
                read.fate, read.polls_left = Fate.ERROR, 0

    def register(self, ranges: Sequence[MemoryRange], memory: str) -> None:
        """See :class:`~kvlease.worker.agent.Agent`."""
        self._check_memory(memory)
        self._ranges += [(r.base, r.len_bytes) for r in ranges]
        self.fabric.alive[self.name] = self

    def metadata(self) -> bytes:
        """See :class:`~kvlease.worker.agent.Agent`."""
        return msgspec.msgpack.encode(_Metadata(self.name, self._ranges))

    def add_peer(self, metadata: bytes) -> str:
        """See :class:`~kvlease.worker.agent.Agent`."""
        try:
            found = msgspec.msgpack.decode(metadata, type=_Metadata)
        except msgspec.MsgspecError as error:
            raise AgentError(f"add a peer: {error}") from error
        self._known[found.name] = found
        return found.name

    def remove_peer(self, peer: str) -> None:
        """See :class:`~kvlease.worker.agent.Agent`."""
        if self._known.pop(peer, None) is None:
            raise AgentError(f"remove a peer: {peer} is unknown")

    def prepare(self, peer: str | None, rows: Rows, memory: str) -> _Prepared:
        """See :class:`~kvlease.worker.agent.Agent`."""
        self._check_memory(memory)
        if peer is None:
            ranges = self._ranges
        elif peer in self._known:
            ranges = self._known[peer].ranges
        else:
            raise AgentError(f"prepare pages: {peer} is unknown")
        for base, len_bytes, _, stride, count in rows:
            end = base + stride * (count - 1) + len_bytes
            if not any(low <= base and end <= low + size for low, size in ranges):
                raise AgentError(f"prepare pages: [{base}, {end}) is not registered")
        pages = [(base + i * stride, length) for base, length, _, stride, count in rows for i in range(count)]
        return _Prepared(peer or self.name, np.array(pages, dtype=np.uint64).reshape(-1, 2))

    def discard(self, prepared: _Prepared) -> None:
        """See :class:`~kvlease.worker.agent.Agent`."""
        prepared.discarded = True

    def post(self, local: _Prepared, local_pages: Indices, remote: _Prepared, remote_pages: Indices) -> FakeRead:
        """See :class:`~kvlease.worker.agent.Agent`."""
        fate = self.script.popleft() if self.script else Fate.DONE
        if fate is Fate.REFUSED:
            raise AgentError("make a read: scripted")
        if remote.owner != self.name and remote.owner not in self._known:
            raise AgentError(f"make a read: {remote.owner} is unknown")
        if len(local_pages) != len(remote_pages) or not len(local_pages):
            raise AgentError("make a read: as many pages here as there, and at least one")
        for pages, side in ((local_pages, local), (remote_pages, remote)):
            if side.discarded or min(pages) < 0 or max(pages) >= len(side.pages):
                raise AgentError("make a read: no such page")
        here, there = local.pages[local_pages], remote.pages[remote_pages]
        pieces = [(int(to), int(at), int(size)) for (to, size), (at, _) in zip(here, there, strict=True)]
        if remote.owner not in self.fabric.alive:
            fate = Fate.ERROR
        read = FakeRead(pieces, fate, self.polls)
        self.reads.append(read)
        return read

    def state(self, read: FakeRead) -> ReadState:
        """See :class:`~kvlease.worker.agent.Agent`. Bytes arrive the moment this says ``DONE``."""
        if read.state is not ReadState.BUSY or read.fate is Fate.HANG:
            return read.state
        if read.fate is Fate.LOST:
            raise AgentError("ask for a read: scripted")
        if read.polls_left > 0:
            read.polls_left -= 1
        elif read.fate is Fate.ERROR:
            read.state = ReadState.ERROR
        else:
            for to, at, size in read.pieces:
                ctypes.memmove(to, at, size)
            read.state = ReadState.DONE
        return read.state

    def error(self, read: FakeRead) -> str:
        """See :class:`~kvlease.worker.agent.Agent`."""
        return "read: the peer is gone" if read.state is ReadState.ERROR else ""

    def release(self, read: FakeRead) -> None:
        """See :class:`~kvlease.worker.agent.Agent`."""
        assert read.state is not ReadState.BUSY, "a busy read must not be released: that withdraws nothing"
        read.released = True

    def tick(self) -> None:
        """See :class:`~kvlease.worker.agent.Agent`."""
        self.ticks += 1

    def close(self) -> None:
        """See :class:`~kvlease.worker.agent.Agent`."""
        assert all(read.state is not ReadState.BUSY for read in self.reads), "closed with a busy read"
        self.fabric.alive.pop(self.name, None)
        self.closed = True

    @staticmethod
    def _check_memory(memory: str) -> None:
        if memory != "DRAM":
            raise AgentError(f"{memory} is no memory of this process")
