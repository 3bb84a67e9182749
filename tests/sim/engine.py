"""Engines: the real halves of kvlease wired to virtual sockets, clocks and memory, one :class:`Life` after another.

An EngineCore process has three threads (scheduler, leaser, endpoint), each worker process one (transfer). Each is an
actor that takes turns of the real code.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvlease.config import Settings
from kvlease.connector.consumer import ConsumerHalf
from kvlease.connector.producer import ProducerHalf, lease_timing
from kvlease.connector.reports import WorkerReport
from kvlease.core.greeting import Site
from kvlease.core.ids import ChannelId, EngineId, Incarnation, PeerKey, Rank
from kvlease.core.messages import RankInfo
from kvlease.core.orders import Orders
from kvlease.core.silence import PeerTiming
from kvlease.net.channel import Channel
from kvlease.net.leaser import Leaser
from kvlease.net.ledger import GrantItem, Ledger, RevokeAll, Watch
from kvlease.net.loop import Loop
from kvlease.worker.outbox import Outbox
from kvlease.worker.puller import Local, Puller
from kvlease.worker.regions import Region, pages_of, strided_rows, to_wire
from kvlease.worker.sources import Identity
from tests.sim.agent import Fabric, SimAgent
from tests.sim.memory import Memory
from tests.sim.network import Lifeline, Network, SimRouter, SimSockets
from tests.sim.oracle import STEPS_S, Oracle
from tests.sim.requests import BLOCK_SIZE, Outcome, SimRequest
from tests.sim.scheduler import NOTHING, ModelScheduler, StepOutput
from tests.sim.world import Actor, Clock, Process, World

PAGE_BYTES = 64
PORT = 7000


@dataclass(frozen=True)
class Role:
    """What an engine is for, and how large it is."""

    may_grant: bool
    may_load: bool
    ranks: int
    num_blocks: int
    recompute: bool


@dataclass
class Surroundings:
    """What all engines of one world share."""

    world: World
    network: Network
    fabric: Fabric
    oracle: Oracle
    settings: Settings
    drift: float
    is_clear: bool = False
    """Whether the faults are over: whoever was frozen or cut off is back."""


class Engine:
    """One place in the fleet: a host, an address, and whoever lives there now."""

    def __init__(self, around: Surroundings, name: str, host: str, role: Role) -> None:
        self.around = around
        self.name, self.host, self.role = name, host, role
        self.ranks = role.ranks
        self.lives = 0
        self.life: Life | None = None

    def start(self) -> Life:
        """Begin the next life."""
        self.lives += 1
        self.life = Life(self, f"{self.name}.{self.lives}")
        self.around.world.tell(self.life.name, "starts at %s", self.host)
        return self.life

    def crash(self) -> None:
        """The life ends at once, with every process of it."""
        if self.life is not None:
            self.around.world.tell(self.life.name, "is killed")
            self.life.die()
            self.life = None


class SimEndpoint:
    """What :class:`kvlease.net.endpoint.Endpoint` does around the ledger and the loop, without its thread."""

    def __init__(self, ledger: Ledger, loop: Loop, actor: Actor, port: int) -> None:
        self._ledger, self._loop, self._actor = ledger, loop, actor
        self.port = port

    @property
    def is_alive(self) -> bool:
        return not self._ledger.is_closing

    @property
    def num_live(self) -> int:
        return self._ledger.num_live

    def grant(self, item: GrantItem) -> None:
        self._ledger.grant(item)
        self._actor.wake_soon()

    def take_ended(self) -> list[Any]:
        return self._ledger.take_ended()

    def revoke_all(self) -> None:
        self._ledger.order(RevokeAll())
        self._actor.wake_soon()

    def close(self) -> None:
        if not self._ledger.is_closing:
            self._ledger.is_closing = True
            self._ledger.shut("the endpoint is closed")
            self._loop.finish()


class RankWorker:
    """One worker process: the real puller, driven as the transfer thread drives it, and vLLM's facade of it."""

    def __init__(self, life: Life, rank: int, clock: Clock) -> None:
        around = life.engine.around
        self.life = life
        self.process = Process(around.world, f"{life.name}.rank{rank}", life.engine.host, clock)
        self.agent = SimAgent(around.fabric, self.process, life.memory, rank)
        self.agent.register([], "DRAM")
        self.outbox = Outbox()
        self.sockets = SimSockets(around.network, self.process)
        timing = PeerTiming(around.settings.peer_timeout_s, around.settings.ping_interval_s())
        self.channel = Channel(timing, clock, make_sockets=lambda _: self.sockets)  # type: ignore[arg-type,return-value]
        region = Region(PAGE_BYTES, PAGE_BYTES, PAGE_BYTES, life.engine.role.num_blocks, 0, 0)
        self.info = RankInfo(rank=rank, agent_metadata=self.agent.metadata(), regions=[to_wire(region)])
        self.puller = Puller(
            identity=Identity(EngineId(life.engine.name), Rank(rank), life.engine.ranks, {"layout": "same"}, "same"),
            settings=around.settings,
            agent=self.agent,
            link=self.channel,
            local=Local(pages_of([region]), [BLOCK_SIZE], self.agent.prepare(None, strided_rows([region]), "DRAM"), 0),
            outbox=self.outbox,
            clock=clock,
        )
        self._orders: deque[Orders] = deque()
        self._open: set[str] = set()
        self.actor = Actor(self.process, "transfer", self._turn)
        self.sockets.actor = self.agent.actor = self.actor

    def take_orders(self, orders: Orders) -> None:
        for lease in orders.ended:
            self.outbox.sent(lease)
        if orders.loads or orders.aborts or orders.greet:
            self._orders.append(orders)
            self.actor.wake_soon()

    def take_output(self) -> StepOutput:
        """This rank's reports since the last step, in vLLM's form."""
        if not len(self.outbox):
            return NOTHING
        reports = self.outbox.take()
        for load in sorted(reports.received):
            if load not in self._open:
                self.life.world.violate("S3", f"{self.process.name} reports load {load}, which it has not got")
            self._open.discard(load)
        for what in ("received", "unsettled", "settled"):
            if ids := sorted(getattr(reports, what)):
                self.life.world.tell(self.process.name, f"reports as {what}: %s", ", ".join(ids))
        report = None
        if reports.received or reports.sent or reports.settled:
            report = WorkerReport(
                failed=reports.failed,
                unsettled=dict.fromkeys(sorted(reports.unsettled), 1),
                settled=dict.fromkeys(sorted(reports.settled), 1),
                reported={*reports.received, *reports.sent},
            )
        return StepOutput(set(reports.sent), set(reports.received), set(reports.failed), report)

    def _turn(self) -> float | None:
        clock = self.process.clock
        self.channel.poll(0.0)
        while self._orders:
            orders = self._orders.popleft()
            self._open.update(order.load for order in orders.loads)
            self.puller.take(orders, clock())
        self.puller.step(clock())
        if len(self.outbox):
            self.life.scheduler.news()
        if self.puller.has_work:
            return clock() + 0.0002
        deadline = self.channel.next_deadline()
        if not self.puller.is_idle:
            look_again = clock() + 0.1 + 0.1 * self.life.world.rng.random()
            return look_again if deadline is None else min(deadline, look_again)
        return deadline


