"""The demo: one producer, one consumer and the proxy, eight handoffs, and two requests after the producer was killed.

    make demo

Every answer is compared with what the producer said to the same request all alone, before anything was handed over.
Ends with status 0 only when all outputs are identical and every request took the way it should; leaves no process.
"""

import contextlib
import json
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from devtools.display import Display
from devtools.engines import SERVED_NAME, Engine, EngineSpec, completion_body, completion_of, engine_set
from devtools.metrics import BYTES_PULLED, LOADS, PREFIX_HIT_TOKENS, TTFT_SUM_S, Metrics
from devtools.model import ensure_model
from devtools.processes import Child, ChildError, free_port
from devtools.prompts import PromptMaker

ROOT = Path(__file__).resolve().parent.parent
LOG_DIR = ROOT / ".cache" / "demo"
OUTPUT_TOKENS = 24
SETTLE_S = 5.0
"""How long we wait for an engine to publish what it has just done."""

PULLED, RECOMPUTED = "pulled", "recomputed"


class DemoError(RuntimeError):
    """Something that the demo needs did not work."""


@dataclass(frozen=True)
class Ask:
    """One request of the demo. `expected` is the way that it must take."""

    title: str
    expected: str
    prompt: list[int] | None = None
    """Token ids of a completion; None for the streamed chat."""


@dataclass(frozen=True)
class Answer:
    """What came back to the client."""

    text: str
    prompt_tokens: int
    route: str = ""
    """What the proxy said about it, if anything."""


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    ask: Ask
    prompt_tokens: int
    pulled_bytes: float
    handover_s: float
    outcome: str
    detail: str
    identical: bool

    @property
    def is_right(self) -> bool:
        """Whether the text is right and came the way it should."""
        return self.identical and self.outcome == self.ask.expected


class Fleet:
    """The two engines and the proxy in front of them."""

    def __init__(self, producer: Engine, consumer: Engine, proxy_url: str) -> None:
        self.producer = producer
        self.consumer = consumer
        self.proxy = httpx.Client(base_url=proxy_url, timeout=300.0, trust_env=False)

    def alone(self, ask: Ask) -> Answer:
        """The producer's own answer: prefill and decode in one engine, nothing handed over."""
        return _ask(self.producer.http, ask)

    def handed_over(self, ask: Ask) -> Answer:
        """The answer that comes through the proxy."""
        return _ask(self.proxy, ask)

    def handed_over_by_the_dying(self, ask: Ask) -> Answer:
        """Prefill, then SIGKILL to the producer, and only then the consumer's turn."""
        assert ask.prompt is not None
        handoff = self.producer.prefill(ask.prompt).kv_transfer_params
        if not handoff:
            raise DemoError("the producer gave no handoff")
        self.producer.kill()
        answer = self.consumer.complete(ask.prompt, OUTPUT_TOKENS, kv_transfer_params=handoff)
        return Answer(answer.text, answer.prompt_tokens)


def _ask(http: httpx.Client, ask: Ask) -> Answer:
    if ask.prompt is None:
        return _ask_chat(http)
    response = http.post("/v1/completions", json={"model": SERVED_NAME, **completion_body(ask.prompt, OUTPUT_TOKENS)})
    if response.is_error:
        raise DemoError(f"{ask.title}: answered {response.status_code}: {response.text}")
    completion = completion_of(response.json(), 0.0)
    return Answer(completion.text, completion.prompt_tokens, response.headers.get("x-kvlease-proxy", ""))


