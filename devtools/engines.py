"""Real vLLM engines for the demo and the engine tests.

An `Engine` is a `python -m vllm.entrypoints.openai.api_server` with flags and environment that suit a small machine
without GPU. `engine_set` starts some of them together, holds the machine's engine lock meanwhile, and leaves nothing
behind:

    with engine_set([EngineSpec("producer", kv_transfer=...), EngineSpec("consumer", kv_transfer=...)], logs) as (p, c):
        answer = p.complete("The capital of France is", max_tokens=8)
"""

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from devtools.locks import engine_lock
from devtools.metrics import KV_USAGE, Metrics
from devtools.model import ensure_model
from devtools.processes import Child, ChildError, free_port

SERVED_NAME = "kvlease-model"
READY_TIMEOUT_S = 600.0
REQUEST_TIMEOUT_S = 300.0

Progress = Callable[[str, float, str], None]
"""Called while engines start: (engine's name, share done from 0 to 1, what it is doing)."""

_STAGES = (
    ("", "importing vLLM"),
    ("Resolved architecture", "starting the engine core"),
    ("Initializing a V1 LLM engine", "starting the worker"),
    ("Starting to load model", "loading the model"),
    ("init engine", "starting the server"),
    ("Application startup complete", "ready"),
)
"""A line of vLLM's log, and what the engine does after it."""

_CHECKOUT = Path(__file__).resolve().parent.parent
"""First on every engine's path, so that it runs this code, and finds :mod:`devtools.quiet_nixl`."""

ENGINE_SITE = _CHECKOUT / "devtools" / "engine_site"
"""On the path, too: its `sitecustomize` keeps waiting engines from spinning."""

_DTYPE = "float32"
"""In bfloat16 an engine does not always agree with itself across batch shapes, and where the CPU has no instructions
for it a prefill takes seven times as long.
"""

_ENV = {
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "UCX_NET_DEVICES": "lo",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOGGING_COLOR": "0",
    "VLLM_NO_USAGE_STATS": "1",
}


@dataclass(frozen=True)
class EngineSpec:
    """What to start. `flags` and `env` are added to (and win over) the ones that every engine here gets."""

    name: str
    kv_transfer: Mapping[str, Any] | None = None
    flags: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    model: Path | None = None
    """A model folder; by default the one of `devtools.model`."""
    cores: str | None = None
    """`VLLM_CPU_OMP_THREADS_BIND`; by default `engine_set` shares the cores out evenly."""


@dataclass(frozen=True)
class Completion:
    """One choice of a completion. `raw` is the whole JSON answer."""

    text: str
    token_ids: list[int]
    prompt_tokens: int
    finish_reason: str
    kv_transfer_params: dict[str, Any] | None
    elapsed_s: float
    raw: dict[str, Any]


