"""Runs one command and makes sure that nothing of it outlives the process that asked for it.

    python reaper.py LIFE_FD COMMAND...

`devtools.processes.Child` starts this between itself and the command. LIFE_FD is the reading end of a pipe whose other
end only the starter holds: when that closes, because the starter ended in whatever way, SIGKILL included, the whole
tree is killed. Orphans of the tree (vLLM's engine core and workers, once its API server is gone) are re-parented to
this process and not to init, so "the tree" stays well defined by parentage alone. Ends with the command's own exit
status (128 + n for signal n) when no process of the tree is left.
"""

import ctypes
import os
import select
import signal
import subprocess
import sys
import time

import psutil

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_POLL_MS = 100
_LEFTOVER_GRACE_S = 1.0
"""What the tree's survivors get to end by themselves once the command has ended."""
_TRACKER_GRACE_S = 2.0


def is_tracker(process: psutil.Process) -> bool:
    """Whether this is a Python resource tracker: it ends when its users have, and unlinks their shared memory."""
    try:
        return any("multiprocessing.resource_tracker" in word for word in process.cmdline())
    except psutil.Error:
        return False


def kill_tree(root: psutil.Process, *, trackers: bool) -> None:
    """SIGKILLs the descendants of `root`; resource trackers only when `trackers`."""
    try:
        found = root.children(recursive=True)
    except psutil.NoSuchProcess:
        return
    for process in found:
        if trackers or not is_tracker(process):
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def _die_with_parent() -> None:
    # Only for the case that somebody SIGKILLs this very process. Safe here: this process has one thread.
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _reap() -> dict[int, int]:
    """Collects the children that have ended: pid -> exit code (negative for a signal)."""
    ended: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended[pid] = os.waitstatus_to_exitcode(status)


def _end_leftovers(at_once: bool) -> None:
    me = psutil.Process()
    started = time.monotonic()
    while me.children():
        waited_s = time.monotonic() - started
        if at_once or waited_s > _LEFTOVER_GRACE_S:
            kill_tree(me, trackers=waited_s > _LEFTOVER_GRACE_S + _TRACKER_GRACE_S)
        time.sleep(0.02)
        _reap()


def main(life_fd: int, command: list[str]) -> int:
    """Runs `command` to its end or ours; returns the exit status to end with."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=_die_with_parent)  # noqa: PLW1509, S603
    signal.signal(signal.SIGTERM, lambda *_: os.kill(child.pid, signal.SIGTERM))
    poller = select.poll()
    poller.register(life_fd, select.POLLIN | select.POLLHUP)
    while True:
        orphaned = bool(poller.poll(_POLL_MS))
        if orphaned:
            kill_tree(psutil.Process(), trackers=False)
        code = _reap().get(child.pid)
        if code is not None:
            _end_leftovers(at_once=orphaned)
            return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
