"""What lies between the processes, and stand-ins for the two classes in kvlease that own ZeroMQ sockets.

A message may be lost, come twice, late, or out of order; two hosts may be cut off from each other in one direction or
in both. A frame to an address where nobody listens waits for somebody, as ZeroMQ's do while it reconnects.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from kvlease.core.ids import PeerKey
from kvlease.core.messages import Acquire, AnyReply, Commit, ProtocolError, Release, decode_reply, decode_request
from tests.sim.world import Actor, Process, World

Address = tuple[str, int]
Claim = Acquire | Commit | Release

RECONNECT_S = 0.1
RECONNECTS_MAX = 20
BATCH_MAX = 64


@dataclass
class Weather:
    """What the network does to messages. ``cuts`` are (from host, to host) pairs that nothing passes."""

    loss: float = 0.0
    duplicates: float = 0.0
    late: float = 0.0
    late_s: float = 0.0
    delay_s: float = 0.001
    reorders: bool = False
    full_pipes: float = 0.0
    junk: float = 0.0
    cuts: set[tuple[str, str]] = field(default_factory=set)

    def clear_up(self) -> None:
        """From now on every message arrives, once, soon and in order."""
        self.loss = self.duplicates = self.late = self.full_pipes = self.junk = 0.0
        self.delay_s = 0.001
        self.reorders = False
        self.cuts.clear()


class Frame:
    """A received frame as pyzmq gives it."""

    def __init__(self, data: bytes) -> None:
        self.bytes = data

    def get(self, _: str) -> str:
        return "somewhere"


@dataclass(eq=False)
class Connection:
    """One DEALER socket: it lives until its owner shuts it. ``up`` and ``down``: when the last frame arrives."""

    rid: bytes
    key: PeerKey
    address: Address
    sockets: SimSockets
    is_open: bool = True
    up: float = 0.0
    down: float = 0.0


class Network:
    """Who listens where, and how frames travel."""

    def __init__(self, world: World, weather: Weather) -> None:
        self.world = world
        self.weather = weather
        self.listening: dict[Address, SimRouter] = {}
        self.connections: dict[bytes, Connection] = {}
        self._rids = count()

    def connect(self, sockets: SimSockets, key: PeerKey, address: Address) -> Connection:
        rid = next(self._rids).to_bytes(4, "big")
        connection = self.connections[rid] = Connection(rid, key, address, sockets)
        return connection

    def close(self, process: Process) -> None:
        """The process is gone: nobody listens at its addresses, and nothing is sent to it any more."""
        for address in [address for address, router in self.listening.items() if router.process is process]:
            del self.listening[address]

    def send_up(self, connection: Connection, frame: bytes) -> None:
        """From the one who connected to whoever listens."""
        for delay_s in self._journeys():
            at = self.world.now + delay_s
            if not self.weather.reorders:
                at = connection.up = max(at, connection.up)
            self.world.at(at, self._arrive_up, connection, frame, 0)

    def send_down(self, router: SimRouter, connection: Connection, frame: bytes) -> None:
        for delay_s in self._journeys():
            at = self.world.now + delay_s
            if not self.weather.reorders:
                at = connection.down = max(at, connection.down)
            self.world.at(at, self._arrive_down, router.process.host, connection, frame)

    def _journeys(self) -> list[float]:
        """How long each copy of a message takes; none if it is lost."""
        weather, rng = self.weather, self.world.rng
        if weather.loss and rng.random() < weather.loss:
            self.world.tell("network", "lost a message")
            return []
        copies = 2 if weather.duplicates and rng.random() < weather.duplicates else 1
        journeys = [0.0001 + rng.random() * weather.delay_s for _ in range(copies)]
        if copies == 2 and rng.random() < 0.5:
            journeys[1] += rng.random() * 0.3 * weather.late_s
        if weather.late and rng.random() < weather.late:
            journeys[-1] += rng.random() * weather.late_s
        return journeys

    def _arrive_up(self, connection: Connection, frame: bytes, tries: int) -> None:
        host = connection.sockets.process.host
        router = self.listening.get(connection.address)
        if router is None or (host, router.process.host) in self.weather.cuts:
            if tries < RECONNECTS_MAX and connection.is_open and connection.sockets.process.alive:
                self.world.after(RECONNECT_S, self._arrive_up, connection, frame, tries + 1)
            return
        self.world.tell(router.process.name, "hears from " + connection.sockets.process.name + ": %s", frame)
        router.put([Frame(connection.rid), Frame(frame)])
        if self.weather.junk and self.world.rng.random() < self.weather.junk:
            router.put([Frame(connection.rid), *map(Frame, junk(self.world, frame))])

    def _arrive_down(self, host: str, connection: Connection, frame: bytes) -> None:
        process = connection.sockets.process
        if not connection.is_open or not process.alive or (host, process.host) in self.weather.cuts:
            return
        self.world.tell(process.name, "is answered by " + host + ": %s", frame)
        connection.sockets.put(connection.key, frame)
        if self.weather.junk and self.world.rng.random() < self.weather.junk:
            frames = junk(self.world, frame)
            connection.sockets.put(connection.key, frames[0] if len(frames) == 1 else None)


def junk(world: World, like: bytes) -> list[bytes]:
    """A message that nobody who holds a token sent: noise, a part of a real one, none or several frames."""
    rng = world.rng
    match rng.randrange(4):
        case 0:
            return [rng.randbytes(rng.randrange(40))]
        case 1:
            return [like[: rng.randrange(len(like))]]
        case 2:
            return [like, b""]
    return [b"\x84" + rng.randbytes(rng.randrange(60))]


class SimSockets:
    """Stands for :class:`kvlease.net.sockets.Sockets`. ``actor`` is the thread that owns it, woken by what arrives."""

    def __init__(self, network: Network, process: Process) -> None:
        self.network = network
        self.process = process
        self.actor: Actor | None = None
        self._open: dict[PeerKey, Connection] = {}
        self._inbox: deque[tuple[PeerKey, bytes | None]] = deque()

    def __contains__(self, key: PeerKey) -> bool:
        return key in self._open

    def __len__(self) -> int:
        return len(self._open)

    def open(self, key: PeerKey, address: str) -> None:
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        self._open[key] = self.network.connect(self, key, (host, int(port)))

    def shut(self, key: PeerKey) -> None:
        connection = self._open.pop(key, None)
        if connection is not None:
            connection.is_open = False
            del self.network.connections[connection.rid]
            self._inbox = deque(item for item in self._inbox if item[0] != key)

    def send(self, key: PeerKey, frame: bytes) -> bool:
        if self.network.weather.full_pipes and self.network.world.rng.random() < self.network.weather.full_pipes:
            return False
        self.network.send_up(self._open[key], frame)
        return True

    def wait(self, timeout_s: float) -> None:
        """Threads of the simulation do not wait in here: their actors take no turn until they are woken."""

    def receive(self) -> list[tuple[PeerKey, bytes | None]]:
        received = [self._inbox.popleft() for _ in range(min(BATCH_MAX, len(self._inbox)))]
        if self._inbox:
            self.wake()
        return received

    def put(self, key: PeerKey, frame: bytes | None) -> None:
        self._inbox.append((key, frame))
        self.wake()

    def wake(self) -> None:
        if self.actor is not None:
            self.actor.wake_soon()

    def close(self) -> None:
        for key in list(self._open):
            self.shut(key)


class Lifeline:
    """The endpoint's end of a connection to a worker; see :mod:`kvlease.net.lifeline`."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.is_severed = False
        self.is_closed = False

    def fileno(self) -> int:
        return self.number

    def recv(self, _: int, *__: Any) -> bytes:
        if self.is_severed:
            return b""
        raise BlockingIOError

    def close(self) -> None:
        self.is_closed = True


