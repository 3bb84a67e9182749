"""How long a commit takes while the engines are busy: a Python thread beside the endpoint holds the interpreter lock.

vLLM's scheduler thread holds it in bursts (schedule, update from output) and lets it go while the model runs. ``busy``
and ``pause`` are such a burst and what follows; the endpoint, and on the other side the consumer's transfer thread,
must get their answers out in between.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any, Final

from bench.control_echo import IDLE, Load, echo, interpreter_held
from bench.control_wire import Asker, grant, producer, timing
from bench.output import Table
from bench.timing import p99_of, spread
from kvlease.core.messages import Committed, Granted
from kvlease.net.endpoint import Endpoint

P50_BOUND_MS: Final = 0.5
P99_BOUND_MS: Final = 5.0

LOADS: Final = (
    IDLE,
    Load("1 ms of every 10 ms", 0.001, 0.009),
    Load("3 ms of every 10 ms", 0.003, 0.007),
    Load("8 ms of every 10 ms", 0.008, 0.002),
    Load("always", 0.01, 0.0),
)

JUDGED: Final = LOADS[2]
"""What an engine with hundreds of running requests comes to; the bounds are for it."""

_COMMIT: Final = bytes(180)
"""About as long as a commit on the wire."""


def measure_commits(rounds: int) -> Table:
    """The commit's round trip for each load of the producer's engine, then of the consumer's; and a bare echo's."""
    table = Table(
        "commit round trip, ms; an engine thread that holds the interpreter lock",
        ("busy side", "engine thread", "ms", "p99 ms"),
        f"producer busy for {JUDGED.name}: median < {P50_BOUND_MS} ms, p99 < {P99_BOUND_MS:.0f} ms",
    )
    for load in LOADS:
        taken = _commits(load, IDLE, rounds)
        middle, p99 = spread(taken), p99_of(taken)
        table.add("producer", load.name, middle, p99)
        if load is JUDGED:
            table.is_met = middle.median < P50_BOUND_MS and p99 < P99_BOUND_MS
    for load in LOADS[1:]:
        taken = _commits(IDLE, load, rounds)
        table.add("consumer", load.name, spread(taken), p99_of(taken))
    for load in (IDLE, JUDGED):
        taken = _echoes(load, rounds)
        table.add("a bare ZeroMQ echo", load.name, spread(taken), p99_of(taken))
    return table


def _echoes(load: Load, rounds: int) -> list[float]:
    """The same for a bare echo whose process does ``load``."""
    with echo(load) as bare:
        bare.ask(_COMMIT)
        taken = []
        for index in range(rounds):
            taken.append(1000 * bare.ask(_COMMIT))
            _pause(index)
    return sorted(taken)


def _commits(theirs: Load, ours: Load, rounds: int) -> list[float]:
    """Milliseconds, sorted."""
    with producer(partial(_engine, theirs, rounds), timing(lease_extension_s=600.0)) as served:
        asker = Asker(served.key)
        served.pipe.recv()
        for index in range(rounds):
            reply, _ = asker.acquire(index)
            assert isinstance(reply, Granted), reply
        served.pipe.send("begin")
        taken = []
        with interpreter_held(ours):
            for index in range(rounds):
                reply, took_s = asker.commit(index)
                assert isinstance(reply, Committed), reply
                taken.append(1000 * took_s)
                _pause(index)
        asker.close()
    return sorted(taken)


def _pause(index: int) -> None:
    time.sleep(0.0013 * (1 + index % 7))  # so that the next comes at any point of the other side's step


def _engine(load: Load, rounds: int, endpoint: Endpoint, pipe: Any) -> None:
    for index in range(rounds):
        grant(endpoint, index)
    pipe.send("granted")
    pipe.recv()
    with interpreter_held(load):
        pipe.recv()
