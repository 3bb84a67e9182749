"""Locks between processes: `flock` on a file, which the kernel drops however the holder ends."""

import contextlib
import fcntl
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

ENGINE_LOCK_FILE = Path(tempfile.gettempdir()) / f"kvlease-engines-{os.getuid()}.lock"
"""One per user and machine: engines of two checkouts disturb each other as much as those of one."""

_POLL_S = 0.5


@contextlib.contextmanager
def file_lock(path: Path, waiting: Callable[[float], None] | None = None) -> Iterator[None]:
    """Holds an exclusive lock on `path` (made if missing, never removed).

    `waiting` is called about twice a second with the seconds waited so far, while somebody else holds the lock.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Not inherited (PEP 446): a child that outlives us for a moment must not keep the lock.
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        started = time.monotonic()
        while not _try_lock(fd):
            if waiting is not None:
                waiting(time.monotonic() - started)
            time.sleep(_POLL_S)
        yield
    finally:
        os.close(fd)


def engine_lock(waiting: Callable[[float], None] | None = None) -> contextlib.AbstractContextManager[None]:
    """The right to run engines on this machine: one set at a time, as two sets on a few cores starve each other."""
    return file_lock(ENGINE_LOCK_FILE, waiting)


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
