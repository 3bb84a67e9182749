"""One seed from beginning to end: draw the world, let it happen, clear the weather, and see that nothing is left."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tests.sim.agent import Fabric
from tests.sim.engine import Engine, Life, Surroundings
from tests.sim.faults import Faults
from tests.sim.network import Network
from tests.sim.oracle import Oracle
from tests.sim.router import Router
from tests.sim.scenario import FAULTS_S, Scenario, draw_scenario, draw_weather
from tests.sim.world import World

QUIET_S = 16.0
"""More than every bound of a lease, a load, a tombstone and a slow read, one after another."""

IDLE_S = (35.0, 340.0, 680.0, 1020.0)
"""When all threads look around again after that: what is idle is forgotten in minutes."""


@dataclass(frozen=True)
class Result:
    """What became of one seed."""

    seed: int
    scenario: str
    violations: list[tuple[str, str]]
    outcomes: Counter[str]
    causes: Counter[str]
    fingerprint: int
    events: int
    story: list[tuple[float, str, str, tuple[Any, ...]]]


class Simulation:
    """See the module."""

    def __init__(self, seed: int, *, keep_all: bool = False) -> None:
        self.world = World(seed, keep_all=keep_all)
        rng = self.world.rng
        self.scenario: Scenario = draw_scenario(rng)
        self.oracle = Oracle(self.world)
        network = Network(self.world, draw_weather(rng, self.scenario))
        fabric = Fabric(self.world, duration_s=rng.choice([0.002, 0.02, 0.1]), cuts=network.weather.cuts)
        self.around = Surroundings(
            self.world, network, fabric, self.oracle, self.scenario.settings, self.scenario.drift
        )
        self.world.tell("world", str(self.scenario))
        roles = [("P", role) for role in self.scenario.producers] + [("C", role) for role in self.scenario.consumers]
        self.engines = [
            Engine(self.around, f"{kind}{number}", f"10.0.0.{number}", role)
            for number, (kind, role) in enumerate(roles, 1)
        ]
        self.producers = self.engines[: len(self.scenario.producers)]
        self.consumers = [engine for engine in self.engines if engine.role.may_load]
        self.router = Router(self)
        self.faults = Faults(self)

    def run(self) -> Result:
        """Let it all happen."""
        for engine in self.engines:
            engine.start()
        self.faults.plan()
        self.router.plan()
        self.world.run_until(FAULTS_S + 0.2)
        self._clear_up()
        self.world.run_until(self.world.now + QUIET_S)
        if not self.world.violations:
            self._check_quiet()
        begin = self.world.now
        for later in IDLE_S:
            if not self.world.violations:
                self._look_around()
                self.world.run_until(begin + later)
        if not self.world.violations:
            self._look_around()
            self.world.run_until(self.world.now + 1.0)
            self._check_idle()
        for life in self.lives():
            life.collect()
        world = self.world
        return Result(
            world.seed, str(self.scenario), world.violations, self.oracle.outcomes, self.oracle.causes,
            world.fingerprint, world.events, list(world.story),
        )  # fmt: skip

    def lives(self) -> list[Life]:
        return [engine.life for engine in self.engines if engine.life is not None]

    def expect_losses(self, victim: Life) -> None:
        """``victim`` is about to freeze, die or be cut off, while everybody else is well."""
        victim.is_disturbed = True
        for life in self.lives():
            if life is not victim:
                life.peer_is_gone(victim)

    def _clear_up(self) -> None:
        self.world.tell("world", "the weather clears")
        self.around.is_clear = True
        self.around.network.weather.clear_up()
        self.around.fabric.clear_up()
        for life in self.lives():
            for process in life.processes:
                process.paused_until = min(process.paused_until, self.world.now + 0.1)
            for actor in life.actors:
                actor.stalled_until = min(actor.stalled_until, self.world.now + 0.1)
                actor.wake(0.1)

    def _look_around(self) -> None:
        for life in self.lives():
            for actor in life.actors:
                actor.wake_soon()

    def _leftovers(self, life: Life) -> Iterator[tuple[str, int]]:
        """What must be nothing once every bound has passed."""
        scheduler, gauges, channel = life.scheduler, life.consumer.samples(), life.channel
        yield "requests", len(scheduler.requests)
        yield "blocks not in the pool", life.engine.role.num_blocks - 1 - life.memory.num_free
        yield "loads", int(gauges["loads_in_flight"])
        yield "blocks in quarantine", int(gauges["quarantined_blocks"])
        yield "claims", len(life.leaser.claims)
        yield "releases without an answer", life.leaser.claims.releases_open
        yield "busy peers of the leaser", sum(peer.is_busy or peer.pinned for peer in channel.peers.values())
        for rank in life.ranks:
            yield "open loads of a rank", 0 if rank.puller.is_idle else 1
            yield "busy reads", len(rank.agent.posted)
            yield "busy peers of a rank", sum(peer.is_busy for peer in rank.channel.peers.values())
        if life.loop is not None and life.ledger is not None:
            yield "leases", len(life.loop.table)
            yield "accepted grants", life.ledger.num_live
            yield "tombstones", life.loop.table.num_tombstones
            yield "channel records", life.loop.table.num_channels
            yield "deadlines of the endpoint", 0 if life.loop.table.next_deadline() is None else 1

    def _check_quiet(self) -> None:
        for life in self.lives():
            for what, number in self._leftovers(life):
                if number:
                    self.world.violate("L1", f"{life.name} still has {number} {what} when everything should be over")
            for where, counters in self._counters(life):
                for name in ("internal", "internal_errors", "invalid_internal", "grants_failed"):
                    if counters.get(name):
                        self.world.violate("I1", f"{where} counted {name}: an error of kvlease's own was swallowed")

    def _check_idle(self) -> None:
        for life in self.lives():
            known = {life.core.name: len(life.channel.peers), f"{life.core.name} sockets": len(life.sockets)}
            for rank in life.ranks:
                known[rank.process.name] = len(rank.channel.peers)
                known[f"{rank.process.name} sockets"] = len(rank.sockets)
            for where, number in known.items():
                if number:
                    self.world.violate("L1", f"{where} still knows {number} peers that it has not needed for long")

    def _counters(self, life: Life) -> Iterator[tuple[str, dict[str, float]]]:
        stats = life.leaser.stats()
        yield f"{life.name}.leaser", {name.partition("|")[2]: number for name, number in stats.items()}
        for rank in life.ranks:
            yield rank.process.name, {**rank.puller.stats(), **rank.channel.counters()}
        if life.ledger is not None:
            yield f"{life.name}.endpoint", life.ledger.snapshot.counters


def run_seed(seed: int, *, keep_all: bool = False) -> Result:
    """Simulate one seed."""
    return Simulation(seed, keep_all=keep_all).run()


@contextmanager
def silence() -> Iterator[None]:
    """No log lines of kvlease: most of them are about what the simulation does on purpose."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)