class Engine:
    """One running engine; started by its constructor, on a free port of 127.0.0.1."""

    def __init__(self, spec: EngineSpec, *, log_dir: Path, cores: str) -> None:
        self.spec = spec
        self.name = spec.name
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.started_at = time.monotonic()
        self.process = Child(
            spec.name, self._command(), log_file=log_dir / f"{spec.name}-{self.port}.log", env=self._env(cores)
        )
        # No connection is kept: an idle one may be closed by the server just when the next request is sent on it.
        limits = httpx.Limits(max_keepalive_connections=0)
        self.http = httpx.Client(base_url=self.url, timeout=REQUEST_TIMEOUT_S, trust_env=False, limits=limits)

    def __repr__(self) -> str:
        return f"<Engine {self.name} {self.url} {self.process!r}>"

    def _command(self) -> list[str]:
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--served-model-name", SERVED_NAME]
        command += ["--model", str(self.spec.model or ensure_model()), "--enforce-eager"]
        if "--dtype" not in self.spec.flags:
            command += ["--dtype", _DTYPE]
        command += ["--max-model-len", "8192", "--disable-access-log-for-endpoints", "/health,/metrics"]
        if self.spec.kv_transfer is not None:
            command += ["--kv-transfer-config", json.dumps(dict(self.spec.kv_transfer))]
        return [*command, *self.spec.flags]

    def _env(self, cores: str) -> dict[str, str]:
        path = os.pathsep.join(filter(None, (str(_CHECKOUT), str(ENGINE_SITE), os.environ.get("PYTHONPATH"))))
        cpus = {"VLLM_CPU_OMP_THREADS_BIND": self.spec.cores or cores}
        return {**os.environ, **_ENV, "PYTHONPATH": path, **cpus, **self.spec.env}

    # -- life ---------------------------------------------------------------------------------------------------------

    def wait_ready(self, timeout_s: float = READY_TIMEOUT_S, progress: Progress | None = None) -> None:
        """Returns when the engine answers; raises ChildError with the end of its log when it died or is too slow."""
        wait_all_ready([self], timeout_s, progress)

    def try_ready(self, progress: Progress | None = None) -> bool:
        """Whether the engine answers by now; raises ChildError when it died."""
        if not self.process.alive:
            code = self.process.returncode
            raise ChildError(f"{self.name} ended with status {code} while starting:\n{self.process.log_tail()}")
        ready = self.healthy()
        if progress is not None:
            share, stage = (1.0, "ready") if ready else self._stage()
            progress(self.name, share, stage)
        return ready

    def healthy(self, timeout_s: float = 1.0) -> bool:
        """Whether `/health` answers 200 within `timeout_s`."""
        try:
            return self.http.get("/health", timeout=timeout_s).status_code == httpx.codes.OK
        except httpx.HTTPError:
            return False

    def _stage(self) -> tuple[float, str]:
        log = self.process.log_text()
        reached = max(i for i, (line, _) in enumerate(_STAGES) if line in log)
        return reached / len(_STAGES), _STAGES[reached][1]

    def kill(self) -> None:
        """SIGKILLs the engine, its core and its workers; returns when they are gone."""
        self.process.kill()

    def stop(self, timeout_s: float = 10.0) -> None:
        """Ends the engine politely, or by force after `timeout_s`."""
        self.http.close()
        self.process.stop(timeout_s)

    def freeze(self) -> None:
        """SIGSTOPs the engine, its core and its workers."""
        self.process.freeze()

    def thaw(self) -> None:
        """Undoes `freeze`."""
        self.process.thaw()

    # -- requests -----------------------------------------------------------------------------------------------------

    def post(self, path: str, body: Mapping[str, Any], timeout_s: float = REQUEST_TIMEOUT_S) -> httpx.Response:
        """One request with the model's name filled in; whatever the status, the response."""
        return self.http.post(path, json={"model": SERVED_NAME, **body}, timeout=timeout_s)

    def complete(self, prompt: str | list[int], max_tokens: int = 16, **body: Any) -> Completion:
        """A greedy completion that must succeed; `body` adds fields (`kv_transfer_params`, `n`, …)."""
        started = time.monotonic()
        response = self.post("/v1/completions", completion_body(prompt, max_tokens, **body))
        if response.is_error:
            raise ChildError(f"{self.name} answered {response.status_code}: {response.text}")
        return completion_of(response.json(), time.monotonic() - started)

    def prefill(self, prompt: str | list[int], **body: Any) -> Completion:
        """What a proxy sends to a producer: one token, and a handoff in `kv_transfer_params` of the answer."""
        return self.complete(prompt, 1, kv_transfer_params={"do_remote_decode": True}, **body)

    # -- looking inside -----------------------------------------------------------------------------------------------

    def metrics(self) -> Metrics:
        """The engine's metrics now."""
        return Metrics.parse(self.http.get("/metrics").raise_for_status().text)

    def kv_usage(self) -> float:
        """The used share of the KV blocks, 0 to 1."""
        return self.metrics().total(KV_USAGE)

    def log_text(self, offset: int = 0) -> str:
        """The engine's log from byte `offset` on."""
        return self.process.log_text(offset)


def completion_body(prompt: str | list[int], max_tokens: int, **body: Any) -> dict[str, Any]:
    """The JSON of a greedy completion that also returns token ids."""
    return {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "return_token_ids": True, **body}


def completion_of(raw: dict[str, Any], elapsed_s: float) -> Completion:
    """The first choice of a completions answer."""
    choice = raw["choices"][0]
    return Completion(
        text=choice["text"],
        token_ids=list(choice.get("token_ids") or []),
        prompt_tokens=raw["usage"]["prompt_tokens"],
        finish_reason=choice["finish_reason"],
        kv_transfer_params=raw.get("kv_transfer_params"),
        elapsed_s=elapsed_s,
        raw=raw,
    )


def core_shares(num_engines: int, max_each: int = 4) -> list[str]:
    """Disjoint core lists (`"0"`, `"4,5,6,7"`) for `num_engines` engines; with too few cores, engines share."""
    cores = sorted(os.sched_getaffinity(0))
    each = min(max_each, max(1, len(cores) // num_engines))
    starts = (i * each % len(cores) for i in range(num_engines))
    return [",".join(str(core) for core in cores[start : start + each]) for start in starts]


@contextlib.contextmanager
def engine_set(
    specs: Sequence[EngineSpec],
    log_dir: Path,
    *,
    progress: Progress | None = None,
    waiting: Callable[[float], None] | None = None,
    timeout_s: float = READY_TIMEOUT_S,
) -> Iterator[list[Engine]]:
    """Engines that start side by side, all ready; ended on the way out, whatever happened.

    Only one set runs on a machine at a time: `waiting` is called with the seconds waited while another one does.
    """
    ensure_model()
    with engine_lock(waiting), contextlib.ExitStack() as stack:
        engines = []
        for spec, cores in zip(specs, core_shares(len(specs)), strict=True):
            engine = Engine(spec, log_dir=log_dir, cores=cores)
            stack.callback(engine.stop)
            engines.append(engine)
        wait_all_ready(engines, timeout_s, progress)
        yield engines


def wait_all_ready(engines: Sequence[Engine], timeout_s: float, progress: Progress | None = None) -> None:
    """Returns when all engines answer; raises ChildError, with the end of a log, when one died or is too slow."""
    starting = list(engines)
    while starting:
        starting = [engine for engine in starting if not engine.try_ready(progress)]
        for engine in starting:
            if time.monotonic() - engine.started_at > timeout_s:
                tail = engine.process.log_tail()
                raise ChildError(f"{engine.name} is not ready after {timeout_s:.0f} s:\n{tail}")
        time.sleep(0.3)
