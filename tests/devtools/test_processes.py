"""A child's whole tree is ours to kill, freeze and thaw, and it never outlives us, however we end."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from devtools.processes import Child

# A tree like vLLM's: a parent, its child in a session of its own, and a grandchild; each deaf to SIGTERM if asked.
TREE = """
import signal, subprocess, sys, time
depth = int(sys.argv[1])
if "deaf" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if depth:
    subprocess.Popen([sys.executable, "-c", sys.argv[2], str(depth - 1), *sys.argv[2:]], start_new_session=True)
print("up", depth, flush=True)
if "brief" in sys.argv and depth == 2:
    time.sleep(0.3)
    sys.exit(7)
while True:
    time.sleep(60)
"""


def command(*words: str) -> list[str]:
    return [sys.executable, "-c", TREE, "2", TREE, *words]


def wait_until(done: Callable[[], bool], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not done():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.02)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Child]]:
    children: list[Child] = []

    def start(*words: str) -> Child:
        child = Child("tree", command(*words), log_file=tmp_path / "tree.log")
        children.append(child)
        wait_until(lambda: child.log_text().count("up") == 3)
        return child

    yield start
    for child in children:
        child.kill()


def are_gone(processes: list[psutil.Process]) -> bool:
    return not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in processes)


def test_kill_ends_every_process_of_the_tree(start: Callable[..., Child]) -> None:
    child = start("deaf")
    tree = child.tree()
    assert len(tree) == 3
    child.kill()
    assert are_gone(tree)
    assert (child.alive, child.returncode) == (False, 128 + 9)
    child.kill()  # harmless


def test_stop_is_polite_and_takes_the_descendants_along(start: Callable[..., Child]) -> None:
    child = start()
    tree = child.tree()
    child.stop()
    assert child.returncode == 128 + 15
    assert are_gone(tree)


def test_stop_is_not_polite_for_ever(start: Callable[..., Child]) -> None:
    child = start("deaf")
    child.stop(timeout_s=0.2)
    assert child.returncode == 128 + 9


def test_orphans_end_with_the_command_and_its_status_is_kept(start: Callable[..., Child]) -> None:
    child = start("brief", "deaf")
    tree = child.tree()
    wait_until(lambda: not child.alive)
    assert child.returncode == 7
    assert are_gone(tree)


def test_a_frozen_tree_stands_still_until_thawed_and_can_be_stopped(start: Callable[..., Child]) -> None:
    child = start()
    child.freeze()
    assert all(process.status() == psutil.STATUS_STOPPED for process in child.tree())
    child.thaw()
    wait_until(lambda: all(process.status() == psutil.STATUS_SLEEPING for process in child.tree()))
    child.freeze()
    child.stop()
    assert not child.alive


def test_the_tree_does_not_outlive_a_parent_that_was_killed(tmp_path: Path) -> None:
    log_file = tmp_path / "tree.log"
    script = (
        "import sys, time; from pathlib import Path; from devtools.processes import Child\n"
        "Child('tree', sys.argv[2:], log_file=Path(sys.argv[1])); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", script, str(log_file), *command("deaf")]) as parent:
        wait_until(lambda: log_file.exists() and log_file.read_text().count("up") == 3)
        tree = psutil.Process(parent.pid).children(recursive=True)
        assert len(tree) == 4, "the reaper and three more"
        parent.kill()
    wait_until(lambda: are_gone(tree))


def test_the_log_can_be_read_from_a_point_on(start: Callable[..., Child]) -> None:
    child = start()
    assert child.log_text(child.log_len_bytes()) == ""
    assert child.log_tail(1).startswith("up")
