"""The engines that rows need: one producer on a fixed address, and a consumer for each policy."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from devtools.engines import Engine, EngineSpec, Progress, core_shares, engine_set
from devtools.model import ensure_model
from devtools.processes import free_port
from devtools.prompts import PromptMaker
from tests.engines.support import NO_PREFIX_CACHE, spec
from tests.faults.adapters import ADAPTERS, ensure_adapters

KVLEASE, NIXL = "KVLeaseConnector", "NixlConnector"
LOG_ROOT = Path(__file__).parents[2] / ".cache" / "faults"

LEASE_S, CLAIM_S, BEAT_S, LIFETIME_S = 10.0, 8.0, 1.0, 40.0
LEASES = {
    "lease_duration_s": LEASE_S,
    "lease_extension_s": CLAIM_S,
    "heartbeat_interval_s": BEAT_S,
    "max_lease_lifetime_s": LIFETIME_S,
    # Longer than by default: a starved machine must not look like a dead peer. Rows wait for events, not for these.
    "acquire_timeout_s": 10.0,
    "commit_timeout_s": 20.0,
    "peer_timeout_s": 8.0,
    "chunk_bytes": 4 << 20,
}
NIXL_LEASES = {"kv_lease_duration": int(LEASE_S)}
"""The in-tree connector's only knob for leases; heartbeats come every sixth of it and extend by two thirds."""
DEV_MODE = {"VLLM_SERVER_DEV_MODE": "1"}
PLACES = 2
"""Requests that a consumer of the main fleet runs at a time, so that it can be full."""


SMALL_BLOCK, SMALL_BLOCKS = 32, 23
"""Tokens in a block and usable blocks of an engine of the small fleet."""
_FEW_BLOCKS = (
    "--block-size", str(SMALL_BLOCK), "--num-gpu-blocks-override", str(SMALL_BLOCKS + 1), "--max-model-len", "512",
)  # fmt: skip


@dataclass(frozen=True)
class FleetPlan:
    """Start-up flags of one fleet."""

    producer: Sequence[str] = ()
    consumer: Sequence[str] = ()
    loras: bool = False
    knobs: Mapping[str, float] = field(default_factory=dict)
    """Settings of ours that differ from ``LEASES``."""


PLANS = {
    "main": FleetPlan(consumer=(NO_PREFIX_CACHE, "--max-num-seqs", str(PLACES))),
    # About four of the rows' requests fit at a time. Adapters cost the rows here nothing.
    # No peer dies here, and a consumer that was frozen for longer than its lease must still try to read.
    "small": FleetPlan(
        producer=_FEW_BLOCKS,
        consumer=(*_FEW_BLOCKS, NO_PREFIX_CACHE),
        loras=True,
        knobs={"acquire_timeout_s": 60.0, "commit_timeout_s": 60.0, "peer_timeout_s": 60.0},
    ),
}


def lora_flags() -> list[str]:
    """Start-up flags for the adapters, which are made when they are missing."""
    folders = ensure_adapters(ensure_model())
    return ["--enable-lora", "--max-lora-rank", "8", "--max-loras", "2", "--lora-modules"] + [
        f"{name}={folders[name]}" for name in ADAPTERS
    ]


def nixl_spec(name: str, role: str, flags: Sequence[str], policy: str) -> EngineSpec:
    """One engine with the connector that ships in vLLM; settings equal ours where there are any.

    NIXL's progress thread and the pinning to its core are off: each engine would keep a core busy with them.
    """
    transfer = {
        "kv_connector": NIXL,
        "kv_connector_module_path": "devtools.quiet_nixl",
        "kv_role": role,
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": dict(NIXL_LEASES),
    }
    env = {"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())}
    return EngineSpec(name, kv_transfer=transfer, flags=tuple(flags), env=env)


def make_spec(
    connector: str, name: str, role: str, flags: Sequence[str], knobs: Mapping[str, float], policy: str = "recompute"
) -> EngineSpec:
    """One engine of a fleet."""
    made = (
        spec(name, role, flags, policy=policy, port=free_port(), **{**LEASES, **knobs})
        if connector == KVLEASE
        else nixl_spec(name, role, flags, policy)
    )
    return replace(made, env={**made.env, **DEV_MODE})


@dataclass
class Fleet:
    """One producer, and a consumer for each policy that is run."""

    connector: str
    producer: Engine
    consumers: dict[str, Engine]
    prompts: PromptMaker
    log_dir: Path
    watch: Callable[[str], None] = field(default=lambda _: None)
    """Told what the fleet is doing when it takes long."""

    @property
    def engines(self) -> list[Engine]:
        """All of them."""
        return [self.producer, *self.consumers.values()]

    def restart_producer(self) -> None:
        """A new life of the producer, at the same address."""
        self.producer = self._again(self.producer)

    def restart_consumer(self, policy: str) -> None:
        """A new life of one consumer."""
        self.consumers[policy] = self._again(self.consumers[policy])

    def restart(self, engine: Engine) -> None:
        """A new life of one of them."""
        if engine is self.producer:
            self.restart_producer()
            return
        self.restart_consumer(next(policy for policy, one in self.consumers.items() if one is engine))

    def _again(self, engine: Engine) -> Engine:
        self.watch(f"restarting {engine.name}")
        engine.kill()
        engine.http.close()
        again = Engine(engine.spec, log_dir=self.log_dir, cores="")
        try:
            again.wait_ready()
        except BaseException:
            again.kill()
            raise
        return again


@contextmanager
def start_fleet(
    name: str, connector: str, policies: Sequence[str], progress: Progress, waiting: Callable[[float], None]
) -> Iterator[Fleet]:
    """The engines of one plan, a consumer for each of ``policies``, ended on the way out."""
    plan = PLANS[name]
    log_dir = LOG_ROOT / connector / name
    shutil.rmtree(log_dir, ignore_errors=True)
    loras: list[str] = lora_flags() if plan.loras else []
    # The producer keeps stepping while leases are out: it gets cores of its own. The consumers are busy one at a time.
    its_cores, their_cores = core_shares(2)
    producer = make_spec(connector, "producer", "kv_producer", [*plan.producer, *loras], plan.knobs)
    consumers = [
        make_spec(connector, policy, "kv_consumer", [*plan.consumer, *loras], plan.knobs, policy) for policy in policies
    ]
    specs = [replace(producer, cores=its_cores), *(replace(one, cores=their_cores) for one in consumers)]
    with engine_set(specs, log_dir, progress=progress, waiting=waiting) as engines:
        by_policy = dict(zip(policies, engines[1:], strict=True))
        fleet = Fleet(connector, engines[0], by_policy, PromptMaker(ensure_model()), log_dir)
        try:
            yield fleet
        finally:
            for engine in fleet.engines:
                engine.stop()


def settings_of(connector: str) -> dict[str, Any]:
    """What is written down of a run's settings."""
    return dict(LEASES) if connector == KVLEASE else {**NIXL_LEASES, "progress_thread": "off"}
