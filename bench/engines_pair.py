"""The contenders of the engine benchmark, and their pairs of real engines: all alive at once, one awake at a time.

Three pairs do not fit on two cores, and one after the other they would meet three different machines. So each pair is
started, used, and then stopped by signal (SIGSTOP to all its processes) while another one is measured: it keeps its
memory and its connections and uses no CPU. A pair sleeps only when it holds no lease and no load, and wakes as a whole,
so that neither side ever sees the other one dead.
"""

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.measure import Show
from devtools.engines import Engine, EngineSpec, core_shares, wait_all_ready
from devtools.locks import engine_lock
from devtools.metrics import BYTES_PULLED, LOADS, Metrics
from devtools.model import ensure_model
from devtools.processes import free_port

ROOT = Path(__file__).resolve().parent.parent
LEASE_S = 30
"""How long a handoff waits to be claimed; the default of both connectors, written down so that it stays equal."""

_START_TIMEOUT_S = 600.0
_IDLE_TIMEOUT_S = 2.0 * LEASE_S


@dataclass(frozen=True)
class Contender:
    """One connector. The first is ours, the others are what it is held against."""

    key: str
    """In tables and plots."""
    slug: str
    """In names of processes and log files."""
    title: str
    transfer: Mapping[str, Any]
    """`--kv-transfer-config` without the role."""
    is_ours: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)


_NIXL = {"kv_connector": "NixlConnector"}
_NIXL_EXTRA = {"kv_lease_duration": LEASE_S}

CONTENDERS = (
    Contender(
        key="A",
        slug="kvlease",
        title="kvlease",
        transfer={"kv_connector": "KVLeaseConnector"},
        is_ours=True,
        extra={"host": "127.0.0.1", "port": 0, "lease_duration_s": LEASE_S},
    ),
    Contender(key="B", slug="nixl", title="NixlConnector", transfer=_NIXL, extra=_NIXL_EXTRA),
    Contender(
        key="B'",
        slug="nixl-quiet",
        title="NixlConnector, no progress thread",
        transfer={**_NIXL, "kv_connector_module_path": "devtools.quiet_nixl"},
        extra=_NIXL_EXTRA,
    ),
)


@dataclass(frozen=True)
class Counted:
    """What a pair has counted since it started. `causes` are kvlease's, `expired` the in-tree connector's."""

    pulls: float
    failed: float
    bytes_pulled: float
    pull_s: float
    causes: Mapping[str, float]
    expired: float

    def since(self, before: "Counted") -> "Counted":
        """What was counted between the two."""
        return Counted(
            pulls=self.pulls - before.pulls,
            failed=self.failed - before.failed,
            bytes_pulled=self.bytes_pulled - before.bytes_pulled,
            pull_s=self.pull_s - before.pull_s,
            causes={
                key: n - before.causes.get(key, 0) for key, n in self.causes.items() if n != before.causes.get(key)
            },
            expired=self.expired - before.expired,
        )


class Pair:
    """A producer and a consumer with one connector."""

    def __init__(self, contender: Contender, producer: Engine, consumer: Engine) -> None:
        self.contender = contender
        self.producer = producer
        self.consumer = consumer
        self.start_s = 0.0

    @property
    def engines(self) -> list[Engine]:
        """Both, the producer first."""
        return [self.producer, self.consumer]

    def wait_ready(self, show: Show) -> None:
        """Returns when both answer; `start_s` is then how long the slower one took."""
        wait_all_ready(self.engines, _START_TIMEOUT_S, show)
        self.start_s = time.monotonic() - self.producer.started_at

    @contextlib.contextmanager
    def awake(self) -> Iterator[None]:
        """Thawed inside. On the way out it first lets go of all leases; after a failure it stays awake."""
        for engine in self.engines:
            engine.thaw()
        yield
        self.wait_idle()
        for engine in self.engines:
            engine.freeze()

    def wait_idle(self) -> float:
        """Waits until no KV block is held on either side; the seconds it took (it gives up after two leases)."""
        started = time.monotonic()
        while any(engine.kv_usage() > 0 for engine in self.engines):
            if time.monotonic() - started > _IDLE_TIMEOUT_S:
                break
            time.sleep(0.1)
        return time.monotonic() - started

    def counted(self) -> Counted:
        """Its counters now. A short request of its own comes first: engines publish numbers with their steps."""
        for engine in self.engines:
            engine.complete([1, 2, 3, 4], 2)
        time.sleep(0.2)
        return _counted(self.contender, self.producer.metrics(), self.consumer.metrics())


@contextlib.contextmanager
def pairs_of(contenders: Sequence[Contender], log_dir: Path, show: Show) -> Iterator[list[Pair]]:
    """A pair for each contender, started one after the other and asleep; all ended on the way out."""
    ensure_model()

    def waiting(waited_s: float) -> None:
        show("engines", 0.0, f"waiting for other engines on this machine to end ({waited_s // 30 * 30:.0f} s)")

    with engine_lock(waiting), contextlib.ExitStack() as stack:
        pairs = []
        for contender in contenders:
            engines = []
            for spec, cores in zip(_specs(contender), core_shares(2), strict=True):
                engines.append(Engine(spec, log_dir=log_dir, cores=cores))
                stack.callback(engines[-1].stop)
            pair = Pair(contender, *engines)
            pair.wait_ready(show)
            with pair.awake():
                pass
            pairs.append(pair)
        yield pairs


def _specs(contender: Contender) -> list[EngineSpec]:
    """Failed loads are errors here, never silently recomputed. Only the producer may know a prompt beforehand."""
    specs = []
    for name, role, flags in (
        ("producer", "kv_producer", ()),
        ("consumer", "kv_consumer", ("--no-enable-prefix-caching",)),
    ):
        transfer = {
            **contender.transfer,
            "kv_role": role,
            "kv_load_failure_policy": "fail",
            "kv_connector_extra_config": dict(contender.extra),
        }
        specs.append(EngineSpec(f"{name}-{contender.slug}", kv_transfer=transfer, flags=flags, env=_env()))
    return specs


def _env() -> dict[str, str]:
    """What all engines get: a port for the in-tree connector's handshakes."""
    return {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
    }


def _counted(contender: Contender, producer: Metrics, consumer: Metrics) -> Counted:
    if contender.is_ours:
        causes = consumer.by_label(LOADS, "cause")
        return Counted(
            pulls=consumer.total(LOADS, outcome="done"),
            failed=consumer.total(LOADS) - consumer.total(LOADS, outcome="done"),
            bytes_pulled=consumer.total(BYTES_PULLED),
            pull_s=consumer.total("vllm:kvlease_pull_seconds_total"),
            causes={cause: n for cause, n in causes.items() if cause},
            expired=producer.total("vllm:kvlease_lease_ends_total", why="expired"),
        )
    return Counted(
        pulls=consumer.total("vllm:nixl_xfer_time_seconds_count"),
        failed=consumer.total("vllm:nixl_num_failed_transfers_total"),
        bytes_pulled=consumer.total("vllm:nixl_bytes_transferred_sum"),
        pull_s=consumer.total("vllm:nixl_xfer_time_seconds_sum"),
        causes={},
        expired=producer.total("vllm:nixl_num_kv_expired_reqs_total"),
    )