class SimRouter:
    """Stands for :class:`kvlease.net.router.Router`: a bound ROUTER socket, and the lifelines beside it."""

    def __init__(self, network: Network, process: Process, address: Address, lifelines: dict[int, Lifeline]) -> None:
        self.network = network
        self.process = process
        self.address = address
        self.port = address[1]
        self.actor: Actor | None = None
        self._lifelines = lifelines
        self.on_answer: Callable[[Claim, AnyReply], None] | None = None
        self.on_commit: Callable[[], None] | None = None
        self._asked: dict[tuple[bytes, int], Claim] = {}
        self._watched: dict[int, None] = {}
        self._inbox: deque[list[Frame]] = deque()
        network.listening[address] = self

    def put(self, frames: list[Frame]) -> None:
        self._note_request(frames)
        self._inbox.append(frames)
        if self.actor is not None:
            self.actor.wake_soon()

    def poll(self, timeout_s: float | None) -> list[int]:
        assert timeout_s is None or timeout_s >= 0
        return [fd for fd in self._watched if self._lifelines[fd].is_severed]

    def try_receive(self) -> list[Frame] | None:
        return self._inbox.popleft() if self._inbox else None

    def send(self, routing_id: bytes, payload: bytes) -> bool:
        self._note_answer(routing_id, payload)
        connection = self.network.connections.get(routing_id)
        weather = self.network.weather
        if connection is None or (weather.full_pipes and self.network.world.rng.random() < weather.full_pipes):
            return False
        self.network.send_down(self, connection, payload)
        return True

    def watch(self, fd: int) -> None:
        self._watched[fd] = None

    def unwatch(self, fd: int) -> None:
        del self._watched[fd]

    def _note_request(self, frames: list[Frame]) -> None:
        with contextlib.suppress(ProtocolError):
            request = decode_request(frames[-1].bytes)
            if isinstance(request, Acquire | Commit | Release):
                self._asked[frames[0].bytes, request.seq] = request
            if isinstance(request, Commit) and self.on_commit is not None:
                self.on_commit()

    def _note_answer(self, routing_id: bytes, payload: bytes) -> None:
        """The endpoint answers a claim: the oracle looks whether it may say so, at this very moment."""
        reply = decode_reply(payload)
        request = self._asked.get((routing_id, reply.seq))
        if request is not None and self.on_answer is not None:
            self.on_answer(request, reply)

    def close(self) -> None:
        """The address is free again."""
        if self.network.listening.get(self.address) is self:
            del self.network.listening[self.address]
        self._inbox.clear()
