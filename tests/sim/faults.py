"""What goes wrong besides messages and handoffs, and when: drawn once for each seed, before anything happens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.sim.engine import Engine, Life
from tests.sim.scenario import FAULTS_S, ONE_BAD_PEER, Fault

if TYPE_CHECKING:
    from tests.sim.simulation import Simulation


class Faults:
    """Plans the faults of one seed, and brings them about."""

    def __init__(self, sim: Simulation) -> None:
        self.sim, self.world, self.scenario = sim, sim.world, sim.scenario
        self.rng = sim.world.rng

    def plan(self) -> None:
        """Draw what will happen."""
        rng, scenario = self.rng, self.scenario
        if scenario.kind == ONE_BAD_PEER:
            self._plan_bad_peer()
        for fault, happen, most in (
            (Fault.PAUSES, self._pause, 3),
            (Fault.CLOCKS, self._leap, 2),
            (Fault.CRASHES, self._crash, 2),
            (Fault.RESETS, self._reset, 2),
            (Fault.CUTS, self._cut, 2),
            (Fault.PRESSURE, self._preempt, 3),
        ):
            if scenario.has(fault):
                for _ in range(rng.randrange(1, most + 1)):
                    self.world.at(0.1 + rng.random() * FAULTS_S, happen)
        if scenario.has(Fault.CRASHES):
            plan = rng.choice([self._plan_crash_at_commit, self._plan_shutdown_at_load, lambda _: None])
            plan(rng.choice(self.sim.producers))
        if scenario.has(Fault.READS):
            fabric = self.sim.around.fabric
            fabric.refused = rng.choice([0.0, 0.05])
            fabric.failing = rng.choice([0.0, 0.1])
            fabric.slow, fabric.slow_s = rng.choice([0.0, 0.2, 0.5]), rng.choice([0.5, 9.0])
            fabric.lost = rng.choice([0.0, 0.1])
            fabric.hangs_when_paused = rng.random() < 0.5

    def _plan_bad_peer(self) -> None:
        victim = self.sim.router.victim = self.rng.choice(self.sim.producers)
        happen = self.rng.choice([self._freeze_engine, self._kill_engine, self._cut_off])
        loads_before = self.rng.randrange(3)
        fabric = self.sim.around.fabric
        fabric.hangs_when_paused = self.rng.random() < 0.7
        fabric.duration_s = self.rng.choice([fabric.duration_s, 0.3])

        def a_load_begins() -> None:
            nonlocal loads_before
            loads_before -= 1
            if loads_before < 0 and victim.life is not None:
                victim.life.on_load = None
                self.world.after(self.rng.random() * 0.1, happen, victim)

        assert victim.life is not None
        victim.life.on_load = a_load_begins

    def _plan_crash_at_commit(self, engine: Engine) -> None:
        """A producer dies when a commit arrives, and is back before anybody has missed it."""
        life = engine.life
        assert life is not None

        def a_commit_arrives() -> None:
            life.router.on_commit = None
            if engine.life is life:
                self._kill_engine(engine)
                self.world.after(self.rng.random() * 0.2, self._start, engine)

        life.router.on_commit = a_commit_arrives

    def _plan_shutdown_at_load(self, engine: Engine) -> None:
        """A producer shuts down while it is read from."""
        life = engine.life
        assert life is not None

        def a_load_begins() -> None:
            life.on_load = None
            self.world.after(self.rng.random() * 0.1, life.shut_down)

        life.on_load = a_load_begins

    def _life(self) -> Life | None:
        return self.rng.choice(self.sim.engines).life

    def _pause(self) -> None:
        """A process, a whole engine, or one thread does not run for a while."""
        life = self._life()
        if life is None:
            return
        for_s = self.rng.random() * self.rng.choice([0.2, 1.5, 4.0])
        until = self.world.now + for_s
        life.is_disturbed = True
        match self.rng.randrange(4):
            case 0:
                self._freeze(life, until)
            case 1:
                process = self.rng.choice(life.processes)
                self.world.tell(process.name, "stands still for %.2f s", for_s)
                process.pause(until)
            case _:
                actor = self.rng.choice(life.actors)
                self.world.tell(actor.name, "stands still for %.2f s", for_s)
                actor.stalled_until = max(actor.stalled_until, until)

    def _freeze(self, life: Life, until: float) -> None:
        self.world.tell(life.name, "is frozen for %.2f s", until - self.world.now)
        life.is_disturbed = True
        for process in life.processes:
            process.pause(until)

    def _leap(self) -> None:
        """The machine was suspended: what its processes see is that much time has passed."""
        life = self._life()
        if life is not None:
            by_s = self.rng.random() * self.rng.choice([0.5, 5.0, 100.0])
            self.world.tell(life.name, "finds its clocks %.2f s later", by_s)
            life.is_disturbed = life.may_forget = True
            for process in life.processes if self.rng.random() < 0.7 else [self.rng.choice(life.processes)]:
                process.clock.leap(by_s)
            for actor in life.actors:
                actor.wake_soon()

    def _crash(self) -> None:
        engine = self.rng.choice(self.sim.engines)
        if engine.life is None:
            return
        if self.rng.random() < 0.3:
            engine.life.shut_down()
            self._start_again(engine, 0.5)
        else:
            self._kill_engine(engine)
            self._start_again(engine, 0.0)

    def _start_again(self, engine: Engine, at_least_s: float) -> None:
        if self.rng.random() < 0.8:
            self.world.after(at_least_s + self.rng.random() * self.rng.choice([0.1, 1.0]), self._start, engine)

    def _start(self, engine: Engine) -> None:
        if engine.life is None:
            engine.start()

    def _reset(self) -> None:
        life = self._life()
        if life is not None and not life.core.is_paused and not life.scheduler.is_closed:
            life.scheduler.reset()

    def _cut(self) -> None:
        here, there = self.rng.sample([engine.host for engine in self.sim.engines], 2)
        pairs = {(here, there)} if self.rng.random() < 0.5 else {(here, there), (there, here)}
        self._cut_pairs(pairs, self.rng.random() * self.rng.choice([0.5, 3.0]))

    def _cut_pairs(self, pairs: set[tuple[str, str]], for_s: float) -> None:
        for here, there in sorted(pairs):
            self.world.tell("network", "nothing passes from %s to %s for %.2f s", here, there, for_s)
        cuts = self.sim.around.network.weather.cuts
        cuts |= pairs
        self.world.after(for_s, cuts.difference_update, pairs)

    def _preempt(self) -> None:
        life = self._life()
        if life is not None and life.scheduler.running and not life.core.is_paused:
            life.scheduler.preempt(self.rng.choice(life.scheduler.running))

    # The one bad peer

    def _freeze_engine(self, engine: Engine) -> None:
        if engine.life is not None:
            self.sim.expect_losses(engine.life)
            self._freeze(engine.life, self.world.now + 3.0)

    def _kill_engine(self, engine: Engine) -> None:
        if engine.life is not None:
            self.sim.expect_losses(engine.life)
            engine.crash()

    def _cut_off(self, engine: Engine) -> None:
        if engine.life is not None:
            self.sim.expect_losses(engine.life)
            hosts = [other.host for other in self.sim.engines if other is not engine]
            self._cut_pairs({pair for host in hosts for pair in ((host, engine.host), (engine.host, host))}, 3.0)
