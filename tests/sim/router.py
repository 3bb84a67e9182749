"""The clients and the router between the engines: it carries handoffs, and not always the right one, once, and whole.

An honest route brings a handoff to one consumer, with the prompt it belongs to. Under :attr:`Fault.ROUTER` it repeats,
replays, swaps, truncates and forges.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, Any

from tests.sim.engine import Engine, Life
from tests.sim.requests import BLOCK_SIZE, Outcome, Prompt, SimRequest
from tests.sim.scenario import FAULTS_S, ROUGH, Fault

if TYPE_CHECKING:
    from tests.sim.simulation import Simulation

Params = dict[str, Any]


class Router:
    """``victim`` is the one bad peer, from whose handoffs nothing is expected."""

    def __init__(self, sim: Simulation) -> None:
        self.sim, self.world, self.scenario = sim, sim.world, sim.scenario
        self.rng = sim.world.rng
        self.seen: list[tuple[Params, Prompt]] = []
        self.victim: Engine | None = None
        self._numbers = count(1)
        self._withheld: tuple[Params, Prompt] | None = None

    def plan(self) -> None:
        """Draw when which prompts arrive."""
        for _ in range(self.scenario.handoffs):
            self.world.at(self.rng.random() * 0.75 * FAULTS_S, self._prefill, self._prompt(), self.rng.random())
        for _ in range(self.rng.randrange(4)):
            self.world.at(self.rng.random() * FAULTS_S, self._churn)

    def _prompt(self) -> Prompt:
        rng = self.rng
        lora = rng.choice(["a", "b"]) if rng.random() < 0.2 else None
        salt = rng.choice(["s", "t"]) if rng.random() < 0.2 else None
        return Prompt(rng.randrange(1, 4), rng.choice([3, 8, 10, 17]), lora, salt)

    def _name(self, prefix: str, life: Life) -> str:
        """A request id; under Fault.IDS one that has been there before."""
        number = next(self._numbers)
        if self.scenario.has(Fault.IDS):
            name = f"{prefix}{self.rng.randrange(2)}"
            if name not in life.scheduler.requests:
                return name
        return f"{prefix}-{number}"

    # The producer's leg

    def _prefill(self, prompt: Prompt, which: float) -> None:
        producer = self.sim.producers[int(which * len(self.sim.producers))]
        if producer.life is None:
            return
        request = SimRequest(
            request_id=self._name("p", producer.life),
            prompt=prompt,
            number=next(self._numbers),
            kv_transfer_params={"do_remote_decode": True, "do_remote_prefill": False},
            served=lambda request, handoff: self._relay(producer, request, handoff),
            steps_left=self.rng.randrange(1, 3),
        )
        request.outcome = Outcome.LOCAL  # it is no load
        producer.life.scheduler.add(request)

    def _churn(self) -> None:
        """A request of no interest: it only uses blocks, as soon as there are some."""
        engine = self.rng.choice(self.sim.engines)
        if engine.life is not None:
            prompt = Prompt(0, self.rng.choice([8, 16, 20]))
            steps = self.rng.randrange(1, 6)
            name = f"x-{next(self._numbers)}"
            engine.life.scheduler.add(SimRequest(name, prompt, next(self._numbers), steps_left=steps))

    # The way between

    def _relay(self, producer: Engine, request: SimRequest, handoff: Params | None) -> None:
        if handoff is None:
            return
        self.seen.append((handoff, request.prompt))
        if self.scenario.has(Fault.IDS) and self.rng.random() < 0.5:
            if self._withheld is None:
                self._withheld = (handoff, request.prompt)
            else:
                self._overtake(self._withheld, (handoff, request.prompt))
                self._withheld = None
            return
        is_honest = not self.scenario.has(Fault.ROUTER) or self.rng.random() < 0.4
        if is_honest:
            must_load = self.scenario.kind != ROUGH and producer is not self.victim
            self._decode(
                handoff, request.prompt, delay_s=self.rng.choice([0.0, self.rng.random() * 0.1]), must_load=must_load
            )
        else:
            self._misroute(handoff, request.prompt)
        if self.rng.random() < 0.5:
            self.world.after(self.rng.random() * 0.3, self._churn)

    def _decode(
        self, handoff: Params, prompt: Prompt, *, delay_s: float, must_load: bool = False, siblings: bool = True
    ) -> None:
        consumers = [engine for engine in self.sim.consumers if engine.life is not None]
        if not consumers:
            return
        consumer = self.rng.choice(consumers)
        times = self.rng.choice([1, 1, 1, 2, 3]) if siblings else 1
        if self.rng.random() < 0.2:
            prompt = replace(prompt, length=prompt.length + self.rng.randrange(1, 6))
        name = f"c-{next(self._numbers)}" if times > 1 else ""
        for sample in range(times):
            spread_s = self.rng.random() * (0.02 if must_load else 0.2)
            child = f"{sample}_{name}" if name else None
            self.world.after(delay_s + spread_s, self._ask, consumer, copy.deepcopy(handoff), prompt, must_load, child)

    def _ask(self, consumer: Engine, handoff: Params, prompt: Prompt, must_load: bool, name: str | None = None) -> None:
        life = consumer.life
        if life is None:
            return
        rng = self.rng
        request = SimRequest(
            request_id=name or self._name("c", life),
            prompt=prompt,
            number=next(self._numbers),
            kv_transfer_params=handoff,
            must_load=must_load,
            steps_left=rng.randrange(1, 4),
        )
        if rng.random() < 0.25:
            request.not_before = self.world.now + rng.random() * (2.0 if must_load else 4.0)
        if not must_load and rng.random() < 0.25:
            request.local_hit_blocks = rng.randrange(prompt.length // BLOCK_SIZE + 1)
        if self.scenario.has(Fault.ABORTS):
            if rng.random() < 0.1:
                request.abort_immediately = True
            elif rng.random() < 0.5:
                self.world.after(rng.random() * rng.choice([0.004, 0.02, 0.2, 1.0]), self._abort, consumer, request)
        life.scheduler.add(request)

    def _overtake(self, first: tuple[Params, Prompt], second: tuple[Params, Prompt]) -> None:
        """A client gives up while its lease is being claimed, and the next one has the same request id."""
        consumer = self.rng.choice(self.sim.consumers)
        if consumer.life is None:
            return
        name = f"c-{next(self._numbers)}"
        self._ask(consumer, copy.deepcopy(first[0]), first[1], False, name)
        request = consumer.life.scheduler.requests.get(name)
        if request is not None:
            gone_s = self.rng.random() * 0.03
            self.world.after(gone_s, self._abort, consumer, request)
            self.world.after(gone_s + 1e-6, self._ask, consumer, copy.deepcopy(second[0]), second[1], False, name)

    def _abort(self, consumer: Engine, request: SimRequest) -> None:
        if consumer.life is None:
            return
        consumer.life.scheduler.abort(request)
        if self.scenario.has(Fault.IDS) and self.rng.random() < 0.5:  # the next one of that name comes at once
            handoff, prompt = self.rng.choice(self.seen)
            again = request.request_id
            self.world.after(
                self.rng.random() * 0.01, self._ask, consumer, copy.deepcopy(handoff), prompt, False, again
            )

    # What a router should not do

    def _misroute(self, handoff: Params, prompt: Prompt) -> None:
        rng = self.rng
        soon = rng.random() * 0.1
        match rng.randrange(7):
            case 0:  # repeat
                for _ in range(rng.randrange(2, 4)):
                    self._decode(handoff, prompt, delay_s=soon + rng.random())
            case 1:  # replay
                self._decode(handoff, prompt, delay_s=soon)
                self._decode(handoff, prompt, delay_s=0.5 + rng.random() * 4)
            case 2:  # another prompt of the same length
                self._decode(handoff, self._other(prompt), delay_s=soon)
            case 3:  # the handoff of another request
                other, _ = rng.choice(self.seen)
                self._decode(other, prompt, delay_s=soon)
            case 4:  # truncated
                self._decode(self._truncated(handoff), prompt, delay_s=soon)
            case 5:
                self._decode(self._forged(handoff), prompt, delay_s=soon)
                if rng.random() < 0.5:
                    self._decode(handoff, prompt, delay_s=soon)
            case _:  # lost
                pass

    def _other(self, prompt: Prompt) -> Prompt:
        changes: list[dict[str, Any]] = [
            {"text": prompt.text + 1},
            {"lora": "b" if prompt.lora == "a" else "a"},
            {"salt": "t" if prompt.salt == "s" else "s"},
            {"salt": None if prompt.salt else ""},
        ]
        return replace(prompt, **self.rng.choice(changes))

    def _truncated(self, handoff: Params) -> Params:
        params = copy.deepcopy(handoff)
        inner = self.rng.random() < 0.3
        target = params["kvlease"] if inner else params
        name = self.rng.choice(sorted(target))
        if self.rng.random() < 0.5:
            del target[name]
        else:
            target[name] = self.rng.choice([None, [], {}, -1, "", "x" * 600, 1 << 70, 0.5])
        return params

    def _forged(self, handoff: Params) -> Params:
        params, rng = copy.deepcopy(handoff), self.rng
        proof = params["kvlease"]
        match rng.randrange(10):
            case 0 | 8 | 9:
                proof["token"] = _flip(proof["token"], rng.randrange(128))
            case 1:
                proof["incarnation"] = _flip(proof["incarnation"], rng.randrange(128))
            case 2:
                params["remote_request_id"] = rng.choice(["nobody", "p0", "p1"])
            case 3:
                params["remote_host"] = rng.choice(self.sim.engines).host
            case 4:
                params["remote_host"], params["remote_port"] = rng.choice(
                    [("10.9.9.9", 1), ("no host!", 7), ("::1", 3)]
                )
            case 5:
                params["remote_num_tokens"] = max(1, params["remote_num_tokens"] + rng.choice([-4, -1, 1, 4, 1000]))
            case 6:
                other, _ = rng.choice(self.seen)
                proof["token"] = other["kvlease"]["token"]
            case _:
                params["remote_engine_id"] = "another"
                params["remote_block_ids"] = [[1, 2, 3, 4, 5]]
        return params


def _flip(digits: str, bit: int) -> str:
    return f"{int(digits, 16) ^ (1 << bit):032x}"
