"""A pair of engines that is one small HTTP server: it answers like vLLM and counts like the two connectors."""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

import httpx
import psutil

from bench.engines_pair import Contender, Pair
from devtools.engines import Engine, EngineSpec

METRICS = """\
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{{engine="0"}} {held}
# TYPE vllm:kvlease_loads_total counter
vllm:kvlease_loads_total{{outcome="done",cause=""}} {pulls}
vllm:kvlease_loads_total{{outcome="failed",cause="peer_dead"}} {failed}
# TYPE vllm:kvlease_bytes_pulled_total counter
vllm:kvlease_bytes_pulled_total {bytes}
# TYPE vllm:nixl_xfer_time_seconds histogram
vllm:nixl_xfer_time_seconds_bucket{{le="+Inf"}} {pulls}
vllm:nixl_xfer_time_seconds_count {pulls}
vllm:nixl_xfer_time_seconds_sum 0.5
# TYPE vllm:nixl_bytes_transferred histogram
vllm:nixl_bytes_transferred_bucket{{le="+Inf"}} {pulls}
vllm:nixl_bytes_transferred_count {pulls}
vllm:nixl_bytes_transferred_sum {bytes}
"""

BYTES_PER_PULL = 1000


class StubServer:
    """Serves on a free port of loopback while it is entered."""

    def __init__(self, token_every_s: float = 0.002, pull_s: float = 0.01) -> None:
        self.token_every_s = token_every_s
        self.pull_s = pull_s
        self.refuse_handoffs = False
        self.numbers = {"held": 0, "pulls": 0, "failed": 0, "bytes": 0}
        self.hung_up = threading.Event()
        stub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer(200, METRICS.format(**stub.numbers).encode())

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                stub.complete(self, body)

            def _answer(self, status: int, content: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)

    def __enter__(self) -> StubServer:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def pair(self, contender: Contender) -> Pair:
        url = f"http://127.0.0.1:{self._server.server_port}"
        return Pair(contender, StubEngine("producer", url), StubEngine("consumer", url))

    def complete(self, handler: Any, body: dict[str, Any]) -> None:
        params = body.get("kv_transfer_params") or {}
        if body.get("stream"):
            self._stream(handler)
            return
        if "lease" in params:
            time.sleep(self.pull_s)
            if self.refuse_handoffs:
                self.numbers["failed"] += 1
                handler._answer(500, b"Internal server error")
                return
            self.numbers["pulls"] += 1
            self.numbers["bytes"] += BYTES_PER_PULL
        answer = {
            "choices": [{"text": "x", "token_ids": [7], "finish_reason": "length"}],
            "usage": {"prompt_tokens": len(body["prompt"])},
            "kv_transfer_params": {"lease": 1} if params.get("do_remote_decode") else None,
        }
        handler._answer(200, json.dumps(answer).encode())

    def _stream(self, handler: Any) -> None:
        handler.send_response(200)
        handler.end_headers()
        event = {"choices": [{"text": "x", "token_ids": [7]}]}
        try:
            while True:
                handler.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
                time.sleep(self.token_every_s)
        except OSError:
            self.hung_up.set()


class StubProcess:
    """Ours stands in for an engine's."""

    def tree(self) -> list[psutil.Process]:
        return [psutil.Process()]


class StubEngine(Engine):
    """An engine without a process."""

    def __init__(self, name: str, url: str) -> None:
        self.spec = EngineSpec(name)
        self.name = name
        self.url = url
        self.calls: list[str] = []
        self.process = StubProcess()
        limits = httpx.Limits(max_keepalive_connections=0)
        self.http = httpx.Client(base_url=url, timeout=20.0, trust_env=False, limits=limits)

    def freeze(self) -> None:
        self.calls.append("freeze")

    def thaw(self) -> None:
        self.calls.append("thaw")
