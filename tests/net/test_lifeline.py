"""The lifeline: severing tells the endpoint, waits for it to let go, and is not fooled or held up by strangers."""

from __future__ import annotations

import select
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from kvlease.net.lifeline import Lifeline, LifelineAddress, connect, is_severed


@pytest.fixture
def lifeline() -> Iterator[Lifeline]:
    lifeline = Lifeline("127.0.0.1")
    yield lifeline
    lifeline.sever(0.0)


def wait_readable(connection: socket.socket) -> None:
    assert select.select([connection], [], [], 10.0)[0], "nothing happened for ten seconds"


def test_severing_waits_until_the_endpoint_has_hung_up(lifeline: Lifeline) -> None:
    connection = connect(lifeline.address, 5.0)
    assert not is_severed(connection)
    events = []

    def endpoint() -> None:
        wait_readable(connection)
        assert is_severed(connection)
        events.append("revoked")
        connection.close()

    thread = threading.Thread(target=endpoint)
    thread.start()
    assert lifeline.sever(10.0)
    events.append("severed")
    thread.join()
    assert events == ["revoked", "severed"]
    assert lifeline.sever()


def test_an_endpoint_that_does_not_let_go_is_reported(lifeline: Lifeline) -> None:
    with connect(lifeline.address, 5.0):
        assert not lifeline.sever(0.02)


def test_severing_without_an_endpoint_returns_at_once(lifeline: Lifeline) -> None:
    assert lifeline.sever(600.0)
    with pytest.raises(OSError, match="refused"):
        connect(lifeline.address, 5.0)


def test_a_stranger_is_not_waited_for(lifeline: Lifeline) -> None:
    host, port = lifeline.address.host, lifeline.address.port
    with connect(LifelineAddress(host, port, b"x" * 32), 5.0), connect(LifelineAddress(host, port, b"y" * 5000), 5.0):
        assert lifeline.sever(600.0)


def test_an_endpoint_that_had_hung_up_before_is_not_waited_for(lifeline: Lifeline) -> None:
    connect(lifeline.address, 5.0).close()
    assert lifeline.sever(600.0)


def test_the_death_of_a_worker_is_seen(lifeline: Lifeline) -> None:
    script = """
import sys
from kvlease.net.lifeline import Lifeline
lifeline = Lifeline("127.0.0.1")
print(lifeline.address.port, lifeline.address.secret.hex(), flush=True)
sys.stdin.read()
"""
    worker = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True)
    assert worker.stdout
    port, secret = worker.stdout.readline().split()
    connection = connect(LifelineAddress("127.0.0.1", int(port), bytes.fromhex(secret)), 5.0)
    assert not is_severed(connection)
    worker.kill()
    wait_readable(connection)
    assert is_severed(connection)
    connection.close()
    worker.communicate()


def test_the_secret_is_never_shown(lifeline: Lifeline) -> None:
    assert lifeline.address.secret.hex() not in repr(lifeline.address)
    assert repr(lifeline.address.secret) not in repr(lifeline.address)
    assert len(lifeline.address.secret) == 32


def test_a_host_that_is_not_ours_is_refused() -> None:
    with pytest.raises(OSError, match="assign"):
        Lifeline("192.0.2.1")
