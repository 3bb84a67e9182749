"""A relay between consumers and one producer's endpoint, which loses, repeats and withholds chosen messages.

A consumer is led through it by writing the relay's port into the handoff's ``remote_port``: the address is only a hint,
and the incarnation in the handoff still decides whether the right producer answers.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import zmq

from kvlease.core.messages import AnyReply, AnyRequest, ProtocolError, decode_reply, decode_request

Message = AnyRequest | AnyReply


class Relay:
    """Passes frames both ways between any number of consumers and the endpoint at ``host:port``.

    ``drops`` and ``repeats`` map a message class to how many of its next messages are dropped, or sent again
    ``repeat_after_s`` later. ``on`` maps a class to a function called, in the relay's thread, when one passes.
    """

    def __init__(self, host: str, port: int, repeat_after_s: float = 0.3) -> None:
        self.drops: Counter[type] = Counter()
        self.repeats: Counter[type] = Counter()
        self.on: dict[type, Callable[[Message], None]] = {}
        self.seen: Counter[type] = Counter()
        self._upstream = f"tcp://{host}:{port}"
        self._repeat_after_s = repeat_after_s
        self._context = zmq.Context()
        self._front = self._context.socket(zmq.ROUTER)
        self._front.linger = 0
        self.port = self._front.bind_to_random_port("tcp://127.0.0.1")
        self._backs: dict[bytes, Any] = {}
        self._later: list[tuple[float, Any, list[bytes]]] = []
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="relay", daemon=True)
        self._thread.start()

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stopping.set()
        self._thread.join(5)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._front, zmq.POLLIN)
        while not self._stopping.is_set():
            for socket, _ in poller.poll(10):
                if socket is self._front:
                    identity, frame = self._front.recv_multipart()
                    self._pass(decode_request, self._back(identity, poller), [frame])
                else:
                    identity = next(name for name, back in self._backs.items() if back is socket)
                    self._pass(decode_reply, self._front, [identity, *socket.recv_multipart()])
            due = [entry for entry in self._later if entry[0] <= time.monotonic()]
            for entry in due:
                self._later.remove(entry)
                entry[1].send_multipart(entry[2])
        for socket in (self._front, *self._backs.values()):
            socket.close()
        self._context.term()

    def _back(self, identity: bytes, poller: zmq.Poller) -> Any:
        if identity not in self._backs:
            back = self._context.socket(zmq.DEALER)
            back.linger = 0
            back.connect(self._upstream)
            poller.register(back, zmq.POLLIN)
            self._backs[identity] = back
        return self._backs[identity]

    def _pass(self, decode: Callable[[bytes], Message], target: Any, frames: list[bytes]) -> None:
        try:
            message = decode(frames[-1])
        except ProtocolError:
            target.send_multipart(frames)
            return
        kind = type(message)
        self.seen[kind] += 1
        if kind in self.on:
            self.on[kind](message)
        if self.drops[kind] > 0:
            self.drops[kind] -= 1
            return
        target.send_multipart(frames)
        if self.repeats[kind] > 0:
            self.repeats[kind] -= 1
            self._later.append((time.monotonic() + self._repeat_after_s, target, frames))