class Life:
    """One life of one engine, from its start to its death."""

    def __init__(self, engine: Engine, name: str) -> None:
        self.engine, self.name = engine, name
        self.around = around = engine.around
        self.world, self.oracle = around.world, around.oracle
        rng = self.world.rng
        self.core = Process(self.world, name, engine.host, self._clock())
        self.incarnation = Incarnation(rng.randbytes(16))
        self.memory = Memory(self.world, name, engine.role.num_blocks, engine.ranks)
        self.ranks = [RankWorker(self, rank, self._clock()) for rank in range(engine.ranks)]
        self.lifelines: dict[int, Lifeline] = {}
        self.ledger: Ledger | None = None
        self.loop: Loop | None = None
        self.producer: ProducerHalf | None = None
        self._ended = 0
        self.readers: dict[str, str] = {}
        self.open_loads: dict[SimRequest, Life | None] = {}
        if engine.role.may_grant:
            self._open_endpoint(around)
        self._make_consumer(around)
        self.scheduler = ModelScheduler(self, recompute=engine.role.recompute)
        self.is_disturbed = False
        self.may_forget = False
        self.on_load: Callable[[], None] | None = None

    @property
    def processes(self) -> list[Process]:
        return [self.core, *(rank.process for rank in self.ranks)]

    @property
    def actors(self) -> list[Actor]:
        actors = [self.scheduler.actor, self.leaser_actor, *(rank.actor for rank in self.ranks)]
        return actors if self.loop is None else [*actors, self.endpoint_actor]

    @property
    def key(self) -> PeerKey:
        return PeerKey(EngineId(self.engine.name), self.incarnation, self.engine.host, PORT)

    def _clock(self) -> Clock:
        rng, drift = self.world.rng, self.around.drift
        return Clock(self.world, rng.random() * 1e6, 1.0 + drift * (2 * rng.random() - 1))

    def _open_endpoint(self, around: Surroundings) -> None:
        clock, role = self.core.clock, self.engine.role
        self.ledger = Ledger(clock)
        self.ledger.open()
        self.ledger.site = Site(tuple(rank.info for rank in self.ranks), {"layout": "same"}, "same", enforce=True)
        router = SimRouter(around.network, self.core, (self.engine.host, PORT), self.lifelines)
        router.on_answer = lambda request, reply: self.oracle.answered(request, reply, self)
        self.router = router
        timing = lease_timing(around.settings)
        self.loop = Loop(router, self.ledger, self.incarnation, timing, clock)  # type: ignore[arg-type]
        self.endpoint_actor = router.actor = Actor(self.core, "endpoint", self._endpoint_turn)
        endpoint = SimEndpoint(self.ledger, self.loop, self.endpoint_actor, PORT)
        for number in range(100, 100 + role.ranks):
            self.lifelines[number] = Lifeline(number)
            self.ledger.order(Watch(self.lifelines[number]))  # type: ignore[arg-type]
        self.endpoint_actor.wake_soon()
        self.producer = ProducerHalf(
            around.settings,
            endpoint,  # type: ignore[arg-type]
            EngineId(self.engine.name),
            self.incarnation,
            self.engine.host,
            role.ranks,
            [BLOCK_SIZE],
            random_bytes=self.world.rng.randbytes,
        )

    def _make_consumer(self, around: Surroundings) -> None:
        role, clock = self.engine.role, self.core.clock
        channel_id = ChannelId(self.world.rng.randbytes(16).hex())
        self.sockets = SimSockets(around.network, self.core)

        def make_channel(timing: PeerTiming, clock: Any) -> Channel:
            self.channel = Channel(timing, clock, make_sockets=lambda _: self.sockets)  # type: ignore[arg-type,return-value]
            return self.channel

        self.leaser = Leaser(channel_id, around.settings, clock=clock, make_channel=make_channel)
        self.leaser_actor = self.sockets.actor = Actor(self.core, "leaser", self._leaser_turn)
        self.consumer = ConsumerHalf(
            around.settings,
            self.leaser,
            channel_id,
            self.incarnation,
            [BLOCK_SIZE],
            recompute=role.recompute,
            may_load=role.may_load,
            clock=clock,
        )
        self.consumer.bind_pool(self.memory)  # type: ignore[arg-type]

    def _endpoint_turn(self) -> float | None:
        loop = self.loop
        assert loop is not None
        loop.turn()
        ended = loop.table.counters["ended"]
        if ended != self._ended:
            self._ended = ended
            self.scheduler.news()
        sleep_s = loop.sleep_s()
        return None if sleep_s is None else self.core.clock() + sleep_s

    def _leaser_turn(self) -> float | None:
        self.leaser.step(0.0)
        if self.scheduler.waiting:
            self.scheduler.news()
        return self.leaser.next_deadline()

    def take_orders(self, orders: Orders) -> None:
        self.readers.update((order.load, order.reader) for order in orders.loads)
        for rank in self.ranks:
            rank.take_orders(orders)

    def load_begins(self, request: SimRequest) -> None:
        """A load was ordered: it has to end in time, unless this engine itself was held up."""
        settings, drift = self.around.settings, self.around.drift
        bound_s = settings.load_timeout_s * (1 + 2 * drift) + STEPS_S
        self.world.after(bound_s, self._load_must_be_over, request, "load_timeout_s")
        source = self.open_loads[request] = self.oracle.peer_of(request)
        if source is not None and source.on_load is not None:
            source.on_load()

    def load_ends(self, request: SimRequest) -> None:
        """A load was reported."""
        self.open_loads.pop(request, None)

    def peer_is_gone(self, peer: Life) -> None:
        """A producer froze, died or was cut off: loads from it have to fail in ``peer_timeout_s`` and a step."""
        settings = self.around.settings
        bound_s = settings.peer_timeout_s + settings.ping_interval_s() + STEPS_S
        for request, source in self.open_loads.items():
            if source is peer:
                self.world.after(bound_s, self._load_from_the_gone_must_be_over, request, "peer_timeout_s")

    def _load_must_be_over(self, request: SimRequest, bound: str) -> None:
        if self.core.alive and not self.is_disturbed and request in self.open_loads:
            self.world.violate("L2", f"load {request.request_id} of {self.name} is still open after {bound}")

    def _load_from_the_gone_must_be_over(self, request: SimRequest, bound: str) -> None:
        if not self.around.is_clear:  # or the producer may have come back before anybody could know that it was gone
            self._load_must_be_over(request, bound)

    # Endings

    def shut_down(self) -> None:
        """As vLLM does it: the workers first, which sever their lifelines and wait for the endpoint, then the rest."""
        self.world.tell(self.name, "shuts down")
        self.scheduler.is_closed = self.may_forget = True
        for lifeline in self.lifelines.values():
            lifeline.is_severed = True
        if self.loop is not None:
            self.endpoint_actor.wake_soon()
        self._unregister(self.world.now + 1.0)

    def _unregister(self, give_up_at: float) -> None:
        if not self.core.alive:
            return
        let_go = all(lifeline.is_closed for lifeline in self.lifelines.values())
        if not let_go and self.world.now < give_up_at:
            self.world.after(0.02, self._unregister, give_up_at)
            return
        self.memory.die()
        for rank in self.ranks:
            rank.process.alive = False
        self.world.after(0.05 + self.world.rng.random(), self._close)

    def _close(self) -> None:
        if not self.core.alive:
            return
        if self.core.is_paused:
            self.world.at(self.core.paused_until + 0.01, self._close)
            return
        for load in self.leaser.claims.loads():  # as Leaser.close does, which waits in real time for answers
            self.leaser.release(load)
        self.leaser.step(0.0)
        if self.producer is not None:
            self.producer.close()
        self.die()
        if self.engine.life is self:
            self.engine.life = None

    def die(self) -> None:
        """Nothing of this life runs any more."""
        for process in self.processes:
            process.alive = False
        self.memory.die()
        if self.loop is not None:
            self.around.network.close(self.core)
        for request in list(self.scheduler.requests.values()):
            request.must_load = False
            self.oracle.ended(request, Outcome.LOST)
        self.collect()

    def collect(self) -> None:
        """Count this life's loads by outcome and cause."""
        for key, number in self.consumer.counters.items():
            if key.startswith("loads|"):
                self.oracle.causes[key.removeprefix("loads|")] += number


__all__ = ["Engine", "Life", "Role", "Surroundings"]