def _ask_chat(http: httpx.Client) -> Answer:
    body = {
        "model": SERVED_NAME,
        "messages": [{"role": "user", "content": "Name three rivers of Europe and say one sentence about each."}],
        "max_tokens": 2 * OUTPUT_TOKENS,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    text, prompt_tokens = "", 0
    with http.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.is_error:
            raise DemoError(f"streamed chat: answered {response.status_code}: {response.read().decode()}")
        for line in response.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event: dict[str, Any] = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise DemoError(f"streamed chat: {event['error']}")
            text += "".join(choice["delta"].get("content") or "" for choice in event["choices"])
            prompt_tokens = (event.get("usage") or {}).get("prompt_tokens", prompt_tokens)
        return Answer(text, prompt_tokens, response.headers.get("x-kvlease-proxy", ""))


def requests_of_the_demo(prompts: PromptMaker) -> list[Ask]:
    """Six completions, one chat, one repetition, and the two that meet a dead producer, in this order."""

    def completion(title: str, num_tokens: int, expected: str = PULLED) -> Ask:
        return Ask(title, expected, prompts.prompt_of(num_tokens, seed=num_tokens).token_ids)

    asks = [
        completion("completion, under a block", 48),
        completion("completion, exactly a block", 128),
        completion("completion, a few blocks", 300),
        completion("completion, more blocks", 700),
        completion("completion, many blocks", 1400),
        completion("completion, long", 2100),
        Ask("chat, streamed", PULLED),
    ]
    asks.append(Ask("repeated prompt", PULLED, asks[4].prompt))
    asks.append(completion("handoff, producer just killed", 500, RECOMPUTED))
    asks.append(completion("producer gone", 400, RECOMPUTED))
    return asks


def observed(fleet: Fleet, ask: Ask, send: Callable[[Ask], Answer], reference: str) -> Row:
    """Sends one request and reads from the consumer's counters what it did for it."""
    before = fleet.consumer.metrics()
    answer = send(ask)
    after = _settled(fleet.consumer, before, expect_load=not answer.route)

    def added(name: str, **labels: str) -> float:
        return after.total(name, **labels) - before.total(name, **labels)

    pulled_bytes = added(BYTES_PULLED)
    cached_tokens = added(PREFIX_HIT_TOKENS)
    loads = [labels for labels, _ in after.samples.get(LOADS, ()) if added(LOADS, **labels) > 0]
    causes = [labels["cause"] for labels in loads if labels["cause"]]
    notes = [*causes, answer.route.removeprefix("fallback=")]
    if cached_tokens:
        notes.append(f"{cached_tokens:.0f} tokens were cached")
    return Row(
        ask=ask,
        prompt_tokens=answer.prompt_tokens,
        pulled_bytes=pulled_bytes,
        handover_s=added(TTFT_SUM_S),
        outcome=PULLED if pulled_bytes and not causes else RECOMPUTED,
        detail=", ".join(filter(None, notes)),
        identical=answer.text == reference,
    )


def _settled(engine: Engine, before: Metrics, *, expect_load: bool) -> Metrics:
    """The metrics once the last request is in them: numbers leave an engine a step after the answer does."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        now = engine.metrics()
        counted = not expect_load or now.total(LOADS) > before.total(LOADS)
        timed = now.total(TTFT_SUM_S) > before.total(TTFT_SUM_S)
        if (counted and timed) or time.monotonic() > deadline:
            return now
        time.sleep(0.05)


def run(fleet: Fleet, asks: list[Ask], display: Display) -> list[Row]:
    """References first, then every request in its order."""
    references = []
    for i, ask in enumerate(asks):
        display.show("one engine", i / len(asks), f"reference {i + 1} of {len(asks)}: {ask.title}")
        references.append(fleet.alone(ask).text)
    display.show("one engine", 1.0, "all references known")
    rows = []
    for i, (ask, reference) in enumerate(zip(asks, references, strict=True)):
        display.show("handoffs", i / len(asks), f"request {i + 1} of {len(asks)}: {ask.title}")
        send = fleet.handed_over
        if ask.expected == RECOMPUTED and fleet.producer.process.alive:
            send = fleet.handed_over_by_the_dying
        rows.append(observed(fleet, ask, send, reference))
    display.show("handoffs", 1.0, "all answered")
    return rows


def table_of(rows: list[Row]) -> Table:
    """The rows for people."""
    caption = (
        "Handover: from the consumer's receipt of a request to its first token. One engine: what the producer answered "
        "to the same request all alone, before; so the handoffs found its prefix cache warm."
    )
    table = Table(title="kvlease demo", caption=caption)
    for name in ("request", "prompt tokens", "MB pulled", "handover ms", "outcome", "identical to one engine?"):
        table.add_column(name, justify="left" if name in ("request", "outcome") else "right", overflow="fold")
    for row in rows:
        outcome = f"{row.outcome} ({row.detail})" if row.detail else row.outcome
        if row.outcome != row.ask.expected:
            outcome += f", expected {row.ask.expected}"
        table.add_row(
            row.ask.title,
            str(row.prompt_tokens),
            f"{row.pulled_bytes / 1e6:.1f}",
            f"{row.handover_s * 1e3:.0f}",
            outcome,
            "yes" if row.identical else "NO",
            style=None if row.is_right else "red",
        )
    return table


def verdict(rows: list[Row]) -> str:
    """The last line."""
    identical = sum(row.identical for row in rows)
    pulled_mb = sum(row.pulled_bytes for row in rows) / 1e6
    recomputed = sum(row.outcome == RECOMPUTED for row in rows)
    word = "OK" if all(row.is_right for row in rows) else "FAILED"
    return (
        f"demo: {word}, {identical}/{len(rows)} outputs identical, {pulled_mb:.1f} MB pulled, {recomputed} recomputed"
    )


@contextlib.contextmanager
def proxy_of(producer: Engine, consumer: Engine) -> Iterator[str]:
    """The example proxy in front of two engines; its address."""
    port = free_port()
    command = [sys.executable, str(ROOT / "examples" / "proxy" / "proxy.py"), "--host", "127.0.0.1"]
    command += ["--port", str(port), "--producer", producer.url, "--consumer", consumer.url]
    proxy = Child("proxy", command, log_file=LOG_DIR / "proxy.log")
    try:
        url = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + 60.0
        while not _answers(url):
            if not proxy.alive or time.monotonic() > deadline:
                raise DemoError(f"the proxy does not answer:\n{proxy.log_tail()}")
            time.sleep(0.2)
        yield url
    finally:
        proxy.stop()


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=1.0, trust_env=False).is_success
    except httpx.HTTPError:
        return False


def engine_spec(name: str, role: str) -> EngineSpec:
    """An engine with our connector; loads that fail are recomputed."""
    transfer = {
        "kv_connector": "KVLeaseConnector",
        "kv_role": role,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"host": "127.0.0.1", "port": 0},
    }
    return EngineSpec(name, kv_transfer=transfer)


def demo(console: Console) -> int:
    """Everything; the exit status."""
    asks = requests_of_the_demo(PromptMaker(ensure_model()))
    specs = [engine_spec("producer", "kv_producer"), engine_spec("consumer", "kv_consumer")]
    for old in LOG_DIR.glob("*.log"):
        old.unlink()

    with Display(console) as display:

        def waiting(_: float) -> None:
            display.show("engines", 0.0, "waiting for other engines on this machine to end")

        with (
            engine_set(specs, LOG_DIR, progress=display.show, waiting=waiting) as (producer, consumer),
            proxy_of(producer, consumer) as proxy_url,
        ):
            rows = run(Fleet(producer, consumer, proxy_url), asks, display)
            display.show("engines", 1.0, "stopping")
    console.print(table_of(rows))
    console.print(verdict(rows), markup=False, highlight=False, soft_wrap=True)
    return 0 if all(row.is_right for row in rows) else 1


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def main() -> int:
    """Runs the demo; whatever ends it, no engine is left."""
    signal.signal(signal.SIGTERM, _interrupt)
    console = Console(width=None if sys.stdout.isatty() else 140)
    try:
        return demo(console)
    except KeyboardInterrupt:
        console.print("demo: interrupted; all its processes have ended", markup=False)
        return 130
    except (ChildError, DemoError, httpx.HTTPError) as error:
        console.print(
            f"demo: FAILED, {type(error).__name__}: {error}\nLogs are in {LOG_DIR}", markup=False, highlight=False
        )
        return 1


if __name__ == "__main__":
    sys.exit(main())
