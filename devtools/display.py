"""Progress that people can watch: moving bars on a terminal, plain lines in a log."""

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn


class Display:
    """One line for each thing that is under way. Use as a context manager."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._started_at = time.monotonic()
        self._bars: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._shown: dict[str, str] = {}
        if console.is_terminal:
            self._bars = Progress(
                SpinnerColumn(),
                TextColumn("{task.description:<10}"),
                BarColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.fields[doing]}"),
                console=console,
                transient=True,
            )

    def __enter__(self) -> "Display":
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bars is not None:
            self._bars.stop()

    def show(self, what: str, share: float, doing: str) -> None:
        """`what` is done to `share` (0 to 1) and is `doing` something now."""
        if self._bars is None:
            if self._shown.get(what) != doing:
                self._shown[what] = doing
                elapsed_s = time.monotonic() - self._started_at
                self._console.print(f"[{elapsed_s:4.0f} s] {what}: {doing}", markup=False, highlight=False)
            return
        if what not in self._tasks:
            self._tasks[what] = self._bars.add_task(what, total=1.0, doing=doing)
        self._bars.update(self._tasks[what], completed=share, doing=doing)
