"""A producer's endpoint in a process of its own, and a consumer that asks it one thing at a time."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from kvlease.config import Settings
from kvlease.core.digest import prompt_digest
from kvlease.core.ids import ChannelId, EngineId, Incarnation, LeaseId, LeaseToken, PeerKey
from kvlease.core.leases import LeaseTiming
from kvlease.core.messages import Acquire, AnyReply, AnyRequest, Commit
from kvlease.core.peers import Answered
from kvlease.core.silence import PeerTiming
from kvlease.net.channel import Channel
from kvlease.net.endpoint import Endpoint, GrantItem

INCARNATION: Final = Incarnation(b"bench-producer..")
TOKEN: Final = LeaseToken(b"bench-token.....")
TOKEN_IDS: Final = list(range(64))
SETTINGS: Final = Settings()

Work = Callable[[Endpoint, Any], None]
"""What the producer's process does beside answering; gets its end of a pipe, and returns when told to."""


@dataclass(frozen=True)
class Served:
    """A producer that answers: its address, the pipe to its work, and its process id."""

    key: PeerKey
    pipe: Any
    pid: int


def timing(**changes: float) -> LeaseTiming:
    """Lease intervals as they are by default, except for ``changes``."""
    defaults = {name: getattr(SETTINGS, name) for name in LeaseTiming.__annotations__}
    return LeaseTiming(**{**defaults, **changes})


def lease_name(index: int) -> LeaseId:
    """The name of one of many leases, as long as vLLM's request ids are."""
    return LeaseId(f"cmpl-{index:032x}-0-{index & 0xFFFFFFFF:08x}")


def grant(endpoint: Endpoint, index: int, num_blocks: int = 4) -> None:
    """Lend a few blocks under :func:`lease_name`."""
    blocks = [list(range(index * num_blocks, (index + 1) * num_blocks))]
    endpoint.grant(GrantItem(lease_name(index), TOKEN, TOKEN_IDS, len(TOKEN_IDS), None, None, (), blocks))


@contextmanager
def producer(work: Work, lease_timing: LeaseTiming) -> Iterator[Served]:
    """An endpoint in a process of its own, where ``work`` runs in the main thread."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(work, lease_timing, theirs), daemon=True)
    process.start()
    try:
        port = ours.recv()
        yield Served(PeerKey(EngineId("bench"), INCARNATION, "127.0.0.1", port), ours, process.pid or 0)
    finally:
        ours.send("end")
        process.join(10)
        if process.is_alive():
            process.kill()


def _serve(work: Work, lease_timing: LeaseTiming, pipe: Any) -> None:
    endpoint = Endpoint(INCARNATION, lease_timing, "127.0.0.1", 0)
    endpoint.start()
    pipe.send(endpoint.port)
    try:
        work(endpoint, pipe)
    finally:
        endpoint.close()


class Asker:
    """A consumer's channel to one producer, used for one call after another."""

    def __init__(self, key: PeerKey, channel_id: str = "bench") -> None:
        self.channel_id = ChannelId(channel_id)
        self._channel = Channel(PeerTiming(SETTINGS.peer_timeout_s, SETTINGS.ping_interval_s()))
        self._peer = self._channel.peer(key)
        self._digest = prompt_digest(TOKEN_IDS, len(TOKEN_IDS), None, None, ())
        self._calls = 0

    def ask(self, factory: Callable[[int, Incarnation], AnyRequest], timeout_s: float = 30.0) -> tuple[AnyReply, float]:
        """The answer, and after how many seconds it was there.

        Raises:
            TimeoutError: there was none.
        """
        self._calls += 1
        began = time.perf_counter()
        self._peer.call(self._calls, factory, time.monotonic(), timeout_s)
        while True:
            self._channel.poll(1.0)
            for _, event in self._channel.take_events():
                if isinstance(event, Answered) and event.call == self._calls:
                    return event.reply, time.perf_counter() - began
            if time.perf_counter() - began > timeout_s:
                raise TimeoutError(f"no answer in {timeout_s} s")

    def acquire(self, index: int) -> tuple[AnyReply, float]:
        """Claim one of many leases."""
        return self.ask(
            lambda seq, to: Acquire(
                seq=seq,
                to=to,
                lease=lease_name(index),
                token=TOKEN,
                reader=f"reader-{index}",
                channel=self.channel_id,
                digest=self._digest,
            )
        )

    def commit(self, index: int) -> tuple[AnyReply, float]:
        """Commit it, as the only rank."""
        return self.ask(
            lambda seq, to: Commit(
                seq=seq, to=to, lease=lease_name(index), token=TOKEN, reader=f"reader-{index}", rank=0, of_ranks=1
            )
        )

    def close(self) -> None:
        """Hang up."""
        self._channel.close()
