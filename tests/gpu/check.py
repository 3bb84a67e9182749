"""``python -m tests.gpu.check``: KV caches in GPU memory, pulled from another process by kvlease's own worker half.

Needs kvlease with its dependencies (torch and nixl among them) and no vLLM. Without a GPU it says so and ends well;
``--device cpu`` does the same in host memory, smaller. Prints one table; ends badly when a byte differs.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch

from bench.data_pair import Blocks, DataPair, contiguous, data_pair, nine_in_ten, scattered
from bench.timing import Clocked, Spread, measured_by, repeat, timed
from devtools.pair import Shape
from kvlease.worker.agent import ReadState

SHAPES = {"cuda": Shape(layers=32, blocks=1024, page_bytes=64 << 10, device="cuda"), "cpu": Shape(4, 128, 16 << 10)}
ROUNDS = 7


@dataclass(frozen=True)
class Line:
    """One line of the table; ``found`` is in ``unit``."""

    what: str
    found: Spread
    unit: str

    def __str__(self) -> str:
        return f"{self.what:<52} {self.found!s:>34} {self.unit}"


def main(arguments: list[str] | None = None) -> int:
    """The exit status: 0 when all bytes are right, or there is no GPU to check."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.check", description="Checks kvlease on GPU memory.")
    parser.add_argument("--device", choices=sorted(SHAPES), default="cuda")
    device: str = parser.parse_args(arguments).device
    if device == "cuda" and not torch.cuda.is_available():
        print("Skipped: torch sees no GPU here. `--device cpu` runs the same check in host memory.")
        return 0
    shape, began = SHAPES[device], time.monotonic()
    print(f"{_device_name(device)}: {shape.layers} layers, {shape.len_bytes >> 20} MiB of KV on each side")
    with data_pair(shape) as pair:
        wrong = list(_wrong_bytes(pair))
        for line in _measure(pair):
            print(line, flush=True)
    print(f"{time.monotonic() - began:.0f} s")
    for name in wrong:
        print(f"WRONG BYTES: {name}")
    return 1 if wrong else 0


def _patterns(shape: Shape) -> dict[str, Blocks]:
    count = shape.blocks // 2
    return {
        "one block": {1: 2},
        "contiguous": contiguous(count),
        "runs of ten": nine_in_ten(count, shape.blocks),
        "scattered": scattered(count, shape.blocks),
    }


def _wrong_bytes(pair: DataPair) -> Iterator[str]:
    for name, blocks in _patterns(pair.shape).items():
        pair.pull_s(blocks)
        is_right = pair.consumer.holds(pair.producer, blocks)
        print(f"bytes, {name}: {'all equal' if is_right else 'WRONG'} ({len(blocks)} blocks)", flush=True)
        if not is_right:
            yield name


def _measure(pair: DataPair) -> Iterator[Line]:
    bare = pair.bare
    for name, blocks in _patterns(pair.shape).items():
        len_bytes = len(blocks) * pair.shape.block_bytes
        yield Line(f"pull, {name}", _rate(partial(pair.pull_s, blocks), len_bytes), "GB/s")
        chunks = pair.chunks(blocks)
        yield Line(f"NIXL alone, {name}", _rate(partial(bare.read_s, chunks), len_bytes), "GB/s")
        chunk = max(chunks, key=len)
        post = Clocked(partial(_post_s, pair, chunk), time.thread_time)
        wall, core = (found.scaled(1e6 / len(chunk)) for found in measured_by(post, ROUNDS))
        yield Line(f"posting, {name}, {len(chunk)} pages in a chunk", wall, "us per page")
        yield Line(f"posting, {name}, core time", core, "us per page")
    half = pair.shape.len_bytes // 2
    yield Line("copy on the device, contiguous", _rate(_device_copy(pair.shape.device, half), half), "GB/s")
    yield Line("pull of one block", repeat(partial(pair.pull_s, {1: 2}), ROUNDS * 3).scaled(1e3), "ms")
    yield Line("commit alone: order to report", repeat(partial(_commit_s, pair), ROUNDS * 3).scaled(1e3), "ms")


def _rate(measure: Callable[[], float], len_bytes: int) -> Spread:
    return repeat(lambda: len_bytes / measure() / 1e9, ROUNDS, warm_up=2)


def _post_s(pair: DataPair, chunk) -> float:
    """Making and posting one read, without waiting for it; where posting copies, that is in it."""
    bare = pair.bare
    began = time.perf_counter()
    read = bare.agent.post(bare.local, chunk.local, bare.remote, chunk.remote)
    took_s = time.perf_counter() - began
    while bare.agent.state(read) is ReadState.BUSY:
        pass
    bare.agent.release(read)
    return took_s


def _commit_s(pair: DataPair) -> float:
    order = pair.order({1: 2})
    return pair.pull_all_s([replace(order, start_token=order.end_token)])


def _device_copy(device: str, len_bytes: int) -> Callable[[], float]:
    source = torch.ones(len_bytes, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)

    def copy() -> None:
        target.copy_(source)
        if device == "cuda":
            torch.cuda.synchronize()

    return timed(copy)


def _device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else "host memory"


if __name__ == "__main__":
    raise SystemExit(main())
