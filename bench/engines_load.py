"""What is asked of a pair of engines, and how long it takes them, seen from a client."""

import contextlib
import itertools
import json
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
import psutil

from bench.engines_pair import Pair
from devtools.engines import SERVED_NAME, Engine, completion_body
from devtools.idle import cpu_shares
from devtools.processes import ChildError

_STREAM_TOKENS = 7000
"""More than any stream here lives to see."""
_EVENT = "data: {"


@dataclass(frozen=True)
class Handover:
    """One request that was prefilled on the producer and taken over by the consumer. `error` is empty if it worked."""

    handover_s: float
    """From sending the request to the consumer until its one token is back."""
    prefill_s: float
    """The same for the producer, which has all but the last token in its prefix cache: a request without any pull."""
    same_token: bool
    error: str = ""


@dataclass(frozen=True)
class Joined:
    """One request that joined a running stream on its engine. Times are from the stream's start."""

    sent_at_s: float
    took_s: float
    error: str = ""


def idle_cpu(pair: Pair, over_s: float) -> dict[str, float]:
    """Shares of a core that the pair's processes use, by `producer/VLLM::Worker[pid]`."""
    roles = {"producer": pair.producer.process.tree(), "consumer": pair.consumer.process.tree()}
    names = {process.pid: role for role, tree in roles.items() for process in tree}
    shares = cpu_shares([process for tree in roles.values() for process in tree], over_s)
    return {f"{names[_pid(key)]}/{key}": share for key, share in shares.items()}


def _pid(key: str) -> int:
    return int(key.rpartition("[")[2].removesuffix("]"))


def hand_over(pair: Pair, prompt: list[int]) -> Handover:
    """One prefill, and one token from the consumer."""
    first = pair.producer.prefill(prompt)
    try:
        answer = pair.consumer.complete(prompt, 1, kv_transfer_params=first.kv_transfer_params)
    except (ChildError, httpx.HTTPError) as error:
        return Handover(float("nan"), first.elapsed_s, False, f"{type(error).__name__}: {error}"[:300])
    return Handover(answer.elapsed_s, first.elapsed_s, answer.token_ids == first.token_ids)


class Stream:
    """A streamed completion whose tokens are timed as they arrive."""

    def __init__(self, engine: Engine, prompt: list[int]) -> None:
        self.engine = engine
        self._prompt = prompt
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stream", daemon=True)
        self._error: Exception | None = None
        self.started_at = 0.0
        self.token_times_s: list[float] = []
        """When each event with tokens arrived, from `started_at`."""

    @contextlib.contextmanager
    def running(self, first_tokens: int = 10) -> Iterator["Stream"]:
        """Inside, at least `first_tokens` have arrived; on the way out the client hangs up, which ends the request."""
        self._thread.start()
        try:
            self.wait_for(first_tokens)
            yield self
        finally:
            self._over.set()
            self._thread.join()
        if self._error is not None:
            raise self._error

    def wait_for(self, num_tokens: int) -> None:
        """Returns when that many tokens have arrived, or the stream has ended."""
        while len(self.token_times_s) < num_tokens and self._thread.is_alive():
            time.sleep(0.01)

    def now_s(self) -> float:
        """Seconds since the stream's start."""
        return time.monotonic() - self.started_at

    def gaps_s(self, begin_s: float, end_s: float) -> list[float]:
        """The times between neighbouring tokens that have a part between `begin_s` and `end_s`."""
        neighbours = itertools.pairwise(self.token_times_s)
        return [later - earlier for earlier, later in neighbours if later > begin_s and earlier < end_s]

    def _run(self) -> None:
        body = completion_body(self._prompt, _STREAM_TOKENS, stream=True, ignore_eos=True)
        self.started_at = time.monotonic()
        try:
            with self.engine.http.stream("POST", "/v1/completions", json={"model": SERVED_NAME, **body}) as response:
                response.raise_for_status()
                for line in response.iter_lines():
                    if line.startswith(_EVENT) and _has_tokens(line):
                        self.token_times_s.append(time.monotonic() - self.started_at)
                    if self._over.is_set():
                        return
        except httpx.HTTPError as error:
            self._error = error
        if not self._over.is_set():
            self._error = self._error or ChildError(f"{self.engine.name}: the stream ended by itself")


def _has_tokens(line: str) -> bool:
    event: dict[str, Any] = json.loads(line.removeprefix("data: "))
    return any(choice.get("token_ids") or choice.get("text") for choice in event.get("choices", ()))


def handoffs_of(pair: Pair, prompt: list[int], count: int) -> list[dict[str, Any]]:
    """That many leases on one prompt, granted one after the other."""
    handoffs = [pair.producer.prefill(prompt).kv_transfer_params for _ in range(count)]
    return [handoff for handoff in handoffs if handoff]


def requests_during(
    stream: Stream, prompt: list[int], handoffs: Sequence[dict[str, Any] | None], every_s: float
) -> list[Joined]:
    """Sends the stream's engine a request for each handoff, one every `every_s`, answered or not; when all are.

    None is a request without a handoff.
    """

    def send(handoff: dict[str, Any] | None) -> Joined:
        sent_at_s = stream.now_s()
        try:
            stream.engine.complete(prompt, 1, kv_transfer_params=handoff)
        except (ChildError, httpx.HTTPError) as error:
            return Joined(sent_at_s, float("nan"), f"{type(error).__name__}: {error}"[:300])
        return Joined(sent_at_s, stream.now_s() - sent_at_s)

    begin = time.monotonic()
    with ThreadPoolExecutor(len(handoffs)) as pool:
        futures = []
        for index, handoff in enumerate(handoffs):
            time.sleep(max(0.0, begin + index * every_s - time.monotonic()))
            futures.append(pool.submit(send, handoff))
        return [future.result() for future in futures]


def worker_share(shares: dict[str, float]) -> float:
    """The busiest worker's share of a core, of what `idle_cpu` returned."""
    workers = [share for key, share in shares.items() if "Worker" in key]
    return max(workers or shares.values())


def free_memory_gib() -> float:
    """What the machine could still give to new processes."""
    return float(psutil.virtual_memory().available) / (1 << 30)
