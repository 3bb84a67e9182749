"""Commands as process trees that we can kill, freeze and thaw as one, and that never outlive us (see `reaper.py`)."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from devtools import reaper

_KILL_TIMEOUT_S = 20.0
_FREEZE_TIMEOUT_S = 20.0
_STOPPED = frozenset("TtZX")
"""States of /proc in which a thread runs no more."""


def _is_stopped(pid: int) -> bool:
    """Whether no thread of the process runs any more."""
    try:
        stats = [(task / "stat").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
    except (FileNotFoundError, ProcessLookupError):  # a thread or the process ended while we looked
        return not Path(f"/proc/{pid}").exists()
    return all(stat.rpartition(")")[2].split()[0] in _STOPPED for stat in stats)


class ChildError(RuntimeError):
    """A child process did not do what was asked of it; the message holds the end of its log."""


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody listened on a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Child:
    """One running command, its descendants, and the file that both outputs go to.

    Everything here acts on the whole tree, found by parentage from the process we started, never by name.
    """

    def __init__(
        self, name: str, command: Sequence[str], *, log_file: Path, env: Mapping[str, str] | None = None
    ) -> None:
        self.name = name
        self.log_file = log_file
        log_file.parent.mkdir(parents=True, exist_ok=True)
        life_read, self._life_fd = os.pipe()
        with log_file.open("ab") as log:
            self._reaper = subprocess.Popen(  # noqa: S603
                [sys.executable, "-P", reaper.__file__, str(life_read), *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=None if env is None else dict(env),
                pass_fds=[life_read],
                start_new_session=True,
            )
        os.close(life_read)

    def __repr__(self) -> str:
        return f"<Child {self.name} pid={self._reaper.pid} returncode={self.returncode}>"

    @property
    def returncode(self) -> int | None:
        """The command's exit status (128 + n for signal n) once no process of the tree is left, else None."""
        return self._reaper.poll()

    @property
    def alive(self) -> bool:
        """Whether any process of the tree is left."""
        return self.returncode is None

    def tree(self) -> list[psutil.Process]:
        """The command's processes, parents before children, without our own reaper."""
        try:
            return psutil.Process(self._reaper.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def kill(self) -> None:
        """SIGKILLs the tree and returns when it is gone. Harmless when it is gone already."""
        deadline = time.monotonic() + _KILL_TIMEOUT_S
        while self.alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                reaper.kill_tree(psutil.Process(self._reaper.pid), trackers=False)
            if time.monotonic() > deadline:
                self._reaper.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._reaper.wait(0.1)
        self._close()

    def stop(self, timeout_s: float = 10.0) -> None:
        """SIGTERM to the command, then, after `timeout_s`, `kill()`. Also ends a frozen tree."""
        if self.alive:
            self.thaw()
            self._reaper.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._reaper.wait(timeout_s)
        self.kill()

    def freeze(self) -> None:
        """SIGSTOPs the tree: it keeps its sockets and memory, and answers nobody.

        Returns when every thread has stopped, which on a busy machine is later than the signal.
        """
        self._signal(signal.SIGSTOP)
        deadline = time.monotonic() + _FREEZE_TIMEOUT_S
        while not all(_is_stopped(process.pid) for process in self.tree()):
            if time.monotonic() > deadline:
                raise ChildError(f"{self.name} has not stopped {_FREEZE_TIMEOUT_S:.0f} s after SIGSTOP")
            time.sleep(0.005)

    def thaw(self) -> None:
        """SIGCONTs the tree."""
        self._signal(signal.SIGCONT)

    def log_text(self, offset: int = 0) -> str:
        """What was logged from byte `offset` on (see `log_len_bytes`)."""
        with self.log_file.open("rb") as log:
            log.seek(offset)
            return log.read().decode(errors="replace")

    def log_len_bytes(self) -> int:
        """The length of the log so far: an `offset` for what comes next."""
        return self.log_file.stat().st_size

    def log_tail(self, num_lines: int = 40) -> str:
        """The last lines of the log."""
        return "\n".join(self.log_text().splitlines()[-num_lines:])

    def _signal(self, number: signal.Signals) -> None:
        for process in self.tree():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def _close(self) -> None:
        if self._life_fd >= 0:
            os.close(self._life_fd)
            self._life_fd = -1
