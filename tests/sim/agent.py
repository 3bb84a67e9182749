"""A transfer engine that takes its time: bytes move in two parts at some moments between the post and the end.

It keeps the promises that were found of NIXL and no others: a read is over when it says DONE or ERROR and not before,
whatever else was released, forgotten or killed. Its owner is held to the rules of :mod:`kvlease.worker.agent`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvlease.core.plan import Indices
from kvlease.worker.agent import AgentError, ReadState, Rows
from kvlease.worker.regions import MemoryRange
from tests.sim.memory import Block, Memory
from tests.sim.world import Actor, Process, World


@dataclass
class Fabric:
    """How reads fare. Chances for each read: to be refused, to fail, to be slow, to be hard to ask for."""

    world: World
    duration_s: float = 0.01
    refused: float = 0.0
    failing: float = 0.0
    slow: float = 0.0
    slow_s: float = 0.0
    lost: float = 0.0
    hangs_when_paused: bool = False
    cuts: set[tuple[str, str]] = field(default_factory=set)
    agents: dict[str, SimAgent] = field(default_factory=dict)

    def is_cut(self, here: str, there: str) -> bool:
        """Whether nothing passes between two hosts, in one direction at least."""
        return (here, there) in self.cuts or (there, here) in self.cuts

    def clear_up(self) -> None:
        """From now on every read goes well."""
        self.refused = self.failing = self.slow = self.lost = 0.0


@dataclass(eq=False)
class Prepared:
    """A prepared list of pages: region after region; here there is one region, so an index is a block id."""

    owner: str
    num_pages: int
    is_discarded: bool = False


@dataclass(eq=False)
class SimRead:
    """One posted read: block ids there, blocks here (with their age when it was posted)."""

    source: SimAgent
    pieces: list[tuple[int, Block, int]]
    fails: bool
    ends_at: float
    state: ReadState = ReadState.BUSY
    moved: int = 0
    is_lost: bool = False
    is_released: bool = False


class SimAgent:
    """An :class:`~kvlease.worker.agent.Agent` of one rank of one life of one engine."""

    def __init__(self, fabric: Fabric, process: Process, memory: Memory, rank: int) -> None:
        self.name = process.name
        self.fabric, self.process, self.memory, self.rank = fabric, process, memory, rank
        self.actor: Actor | None = None
        self.posted: list[SimRead] = []
        self._known: set[str] = set()
        self._world = process.world
        self._pages = 0

    @property
    def is_dead(self) -> bool:
        return self.memory.is_dead

    def register(self, ranges: Sequence[MemoryRange], memory: str) -> None:
        self.fabric.agents[self.name] = self

    def metadata(self) -> bytes:
        return self.name.encode()

    def add_peer(self, metadata: bytes) -> str:
        name = metadata.decode()
        if name not in self.fabric.agents or (self.fabric.agents[name].is_dead and self._world.rng.random() < 0.5):
            raise AgentError(f"add a peer: {name} cannot be reached")
        self._known.add(name)
        return name

    def remove_peer(self, peer: str) -> None:
        if any(read.source.name == peer for read in self.posted):
            self._world.violate("S4", f"{self.name} forgets {peer} while it reads from it")
        if peer not in self._known:
            raise AgentError(f"remove a peer: {peer} is unknown")
        self._known.remove(peer)

    def prepare(self, peer: str | None, rows: Rows, memory: str) -> Prepared:
        if peer is not None and peer not in self._known:
            raise AgentError(f"prepare pages: {peer} is unknown")
        return Prepared(peer or self.name, sum(row[4] for row in rows))

    def discard(self, prepared: Prepared) -> None:
        prepared.is_discarded = True

    def post(self, local: Prepared, local_pages: Indices, remote: Prepared, remote_pages: Indices) -> SimRead:
        fabric, world = self.fabric, self._world
        rng = world.rng
        if fabric.refused and rng.random() < fabric.refused:
            raise AgentError("make a read: refused")
        if remote.is_discarded or remote.owner not in self._known:
            raise AgentError(f"make a read: the pages of {remote.owner} were forgotten")
        source = fabric.agents[remote.owner]
        blocks = self.memory.blocks
        pieces = []
        for here, there in zip(local_pages.tolist(), remote_pages.tolist(), strict=True):
            block = blocks[here]
            if block.ref_cnt == 0:
                world.violate("S4", f"{self.name} reads into {block}, which is in the pool")
            block.reads += 1
            pieces.append((there, block, block.age))
        duration_s = (0.2 + 0.8 * rng.random()) * fabric.duration_s
        if fabric.slow and rng.random() < fabric.slow:
            duration_s += rng.random() * fabric.slow_s
        fails = source.is_dead or (fabric.failing > 0 and rng.random() < fabric.failing)
        read = SimRead(source, pieces, fails, world.now + duration_s)
        read.is_lost = fabric.lost > 0 and rng.random() < fabric.lost
        self.posted.append(read)
        pairs = str([(there, to.block_id) for there, to, _ in pieces])
        world.tell(self.name, "posts a read from %s: %s", source.name, pairs)
        if len(pieces) > 1:
            world.after(duration_s * rng.random(), self._move, read, rng.randrange(1, len(pieces)))
        world.at(read.ends_at, self._end, read)
        return read

    def state(self, read: SimRead) -> ReadState:
        if read.is_lost and self._world.rng.random() < 0.5:
            raise AgentError("ask for a read: try again")
        return read.state

    def error(self, read: SimRead) -> str:
        return "read: it failed"

    def release(self, read: SimRead) -> None:
        if read.state is ReadState.BUSY:
            self._world.violate("S4", f"{self.name} releases a read that is busy: that withdraws nothing")
        read.is_released = True

    def tick(self) -> None:
        pass

    def close(self) -> None:
        if self.posted:
            self._world.violate("S4", f"{self.name} unregisters its memory while it is written to")

    # What happens meanwhile

    def _move(self, read: SimRead, upto: int) -> None:
        """The bytes of the first ``upto`` pieces are there now; what they are is what is there at this moment."""
        if (
            not self.process.alive
            or read.source.is_dead
            or self.fabric.is_cut(read.source.process.host, self.process.host)
        ):
            return
        tags, from_tags = self.memory.tags[self.rank], read.source.memory.tags[read.source.rank]
        for there, block, age in read.pieces[read.moved : upto]:
            if block.age != age or block.ref_cnt == 0:
                self._world.violate("S4", f"a late read writes into {block} of {self.name}, which was reused")
            elif block.is_sealed:
                self._world.violate("S1", f"a read writes into {block} of {self.name} after its load was reported good")
            tags[block.block_id] = from_tags[there]
        read.moved = max(read.moved, upto)

    def _end(self, read: SimRead) -> None:
        if not self.process.alive:
            return
        source = read.source
        if self.fabric.is_cut(source.process.host, self.process.host) and not source.is_dead:
            self._world.after(0.1, self._end, read)
            return
        if source.process.paused_until > self._world.now and not source.is_dead and self.fabric.hangs_when_paused:
            read.ends_at = source.process.paused_until + 0.01
            self._world.at(min(read.ends_at, self._world.now + 60.0), self._end, read)
            return
        if source.is_dead:
            read.fails = True
        if not read.fails:
            self._move(read, len(read.pieces))
        read.state = ReadState.ERROR if read.fails else ReadState.DONE
        for _, block, _ in read.pieces:
            block.reads -= 1
        self.posted.remove(read)
        if self.actor is not None:
            self.actor.wake_soon()


__all__ = ["Fabric", "SimAgent", "SimRead"]
