"""Gives back leases that no consumer took, so that the producer need not wait until they end by themselves.

The producer ends a lease at such a word only if nobody has claimed it: a consumer that got the handoff after all is not
disturbed, or hears that the lease is gone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any, Final

import zmq
import zmq.asyncio
from bodies import handoff_name

from kvlease.core.handoff import Handoff, HandoffError, parse_handoff
from kvlease.core.messages import REQUEST_BYTES_MAX, ProtocolError, Release, decode_reply, encode
from kvlease.net.resolve import zmq_address

log = logging.getLogger("kvlease.proxy")

TRIES: Final = 3


class Releases:
    """Call it with a handoff that was not used, in the event loop: it returns at once and never raises."""

    def __init__(self, patience_s: float = 0.5) -> None:
        """`patience_s`: how long each of a few tries waits for an answer."""
        self._patience_s = patience_s
        self._context: zmq.asyncio.Context | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def __call__(self, params: Mapping[str, Any]) -> None:
        """Tell the producer, in the background."""
        name = handoff_name(params)
        try:
            handoff = parse_handoff(dict(params))
        except HandoffError as error:
            log.info("handoff %s was not used, and its lease ends by itself: %s", name, error)
            return
        task = asyncio.get_running_loop().create_task(self._release(name, handoff))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """End what is still under way."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._context is not None:
            self._context.destroy(linger=0)

    async def _release(self, name: str, handoff: Handoff) -> None:
        release = Release(seq=1, to=handoff.incarnation, lease=handoff.lease, token=handoff.token)
        self._context = self._context or zmq.asyncio.Context()
        socket = self._context.socket(zmq.DEALER)
        try:
            for option, value in ((zmq.LINGER, 0), (zmq.IPV6, 1), (zmq.MAXMSGSIZE, REQUEST_BYTES_MAX)):
                socket.setsockopt(option, value)
            socket.connect(zmq_address(handoff.host, handoff.port))
            for _ in range(TRIES):
                await socket.send(encode(release), zmq.NOBLOCK)
                if await socket.poll(round(self._patience_s * 1000)):
                    answer = type(decode_reply(await socket.recv())).__name__
                    log.info("handoff %s was not used and given back: %s", name, answer)
                    return
            log.info("handoff %s was not used, and its lease ends by itself: no answer from its producer", name)
        except (zmq.ZMQError, ProtocolError) as error:
            log.info("handoff %s was not used, and its lease ends by itself: %s", name, error)
        finally:
            socket.close()
