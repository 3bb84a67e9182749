"""The exhaustive checker: every order in which one small handoff can go, and go wrong, over the real code.

One producer, one lease, two readers (two consumers, or two requests of one consumer) of two ranks each; messages may
overtake each other, and a bounded number of them is lost or repeated, clocks jump, requests are aborted, engines crash.
Breadth first, so the first violation that is found has the shortest story. How the state is kept small is told in
``docs/simulation.md``.

    python -m tests.sim.exhaustive
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tests.sim.exhaustive_model import CRASH, EXPIRY, FAULTS, LOSS, NUDGE, Model
from tests.sim.exhaustive_machine import Violation


@dataclass(frozen=True)
class Scope:
    """What is explored: by consumer the names of its requests, how many consumers, and how often each fault happens."""

    name: str
    loads: tuple[str, ...]
    consumers: int
    budget: tuple[int, ...]


def budget(**faults: int) -> tuple[int, ...]:
    """How often each of the ``FAULTS`` may happen."""
    assert not faults.keys() - set(FAULTS), faults
    return tuple(faults.get(name, 0) for name in FAULTS)


@dataclass(frozen=True)
class Broken:
    """A rule is broken: which, after how many steps, and the steps."""

    rule: str
    depth: int
    story: list[str]


@dataclass(frozen=True)
class Report:
    """What an exploration saw."""

    scope: Scope
    states: int
    transitions: int
    depth: int
    violation: Broken | None
    endings: frozenset[tuple[str, ...]]
    seconds: float


World = tuple[int, int, int, int]
"""A producer's number, those of two consumers (-1: there is none), and the faults left as one number."""


