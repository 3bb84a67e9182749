"""The thread around it all: starts or says why not, hands things over, survives, ends."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from kvlease.core.ids import EngineId, LeaseId, Rank
from kvlease.core.loads import FailureCause
from kvlease.core.orders import Orders, Reports
from kvlease.core.silence import PeerTiming
from kvlease.testing import FakeAgent, Fate
from kvlease.worker import transfer
from kvlease.worker.agent import AgentError
from kvlease.worker.outbox import Outbox
from kvlease.worker.regions import Layout, MemoryRange
from kvlease.worker.sources import Identity
from kvlease.worker.transfer import TransferThread, widen_cpus

from .conftest import BLOCK_SIZE, FakeLink, Memory, World


class WaitingLink(FakeLink):
    """Waits as a channel does; ``waits`` is how long it was allowed to."""

    def __init__(self, world: World) -> None:
        super().__init__(time.monotonic, PeerTiming(2.0, 0.5))
        self.producers = world.link.producers
        self.waits: list[float] = []
        self.crashes = 0
        self._woken = threading.Event()

    def poll(self, timeout_s: float) -> None:
        if self.crashes:
            self.crashes -= 1
            raise RuntimeError("crashed")
        super().poll(0.0)
        self.waits.append(timeout_s)
        self._woken.wait(0 if self.events else timeout_s)
        self._woken.clear()

    def wake(self) -> None:
        self._woken.set()


class Running:
    """A started thread with a fake agent, and how to wait for it."""

    def __init__(self, world: World, *, starts: bool = True) -> None:
        self.memory = Memory(world.fabric)
        self.link = WaitingLink(world)
        ranges = [MemoryRange(self.memory.pages.ctypes.data, self.memory.pages.nbytes, 0)]
        self.thread = TransferThread(
            identity=Identity(EngineId("consumer"), Rank(0), 1, {}, ""),
            settings=world.settings,
            layout=Layout(self.memory.regions, "DRAM", ranges),
            block_sizes=[BLOCK_SIZE],
            make_agent=lambda: self.memory.agent,
            make_link=lambda: self.link,
        )
        if starts:
            self.info = self.thread.start()

    def until(self, done: Callable[[], bool]) -> None:
        ends_at = time.monotonic() + 10
        while not done():
            assert time.monotonic() < ends_at
            time.sleep(0.001)

    def wait_for(self, load: str) -> Reports:
        reports = Reports()

        def is_received() -> bool:
            nonlocal reports
            reports = self.thread.take_reports()
            return load in reports.received

        self.until(is_received)
        return reports


@pytest.fixture
def running(world: World) -> Iterator[Running]:
    found = Running(world)
    yield found
    found.thread.shutdown()


def test_it_says_what_peers_need_to_know(running: Running) -> None:
    assert running.info.agent_metadata == running.memory.agent.metadata()
    assert len(running.info.regions) == 3
    assert running.info.memory == "DRAM"


def test_a_load_goes_in_and_its_report_comes_out(world: World, running: Running) -> None:
    running.thread.take_orders(Orders(loads=[world.order("load", {1: 5})]))
    assert running.wait_for("load").failed == {}
    assert (running.memory.pages[:, 1] == world.producer.memory.pages[:, 5]).all()
    assert running.thread.stats()["loads_done"] == 1


def test_a_producer_is_greeted_at_once_though_there_is_no_load(world: World, running: Running) -> None:
    running.thread.take_orders(Orders(greet=[world.producer.key]))
    running.until(lambda: running.thread.stats().get("peers|ready") == 1)


def test_ended_leases_come_back_once(running: Running) -> None:
    running.thread.take_orders(Orders(ended=[LeaseId("a"), LeaseId("b")]))
    assert running.thread.take_reports().sent == {"a", "b"}
    assert running.thread.take_reports() == Reports()


def test_the_agent_is_served_often_while_leases_are_out_and_seldom_otherwise(running: Running) -> None:
    def waits_of(leases_live: int) -> set[float]:
        running.thread.take_orders(Orders(leases_live=leases_live))
        running.link.wake()
        start = len(running.link.waits) + 2
        running.until(lambda: len(running.link.waits) >= start + 2)
        return set(running.link.waits[start:])

    assert waits_of(0) == {0.1}
    assert waits_of(1) == {0.002}
    assert running.memory.agent.ticks > 0


def test_it_goes_on_after_a_crash_of_its_own(world: World, running: Running, caplog: pytest.LogCaptureFixture) -> None:
    running.link.crashes = 3
    running.link.wake()
    running.thread.take_orders(Orders(loads=[world.order("load", {1: 5})]))
    assert running.wait_for("load").failed == {}
    assert "goes on after" in caplog.text


@pytest.mark.parametrize(("cpus", "rest_s"), [(1, 0.01), (4, 0.01), (5, 0.001), (64, 0.001)])
def test_a_step_without_a_model_is_drawn_out_where_cpus_are_few(
    world: World, monkeypatch: pytest.MonkeyPatch, cpus: int, rest_s: float
) -> None:
    monkeypatch.setattr(transfer, "allowed_cpus", lambda: set(range(cpus)))
    rests: list[float] = []
    monkeypatch.setattr(Outbox, "wait", lambda _, timeout_s: rests.append(timeout_s))
    thread = Running(world, starts=False).thread
    thread.rest()
    assert rests == [rest_s]


def test_whose_parent_cannot_be_asked_knows_its_own_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    own = os.sched_getaffinity(0)
    monkeypatch.setattr(os, "getppid", lambda: 1 << 22)  # beyond any process id
    assert transfer.allowed_cpus() == own


def test_it_may_run_wherever_its_process_may(running: Running) -> None:
    del running
    seen: list[set[int]] = []
    allowed = os.sched_getaffinity(0) | os.sched_getaffinity(os.getppid())

    def pinned() -> None:
        os.sched_setaffinity(0, {min(allowed)})
        widen_cpus()
        seen.append(os.sched_getaffinity(0))

    thread = threading.Thread(target=pinned)
    thread.start()
    thread.join()
    assert seen == [allowed]


def test_the_gpu_that_holds_the_kv_is_made_current_in_the_thread_before_nixl_starts(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, str]] = []

    def note(what: str) -> None:
        seen.append((what, threading.current_thread().name))

    monkeypatch.setattr(torch.cuda, "set_device", lambda device: note(f"use {device}"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: note("ask"))

    def refuse() -> FakeAgent:
        note("nixl")
        raise AgentError("enough")

    thread = TransferThread(
        identity=Identity(EngineId("consumer"), Rank(0), 1, {}, ""),
        settings=world.settings,
        layout=Layout([], "VRAM", [MemoryRange(4096, 64, 3)]),
        block_sizes=[BLOCK_SIZE],
        make_agent=refuse,
        make_link=lambda: world.link,
    )
    with pytest.raises(AgentError, match="enough"):
        thread.start()
    assert seen == [(what, "kvlease-transfer") for what in ("use 3", "ask", "nixl")]


def test_what_nixl_says_at_the_start_is_raised_where_it_was_started(world: World) -> None:
    def refuse() -> FakeAgent:
        raise AgentError("no such device")

    thread = TransferThread(
        identity=Identity(EngineId("consumer"), Rank(0), 1, {}, ""),
        settings=world.settings,
        layout=Layout([], "DRAM", []),
        block_sizes=[BLOCK_SIZE],
        make_agent=refuse,
        make_link=lambda: world.link,
    )
    with pytest.raises(AgentError, match="no such device"):
        thread.start()
    assert not thread.is_alive


def test_shutdown_lets_a_read_end_before_memory_is_unregistered(world: World, running: Running) -> None:
    running.memory.agent.script.append(Fate.HANG)
    running.thread.take_orders(Orders(loads=[world.order("load", {1: 5})]))
    running.until(lambda: bool(running.memory.agent.reads))
    threading.Timer(0.05, running.memory.agent.finish).start()
    assert running.thread.shutdown()
    assert running.memory.agent.closed
    assert running.thread.take_reports().failed == {"load": FailureCause.SHUTDOWN}


def test_shutdown_with_a_read_that_never_ends_leaves_memory_registered(world: World, running: Running) -> None:
    running.memory.agent.script.append(Fate.HANG)
    running.thread.take_orders(Orders(loads=[world.order("load", {1: 5})]))
    running.until(lambda: bool(running.memory.agent.reads))
    assert running.thread.shutdown()
    assert not running.memory.agent.closed
    reports = running.thread.take_reports()
    assert reports.failed == {"load": FailureCause.SHUTDOWN}
    assert reports.unsettled == {"load"}


def test_orders_after_shutdown_fail_at_once_and_shutdown_may_be_repeated(world: World, running: Running) -> None:
    assert running.thread.shutdown()
    assert running.thread.shutdown()
    running.thread.take_orders(Orders(loads=[world.order("load", {1: 5})]))
    assert running.thread.take_reports().failed == {"load": FailureCause.SHUTDOWN}
