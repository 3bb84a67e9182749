"""Locks, metrics, core shares: the small parts under the engines."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from devtools.engines import ENGINE_SITE, core_shares
from devtools.locks import file_lock
from devtools.metrics import LOADS, Metrics
from devtools.model import ModelError, ensure_model

TEXT = """\
# HELP vllm:kvlease_loads_total Loads.
# TYPE vllm:kvlease_loads_total counter
vllm:kvlease_loads_total{engine="0",outcome="done",cause=""} 3.0
vllm:kvlease_loads_total{engine="0",outcome="failed",cause="peer_dead"} 1.0
vllm:kvlease_loads_total{engine="0",outcome="failed",cause="transfer"} 1.0
# HELP vllm:kv_cache_usage_perc Use.
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0"} 0.25
"""


def test_metrics_add_up_over_the_labels_that_are_not_asked_for() -> None:
    metrics = Metrics.parse(TEXT)
    assert metrics.total(LOADS) == 5
    assert metrics.total(LOADS, outcome="failed") == 2
    assert metrics.total(LOADS, outcome="failed", cause="transfer") == 1
    assert metrics.total("never_heard_of") == 0
    assert metrics.by_label(LOADS, "outcome") == {"done": 3, "failed": 2}


def test_a_lock_is_held_by_one_and_the_other_is_told_that_it_waits(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "lock"
    waited, entered = threading.Event(), threading.Event()

    def other() -> None:
        with file_lock(path, lambda _: waited.set()):
            entered.set()

    thread = threading.Thread(target=other)
    with file_lock(path):
        thread.start()
        assert waited.wait(10)
        assert not entered.is_set()
    thread.join(10)
    assert entered.is_set()


def test_engines_get_equal_shares_of_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    def with_cores(*cores: int) -> None:
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(cores))

    with_cores(0, 1)
    assert core_shares(2) == ["0", "1"]
    assert core_shares(3) == ["0", "1", "0"]
    with_cores(3)
    assert core_shares(2) == ["3", "3"]
    with_cores(*range(4, 20))
    assert core_shares(2) == ["4,5,6,7", "8,9,10,11"]


def test_a_complete_model_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    folder = tmp_path / "SmolLM2-135M-Instruct"
    folder.mkdir()
    (folder / ".complete").touch()
    assert ensure_model(tmp_path) == folder


def test_without_the_model_package_the_message_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ModelError, match="make setup"):
        ensure_model(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [".lock"], "nothing half-made is left"


def test_engines_that_wait_sleep_instead_of_spinning() -> None:
    code = "import os, time; print(os.sched_yield.func is time.sleep)"
    said = subprocess.check_output([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ENGINE_SITE)})
    assert said.split() == [b"True"]
