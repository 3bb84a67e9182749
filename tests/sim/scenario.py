"""From a seed to a world: how large the fleet is, which settings it has, and what kinds of faults befall it."""

from __future__ import annotations

import enum
import random
from dataclasses import dataclass

from kvlease.config import Settings
from tests.sim.engine import Role
from tests.sim.network import Weather

FAULTS_S = 4.0
"""Faults and new requests come in this time; then the weather clears, and everything has to end."""


class Fault(enum.Enum):
    """A kind of thing that goes wrong."""

    NETWORK = "network"
    CUTS = "cuts"
    JUNK = "junk"
    ROUTER = "router"
    PAUSES = "pauses"
    CLOCKS = "clocks"
    CRASHES = "crashes"
    RESETS = "resets"
    READS = "reads"
    ABORTS = "aborts"
    IDS = "ids"
    PRESSURE = "pressure"


CALM = "calm"
ONE_BAD_PEER = "one bad peer"
ROUGH = "rough"


@dataclass(frozen=True)
class Scenario:
    """``kind``: in CALM nothing goes wrong; with ONE_BAD_PEER one producer freezes, dies or is cut off; else ROUGH."""

    kind: str
    faults: frozenset[Fault]
    settings: Settings
    producers: tuple[Role, ...]
    consumers: tuple[Role, ...]
    handoffs: int
    drift: float

    def __str__(self) -> str:
        fleet = f"{len(self.producers)} producers, {len(self.consumers)} consumers, {self.producers[0].ranks} ranks"
        what = ", ".join(sorted(fault.value for fault in self.faults)) or "nothing"
        return f"{self.kind} ({what}): {fleet}, {self.handoffs} handoffs"

    def has(self, fault: Fault) -> bool:
        return fault in self.faults


def draw_scenario(rng: random.Random) -> Scenario:
    """The world of one seed."""
    kind = rng.choices([CALM, ONE_BAD_PEER, ROUGH], [1, 1, 8])[0]
    faults: frozenset[Fault] = frozenset()
    if kind == ROUGH:
        likely = rng.choice([0.15, 0.3, 0.6])
        faults = frozenset(fault for fault in Fault if rng.random() < likely)
    ranks = rng.choice([1, 1, 1, 2, 2, 4])
    is_tight = Fault.PRESSURE in faults
    num_blocks = rng.randrange(8, 14) if is_tight else 48
    both = kind == ROUGH and rng.random() < 0.15
    recompute = rng.random() < 0.5

    def role(grants: bool, loads: bool) -> Role:
        return Role(grants, loads, ranks, num_blocks, recompute)

    producers = rng.choice([1, 1, 2]) if kind != ONE_BAD_PEER else 2
    consumers = rng.choice([1, 1, 2])
    return Scenario(
        kind=kind,
        faults=faults,
        settings=_settings(rng, kind),
        producers=tuple(role(True, both) for _ in range(producers)),
        consumers=tuple(role(both, True) for _ in range(consumers)),
        handoffs=rng.randrange(2, 7 if ranks < 4 else 4),
        drift=0.08 if Fault.CLOCKS in faults else 0.0,
    )


def _settings(rng: random.Random, kind: str) -> Settings:
    """Everything shorter than in life, in about the same proportions, so that a run of seconds sees it all."""
    return Settings(
        lease_duration_s=rng.choice([1.0, 2.0]) if kind == ROUGH else 2.0,
        lease_extension_s=0.9,
        heartbeat_interval_s=0.3,
        max_lease_lifetime_s=rng.choice([2.0, 5.0]) if kind == ROUGH else 5.0,
        sibling_grace_s=rng.choice([0.0, 0.1]) if kind == ROUGH else 0.1,
        acquire_timeout_s=0.6,
        commit_timeout_s=0.6,
        peer_timeout_s=0.5,
        load_timeout_s=2.5,
        load_timeout_s_per_gib=0.0,
        tombstone_ttl_s=rng.choice([0.5, 4.0]),
        tombstone_max=rng.choice([1, 3, 100]),
        chunk_descriptors=rng.choice([1, 2, 4]),
    )


def draw_weather(rng: random.Random, scenario: Scenario) -> Weather:
    """The network of that world."""
    weather = Weather(delay_s=rng.choice([0.001, 0.005, 0.03]))
    if scenario.has(Fault.NETWORK):
        weather.loss = rng.choice([0.0, 0.05, 0.2])
        weather.duplicates = rng.choice([0.0, 0.1, 0.3])
        weather.late = rng.choice([0.0, 0.05, 0.2])
        weather.late_s = rng.choice([0.5, 3.0])
        weather.reorders = rng.random() < 0.5
        weather.full_pipes = rng.choice([0.0, 0.05])
    if scenario.has(Fault.JUNK):
        weather.junk = 0.2
    return weather