class Explorer:
    """One breadth-first search."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.model = Model(scope.loads)
        self.radix = [1]
        for most in scope.budget:
            self.radix.append(self.radix[-1] * (most + 1))
        self.masks = [self._mask(left) for left in range(self.radix[-1])]

    def _mask(self, left: int) -> int:
        return sum(
            1 << fault for fault in range(len(FAULTS)) if left // self.radix[fault] % (self.scope.budget[fault] + 1)
        )

    def first(self) -> World:
        consumer = self.model.first_consumer()
        second = consumer if self.scope.consumers == 2 else -1
        return self.model.first_producer(0), consumer, second, self.radix[-1] - 1

    def settled(self, producer: int, consumers: tuple[int, int], swaps: tuple[bool, bool], left: int) -> World:
        """The world in the one form that all its mirror images share."""
        model = self.model
        first, second = consumers
        swap = second >= 0 and first > second
        if swaps[0] or swaps[1] or swap:
            producer = model.rename(producer, swap, swaps)
            if swap:
                first, second = second, first
        return producer, first, second, left

    def successors(self, world: World) -> Iterator[tuple[World, tuple[Any, ...]]]:
        model = self.model
        producer, first, second, left = world
        mask = self.masks[left]
        facts = model.producers.records[producer].facts
        here = (first, second)
        for which in range(self.scope.consumers):
            moves = model.moves(here[which], facts.live, facts.life == 1, mask)
            if moves and moves[0].hasty:
                move = moves[0]
                yield self._with(producer, here, which, move.consumer, move.swapped, left), (which, *move.label)
                return
        for which in range(self.scope.consumers):
            for move in model.moves(here[which], facts.live, facts.life == 1, mask):
                after = left if move.cost is None else left - self.radix[move.cost]
                yield self._with(producer, here, which, move.consumer, move.swapped, after), (which, *move.label)
            for rank, message in model.requests(here[which]):
                then, reply = model.ask(producer, message, which, rank)
                number, swapped = model.answered(here[which], rank, message, reply)
                consumers = (number, second) if which == 0 else (first, number)
                swaps = (swapped, False) if which == 0 else (False, swapped)
                label = (which, "handle", rank, model.messages.values[message], model.messages.values[reply])
                yield self._maybe_ended(facts.live, then, consumers, swaps, left), label
                if mask >> LOSS & 1 and number != model.answered(here[which], rank, message, None)[0]:
                    number, swapped = model.answered(here[which], rank, message, None)
                    consumers = (number, second) if which == 0 else (first, number)
                    swaps = (swapped, False) if which == 0 else (False, swapped)
                    after = left - self.radix[LOSS]
                    yield self._maybe_ended(facts.live, then, consumers, swaps, after), (*label, "lost")
        yield from self._producer_moves(world, mask)

    def _with(self, producer: int, here: tuple[int, int], which: int, number: int, swapped: bool, left: int) -> World:
        if which == 0:
            return self.settled(producer, (number, here[1]), (swapped, False), left)
        return self.settled(producer, (here[0], number), (False, swapped), left)

    def _maybe_ended(
        self, was_live: bool, producer: int, consumers: tuple[int, int], swaps: tuple[bool, bool], left: int
    ) -> World:
        """When the lease has ended, its blocks hold something else from this moment on."""
        if was_live and not self.model.producers.records[producer].facts.live:
            both = [self.model.dirtied(number) if number >= 0 else (number, False) for number in consumers]
            consumers = (both[0][0], both[1][0])
            swaps = (swaps[0] != both[0][1], swaps[1] != both[1][1])
        return self.settled(producer, consumers, swaps, left)

    def _producer_moves(self, world: World, mask: int) -> Iterator[tuple[World, tuple[Any, ...]]]:
        model = self.model
        producer, first, second, left = world
        facts = model.producers.records[producer].facts
        consumers, same = (first, second), (False, False)
        if facts.lingers:
            then, _ = model.producers.step(producer, "tick")
            yield self._maybe_ended(facts.live, then, consumers, same, left), ("producer", "the grace is over")
        elif facts.deadline and mask >> EXPIRY & 1:
            then, _ = model.producers.step(producer, "tick")
            after = left - self.radix[EXPIRY]
            yield (
                self._maybe_ended(facts.live, then, consumers, same, after),
                ("producer", "time jumps to its deadline"),
            )
        if facts.may_nudge and mask >> NUDGE & 1:
            then, _ = model.producers.step(producer, "nudge")
            after = left - self.radix[NUDGE]
            yield self._maybe_ended(facts.live, then, consumers, same, after), ("producer", "some time passes")
        if mask >> CRASH & 1 and facts.life == 0:
            then = model.first_producer(1)
            after = left - self.radix[CRASH]
            yield self._maybe_ended(facts.live, then, consumers, same, after), ("producer", "crashes and starts again")

    def check(self, world: World) -> None:
        """L1: whatever has happened, when nothing more is heard and time passes, everything ends."""
        producer, first, second, _ = world
        model = self.model
        for text in (model.lasting_lease(producer), model.lasting(first), second >= 0 and model.lasting(second)):
            if text:
                raise Violation(f"L1: in silence this never ends: {text}")


def explore(scope: Scope, progress: Callable[[int, int, int], None] | None = None) -> Report:
    """Visit every state of ``scope``. ``progress`` is told the states, transitions and depth so far."""
    begun = time.monotonic()
    explorer = Explorer(scope)
    first = explorer.first()
    parents: dict[World, World | None] = {first: None}
    frontier, depth, transitions = [first], 0, 0
    endings: set[tuple[str, ...]] = set()
    world, violation = first, None
    try:
        while frontier:
            found = []
            for world in frontier:
                explorer.check(world)
                for after, _ in explorer.successors(world):
                    transitions += 1
                    if after not in parents:
                        parents[after] = world
                        found.append(after)
            frontier = found
            depth += bool(found)
            if progress is not None:
                progress(len(parents), transitions, depth)
    except Violation as error:
        violation = Broken(str(error), depth, [])
    m = explorer.model
    print(
        "parts",
        len(m.producers.records),
        len(m.schedulers.records),
        len(m.workers.records),
        len(m.consumers),
        len(m.producers._steps),
        len(m.schedulers._steps),
        len(m.workers._steps),
        len(m._moves),
    )
    return Report(scope, len(parents), transitions, depth, violation, frozenset(endings), time.monotonic() - begun)


if __name__ == "__main__":
    scope = Scope("x", ("a",), 2, budget(**{k: int(v) for k, v in (arg.split("=") for arg in sys.argv[1:])}))
    import logging

    logging.disable(logging.CRITICAL)
    ex = {}
    print(explore(scope, lambda *a: print(*a, flush=True)))
