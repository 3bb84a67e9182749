"""One state of the exhaustive checker's world, and those that can follow it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from tests.sim.exhaustive_machine import Violation
from tests.sim.exhaustive_model import CRASH, DEAD, EXPIRY, FAULTS, LOSS, NUDGE, Model, Move


@dataclass(frozen=True)
class Scope:
    """What is explored: the requests of each consumer, how many consumers, how often each of the ``FAULTS`` may happen
    in one story, and how many of them ``together``.
    """

    loads: tuple[str, ...]
    consumers: int
    rations: tuple[int, ...]
    together: int


class World(NamedTuple):
    """The numbers of a producer and of two consumers (-1: there is none), and the faults left as one number."""

    producer: int
    first: int
    second: int
    left: int


class Step(NamedTuple):
    """What the last step was, and which names were exchanged after it: consumers', and ranks' of either consumer."""

    label: tuple[Any, ...] = ()
    swap: bool = False
    swaps: tuple[bool, bool] = (False, False)


class Explorer:
    """The world's laws. ``step`` says what led to the world that :meth:`successors` gave last."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.model = Model(scope.loads)
        self.step = Step()
        self.at: World | None = None
        self.which = 0
        self._price = [1]
        for most in scope.rations:
            self._price.append(self._price[-1] * (most + 1))
        self._full = self._price[-1] - 1
        self._masks = [self._mask(left) for left in range(self._full + 1)]

    def _mask(self, left: int) -> int:
        """A bit for each fault that may still happen."""
        counts = [left // price % (most + 1) for price, most in zip(self._price, self.scope.rations, strict=False)]
        if sum(self.scope.rations) - sum(counts) >= self.scope.together:
            return 0
        return sum(1 << fault for fault in range(len(FAULTS)) if counts[fault])

    def first(self) -> World:
        """The lease is granted, and the first request has arrived at each consumer."""
        consumer = self.model.first_consumer()
        second = consumer if self.scope.consumers == 2 else -1
        return World(self.model.first_producer(0), consumer, second, self._full)

    # What follows

    def successors(self, world: World) -> Iterator[World]:
        """Every world that can follow."""
        model, mask = self.model, self._masks[world.left]
        facts = model.producers.records[world.producer].facts
        moves: list[tuple[int, list[Move]]] = []
        for which in range(self.scope.consumers):
            self.which = which
            moves.append((which, model.moves(world[1 + which], facts.live, facts.life == 1, mask)))
        for which, some in moves:
            if some and some[0].is_hasty:
                yield self._moved(world, which, some[0])
                return
        for which, some in moves:
            for move in some:
                yield self._moved(world, which, move)
            yield from self._handle(world, which, mask)
        yield from self._produce(world, mask)

    def _moved(self, world: World, which: int, move: Move) -> World:
        left = world.left if move.cost is None else world.left - self._price[move.cost]
        label = (which, *move.label)
        if which == 0:
            return self._named(world.producer, (move.consumer, world.second), (move.swapped, False), left, label)
        return self._named(world.producer, (world.first, move.consumer), (False, move.swapped), left, label)

    def _handle(self, world: World, which: int, mask: int) -> Iterator[World]:
        """The producer handles a request, and its reply is on its way or is lost."""
        model = self.model
        consumer, self.which = world[1 + which], which
        for rank, message in model.requests(consumer):
            then, reply = model.ask(world.producer, message, which, rank)
            label = (which, "handle", rank, model.messages.values[message], model.messages.values[reply])
            answered, swapped = model.answered(consumer, rank, message, reply)
            yield self._produced(world, then, label, which, answered, swapped)
            unanswered, swapped = model.answered(consumer, rank, message, None)
            if mask >> LOSS & 1 and unanswered != answered:
                lost = (*label, "lost")
                yield self._produced(world, then, lost, which, unanswered, swapped, self._price[LOSS])

    def _produce(self, world: World, mask: int) -> Iterator[World]:
        """What happens to the producer without being asked."""
        model = self.model
        facts = model.producers.records[world.producer].facts
        for event, cost, may in (
            ("tick", None, facts.lingers),
            ("tick", EXPIRY, facts.deadline and not facts.lingers),
            ("revoke", EXPIRY, facts.live),
            ("nudge", NUDGE, facts.may_nudge),
        ):
            if may and (cost is None or mask >> cost & 1):
                model.attempt = ("producer", event, cost)
                then, _ = model.producers.step(world.producer, event)
                yield self._produced(world, then, model.attempt, cost=0 if cost is None else self._price[cost])
        if mask >> CRASH & 1 and facts.life == 0:
            then = model.first_producer(1)
            yield self._produced(world, then, ("producer", "crash", CRASH), cost=self._price[CRASH])

    def _produced(
        self,
        world: World,
        producer: int,
        label: tuple[Any, ...],
        which: int = 0,
        consumer: int | None = None,
        swapped: bool = False,
        cost: int = 0,
    ) -> World:
        """The world after something happened to the producer, and perhaps to one consumer. When the lease has ended
        with it, its blocks hold something else from this moment on.
        """
        here, swaps = [world.first, world.second], [False, False]
        if consumer is not None:
            here[which], swaps[which] = consumer, swapped
        records = self.model.producers.records
        if records[world.producer].facts.live and not records[producer].facts.live:
            for at in range(self.scope.consumers):
                here[at], again = self.model.dirtied(here[at])
                swaps[at] = swaps[at] != again
        return self._named(producer, (here[0], here[1]), (swaps[0], swaps[1]), world.left - cost, label)

    def _named(
        self, producer: int, here: tuple[int, int], swaps: tuple[bool, bool], left: int, label: tuple[Any, ...]
    ) -> World:
        """The world in the one form that all its mirror images share."""
        first, second = here
        swap = second >= 0 and first > second
        self.step = Step(label, swap, swaps)
        producer = self.model.rename(producer, swap, swaps)
        return World(producer, second, first, left) if swap else World(producer, first, second, left)

    # What must hold

    def visit(self, world: World) -> None:
        """L1: whatever has happened, when nothing more is heard and time passes, everything ends."""
        model = self.model
        self.at = world
        try:
            texts = [model.lasting_lease(world.producer), *map(model.lasting, world[1 : 1 + self.scope.consumers])]
        except Violation as error:
            model.attempt = ("silence",)
            raise Violation(f"{error} (when nothing more is heard)") from error
        if any(texts):
            model.attempt = ("silence",)
            raise Violation(f"L1: in silence this never ends: {'; '.join(filter(None, texts))}")

    def ending(self, world: World) -> tuple[str, ...]:
        """Where the readers stand, in a world in which nothing more can happen.

        Without any fault somebody must have been served, and the others only if they came after the grace.
        """
        model = self.model
        where: list[str] = []
        for number in world[1 : 1 + self.scope.consumers]:
            part = model.consumers[number].scheduler.part
            where += ("crashed",) if part == DEAD else model.schedulers.records[part].facts.where
        model.attempt = ("silence",)
        if world.left == self._full and not ("done" in where and set(where) <= {"done", "local"}):
            raise Violation(f"L3: nothing went wrong, and the readers end as {where}")
        return tuple(sorted(where))

    def finish(self, endings: set[tuple[str, ...]]) -> None:
        """There is a way for everybody to be served."""
        if ("done",) * (self.scope.consumers * len(self.scope.loads)) not in endings:
            raise Violation(f"L3: never were all readers served: {sorted(endings)}")
