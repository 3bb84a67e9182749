"""The thread of a worker process that computes checksums of pages: for its own loads, and for its endpoint's consumers.

It exists only where ``kv_checksum`` is on, and only it reads pages with the processor. Jobs take turns, a piece each,
so a short one does not wait for a long one; what it cannot take in waits in its socket.
"""

from __future__ import annotations

import hmac
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
import numpy as np
import zmq

from kvlease.core.messages import BlockRuns
from kvlease.core.runs import Ids, expand_runs
from kvlease.logs import RateLimitedLog
from kvlease.net.hashing import HasherAddress, HashReply, HashRequest
from kvlease.net.lifeline import SECRET_BYTES
from kvlease.net.wake import Waker
from kvlease.worker.page_sums import PageSums
from kvlease.worker.regions import Layout

logger = logging.getLogger(__name__)

JOBS_MAX: Final = 1024
"""Jobs under way beyond which no more are taken from the endpoint."""

_BLOCK_LIMIT: Final = 1 << 31
_AFTER_ERROR_S: Final = 0.05

_decoder = msgspec.msgpack.Decoder(HashRequest)


@dataclass(eq=False)
class Job:
    """Blocks of each KV group, whose checksums ``tell`` gets in the hasher's thread, or a text why there are none.

    Nothing is told of a job that is not ``is_wanted`` any more; it is given up.
    """

    blocks: Sequence[Ids]
    tell: Callable[[list[int] | str], None]
    is_wanted: bool = True
    steps: Generator[None, None, list[int]] | None = field(default=None, repr=False)


class Hasher:
    """See the module. Its methods are for other threads. ``prepare`` is called first in the thread it starts."""

    def __init__(self, layout: Layout, prepare: Callable[[], None] = lambda: None) -> None:
        self._layout, self._prepare = layout, prepare
        self._context = zmq.Context(io_threads=1)
        self._socket: Any = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self.address = HasherAddress(f"tcp://127.0.0.1:{port}", secrets.token_bytes(SECRET_BYTES))
        self._waker = Waker()
        self._submitted: deque[Job] = deque()
        self._jobs: deque[Job] = deque()
        self._stopping = False
        self._log = RateLimitedLog(logger)
        self._thread = threading.Thread(target=self._run, name="kvlease-checksums", daemon=True)

    def start(self) -> None:
        """Answer from now on."""
        self._thread.start()

    def submit(self, blocks: Sequence[Ids], tell: Callable[[list[int] | str], None]) -> Job:
        """Compute the checksums of ``blocks``; see :class:`Job`."""
        job = Job(blocks, tell)
        self._submitted.append(job)
        self._waker.wake()
        return job

    def shutdown(self, timeout_s: float = 5.0) -> bool:
        """Read no page any more, from when this returns True on; jobs under way are given up."""
        self._stopping = True
        self._waker.wake()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        if self._thread.is_alive():
            return False
        self._context.destroy(linger=0)
        self._waker.close()
        return True

    # In the thread

    def _run(self) -> None:
        self._prepare()
        sums = PageSums(self._layout)
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._waker.fd, zmq.POLLIN)
        while not self._stopping:
            try:
                if not self._jobs:
                    poller.poll()
                self._waker.clear()
                self._take_in()
                self._turn(sums)
            except Exception:
                text = "the checksum thread goes on after this"
                self._log("turn", time.monotonic(), text, level=logging.ERROR, trace=True)
                time.sleep(_AFTER_ERROR_S)

    def _take_in(self) -> None:
        while self._submitted:
            self._jobs.append(self._submitted.popleft())
        while len(self._jobs) < JOBS_MAX:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._hear(frames)

    def _hear(self, frames: list[bytes]) -> None:
        sender, payload = frames[0], frames[-1]
        try:
            request = _decoder.decode(payload)
        except (msgspec.MsgspecError, ValueError):
            return
        if not hmac.compare_digest(request.secret, self.address.secret):
            return

        def tell(found: list[int] | str) -> None:
            number = request.number
            reply = HashReply(number, [], found) if isinstance(found, str) else HashReply(number, found)
            self._socket.send_multipart([sender, msgspec.msgpack.encode(reply)], zmq.NOBLOCK)

        try:
            self._jobs.append(Job([_expand(runs) for runs in request.blocks], tell))
        except ValueError as error:
            tell(str(error))

    def _turn(self, sums: PageSums) -> None:
        """One piece of the job whose turn it is."""
        if not self._jobs:
            return
        job = self._jobs.popleft()
        if not job.is_wanted:
            return
        job.steps = job.steps or sums.sums(job.blocks)
        try:
            next(job.steps)
        except StopIteration as end:
            job.tell(end.value)
        except Exception as error:
            job.tell(f"{type(error).__name__}: {error}")
        else:
            self._jobs.append(job)


def _expand(runs: BlockRuns) -> Ids:
    return expand_runs(runs, 0, sum(length for _, length in runs), _BLOCK_LIMIT) if runs else np.empty(0, np.int64)
