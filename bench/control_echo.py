"""The least that an answer costs here: a ZeroMQ echo in a process of its own, and a thread that disturbs it.

The echo has what every ZeroMQ endpoint written in Python has: a thread of ZeroMQ's for the wire, one of Python's for
the answer, and the interpreter lock, which an engine's thread may hold. What it takes is a limit for kvlease.
"""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import zmq


@dataclass(frozen=True)
class Load:
    """How an engine's thread uses the interpreter, in seconds. Without a pause it never lets go by itself."""

    name: str
    busy_s: float
    pause_s: float


IDLE = Load("idle", 0.0, 0.01)


@contextmanager
def interpreter_held(load: Load) -> Iterator[None]:
    """Inside, a thread of this process uses the interpreter as ``load`` says; no thread at all for one that is idle."""
    if not load.busy_s:
        yield
        return
    ended = threading.Event()
    thread = threading.Thread(target=_hold_interpreter, args=(load, ended), daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _hold_interpreter(load: Load, ended: threading.Event) -> None:
    while not ended.is_set():
        until = time.perf_counter() + load.busy_s
        while time.perf_counter() < until:
            sum(range(100))
        if load.pause_s:
            ended.wait(load.pause_s)


class Echo:
    """Made by :func:`echo`. ``pid`` is the process that answers."""

    def __init__(self, pid: int, socket: Any) -> None:
        self.pid = pid
        self._socket = socket

    def ask(self, message: bytes) -> float:
        """Seconds until ``message`` was back."""
        began = time.perf_counter()
        self._socket.send(message)
        self._socket.recv()
        return time.perf_counter() - began


@contextmanager
def echo(load: Load = IDLE) -> Iterator[Echo]:
    """A process that sends every message back as it came; beside it a thread that does ``load``."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_serve, args=(theirs, load), daemon=True)
    process.start()
    context = zmq.Context()
    try:
        socket: Any = context.socket(zmq.DEALER)
        socket.connect(f"tcp://127.0.0.1:{ours.recv()}")
        yield Echo(process.pid or 0, socket)
    finally:
        process.terminate()
        process.join()
        context.destroy(linger=0)


def _serve(pipe: Any, load: Load) -> None:
    socket: Any = zmq.Context().socket(zmq.ROUTER)
    poller = zmq.Poller()
    poller.register(socket, zmq.POLLIN)
    with interpreter_held(load):
        pipe.send(socket.bind_to_random_port("tcp://127.0.0.1"))
        while True:
            poller.poll()
            socket.send_multipart(socket.recv_multipart())
