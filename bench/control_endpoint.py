"""One producer's endpoint at scale: many live leases, many consumers that renew them, and one that floods it.

All of it with real sockets: the endpoint in a process of its own, the consumers' leasers as threads of a few processes.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any, Final

import msgspec
import psutil
import zmq

from bench.control_echo import echo
from bench.control_wire import SETTINGS, TOKEN, TOKEN_IDS, Asker, Served, grant, lease_name, producer, timing
from bench.output import Table
from bench.timing import p99_of, spread
from kvlease.core.digest import PromptIdentity
from kvlease.core.ids import ChannelId, LoadId, PeerKey
from kvlease.core.messages import Committed, Granted, Renew, Renewed, encode
from kvlease.net.endpoint import Endpoint
from kvlease.net.leaser import AcquireGranted, Leaser

CPU_BOUND: Final = 0.01
BYTES_BOUND: Final = 1e6
LATE_BOUND_S: Final = 1.5

_PROCESSES: Final = 4
_ROUND: Final = 25
_LONG_S: Final = 3600.0
_FRAME_BYTES: Final = 2 + 16
"""What ZeroMQ puts around a small message, generously."""


def measure_scale(leases: int, channels: int, window_s: float, probes: int) -> Table:
    """``leases`` held by ``channels`` consumers, renewed as designed; and what a new consumer waits for meanwhile."""
    table = Table(
        f"{leases:,} live leases of one producer, {channels} consumers, default heartbeat",
        ("what", "value"),
        f"producer < {CPU_BOUND:.0%} of a core, renewals < {BYTES_BOUND / 1e6:.0f} MB/s",
    )
    with producer(_obey, timing(lease_duration_s=_LONG_S, max_lease_lifetime_s=_LONG_S)) as served:
        empty_bytes = _ask(served, "rss")
        _ask(served, ("grant", 0, leases))
        granted_bytes = _ask(served, "rss")
        with _consumers(served.key, leases, channels) as tell:
            time.sleep(2.5 * SETTINGS.heartbeat_interval_s)  # the first heartbeat lists everything
            held_bytes = _ask(served, "rss")
            lost_before = tell("count")
            before, cpu_before, began = _ask(served, "stats"), _cpu_s(served.pid), time.monotonic()
            time.sleep(window_s)
            cpu, took_s = _cpu_s(served.pid) - cpu_before, time.monotonic() - began
            after = _ask(served, "stats")
            lost = tell("count") - lost_before
            cpu, renewals = cpu / took_s, (after["renewed"] - before["renewed"]) / took_s
            _ask(served, ("grant", leases, probes))
            acquires, commits = _probe(served, leases, probes)
        still_live = _ask(served, "stats")["leases_live"]
    bytes_s = renewals * (_renew_bytes() + 2 * _FRAME_BYTES)
    table.is_met = cpu < CPU_BOUND and bytes_s < BYTES_BOUND and lost == 0
    table.add("producer's CPU, % of a core", 100 * cpu)
    table.add("renewals per second", renewals)
    table.add("a bare ZeroMQ echo of as many messages, % of a core", 100 * _echo_cpu(renewals, window_s))
    table.add("bytes per second, both ways", round(bytes_s))
    table.add("leases live at the end", round(still_live))
    table.add("leases or renewals lost meanwhile", lost)
    table.add("bytes of memory per granted lease", round((granted_bytes - empty_bytes) / leases))
    table.add("bytes of memory per held lease", round((held_bytes - empty_bytes) / leases))
    for name, taken in (("acquire", acquires), ("commit", commits)):
        table.add(f"{name} meanwhile, ms", spread(taken))
        table.add(f"{name} meanwhile, p99 ms", p99_of(taken))
    return table


def measure_flood(window_s: float, probes: int) -> Table:
    """One consumer sends as fast as it can: what others wait for, when leases end that nobody claims, and memory."""
    table = Table(
        "one consumer floods the endpoint",
        ("what", "value"),
        f"leases that nobody claims end at most {LATE_BOUND_S} s late, the others are answered",
    )
    duration_s = 5.0
    patient, hasty = timing(lease_duration_s=_LONG_S), timing(lease_duration_s=duration_s)
    with producer(_obey, patient) as served, producer(_obey, hasty) as hit:
        _ask(served, ("grant", 0, probes))
        calm, _ = _probe(served, 0, probes)
        with _flood(hit.key):
            time.sleep(1.0)
            rss = _ask(hit, "rss")
            _ask(hit, ("grant", 0, probes))
            asked, _ = _probe(hit, 0, probes)
            _ask(hit, ("grant", probes, 1000))
            before, granted_at = _ask(hit, "stats"), time.monotonic()
            time.sleep(duration_s + window_s)
            late_s = _ask(hit, "last_end") - granted_at - duration_s
            after, grown = _ask(hit, "stats"), _ask(hit, "rss") - rss
    answered = sum(after[kind] - before.get(kind, 0) for kind in ("resend", "renewed") if kind in after)
    table.is_met = late_s < LATE_BOUND_S
    table.add("flood messages answered per second", answered / (duration_s + window_s))
    table.add("acquire without a flood, ms", spread(calm))
    table.add("acquire meanwhile, ms", spread(asked))
    table.add("unclaimed leases ended late by at most, s", late_s)
    table.add("producer's memory grew by, MB", grown / 1e6)
    return table


def _echo_cpu(per_s: float, window_s: float) -> float:
    """What of a core a bare echo uses that answers ``per_s`` messages in a second."""
    message = bytes(_renew_bytes() // 2)
    with echo() as bare:
        before, began = _cpu_s(bare.pid), time.monotonic()
        for number in range(round(per_s * window_s)):
            bare.ask(message)
            time.sleep(max(0.0, began + (number + 1) / per_s - time.monotonic()))
        return (_cpu_s(bare.pid) - before) / (time.monotonic() - began)


# The producer's process


def _obey(endpoint: Endpoint, pipe: Any) -> None:
    ended_at = 0.0
    while True:
        while not pipe.poll(0.25):
            if endpoint.take_ended():
                ended_at = time.monotonic()
        match pipe.recv():
            case "end":
                return
            case "rss":
                pipe.send(psutil.Process().memory_info().rss)
            case "stats":
                stats = endpoint.stats()
                pipe.send({**stats.counters, **stats.gauges})
            case "last_end":
                pipe.send(ended_at)
            case ("grant", first, number):
                granted = endpoint.numbers.counters.get("granted", 0) + number
                for index in range(first, first + number):
                    grant(endpoint, index)
                while endpoint.numbers.counters.get("granted", 0) < granted:
                    time.sleep(0.01)
                pipe.send("granted")


def _ask(served: Served, what: Any) -> Any:
    served.pipe.send(what)
    return served.pipe.recv()


def _cpu_s(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


# The consumers' processes


@contextmanager
def _consumers(key: PeerKey, leases: int, channels: int) -> Iterator[Any]:
    """Processes that hold ``leases`` between them until the end; asked for ``count``, how much they lost."""
    context = multiprocessing.get_context("spawn")
    each, pipes, processes = leases // channels, [], []
    for number in range(_PROCESSES):
        ours, theirs = context.Pipe()
        share = channels // _PROCESSES
        process = context.Process(target=_consume, args=(key, number * share, share, each, theirs), daemon=True)
        process.start()
        pipes.append(ours)
        processes.append(process)
    for pipe in pipes:
        assert pipe.recv() == share * each

    def tell(what: str) -> float:
        for pipe in pipes:
            pipe.send(what)
        return float(sum(pipe.recv() for pipe in pipes))

    yield tell
    for process in processes:
        process.kill()
        process.join()


def _consume(key: PeerKey, first: int, channels: int, each: int, pipe: Any) -> None:
    settings = msgspec.structs.replace(SETTINGS, acquire_timeout_s=60.0)
    prompt = PromptIdentity(TOKEN_IDS, len(TOKEN_IDS))
    leasers = [Leaser(ChannelId(f"consumer-{first + number}"), settings) for number in range(channels)]
    for leaser in leasers:
        leaser.start()
    held = 0
    for start in range(0, each, _ROUND):
        wanted = held
        for number, leaser in enumerate(leasers):
            for at in range(start, min(start + _ROUND, each)):
                index = (first + number) * each + at
                leaser.acquire(LoadId(f"load-{index}"), key, lease_name(index), TOKEN, prompt)
                wanted += 1
        while held < wanted:
            time.sleep(0.005)
            held += sum(isinstance(one, AcquireGranted) for leaser in leasers for one in leaser.take_results())
    pipe.send(held)
    while pipe.recv() == "count":
        events = ("leases_gone", "renewals_lost", "resends", "acquires_lost")
        pipe.send(sum(leaser.stats().get(f"channel_events|{event}", 0.0) for leaser in leasers for event in events))


def _probe(served: Served, first: int, number: int) -> tuple[list[float], list[float]]:
    """Milliseconds of acquires and of commits, each sorted, one after another."""
    asker = Asker(served.key, "probe")
    acquires, commits = [], []
    for index in range(first, first + number):
        reply, took_s = asker.acquire(index)
        assert isinstance(reply, Granted), reply
        acquires.append(1000 * took_s)
        reply, took_s = asker.commit(index)
        assert isinstance(reply, Committed), reply
        commits.append(1000 * took_s)
        time.sleep(0.002)
    asker.close()
    return sorted(acquires), sorted(commits)


@contextmanager
def _flood(key: PeerKey) -> Iterator[None]:
    process = multiprocessing.get_context("spawn").Process(target=_send_for_ever, args=(key,), daemon=True)
    process.start()
    try:
        yield
    finally:
        process.kill()
        process.join()


def _send_for_ever(key: PeerKey) -> None:
    dealer: Any = zmq.Context().socket(zmq.DEALER)
    dealer.connect(f"tcp://{key.host}:{key.port}")
    for seq in count(1):
        dealer.send(encode(Renew(seq=seq, to=key.incarnation, channel="flood", base=7, generation=9)))


def _renew_bytes() -> int:
    """A heartbeat and its answer, without changes, on the wire."""
    renew = Renew(seq=1 << 20, to=b"i" * 16, channel="c" * 32, base=1 << 20, generation=1 << 20)
    return len(encode(renew)) + len(encode(Renewed(seq=1 << 20, incarnation=b"i" * 16, ttl_s=10.0)))
