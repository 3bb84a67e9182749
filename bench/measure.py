"""What a part of the benchmark hands over: measurements or tables, and the samples that they were taken from.

A part is a function `measure(quick, show) -> Findings`. `bench/__main__.py` lists the parts, keeps what each returns as
JSON, and makes the tables, the page and the plots from that JSON alone.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from bench.output import Table

Show = Callable[[str, float, str], None]
"""Called while a part runs: (what, share done from 0 to 1, what is being done)."""


class Measurement(msgspec.Struct, frozen=True, kw_only=True):
    """One number, how sure we are of it, and what it should be.

    `at_most` and `at_least` are in `unit`; `target` says the same in words ("≤ 0.25 x B"). With neither, the number is
    there for comparison and has no target.
    """

    name: str
    value: float | None
    """None where there is nothing to measure, which meets no target."""
    unit: str
    spread: tuple[float, float] | None = None
    """The range that holds the middle eight tenths of the samples, or all of them where `num_samples` is below ten."""
    num_samples: int = 1
    target: str = ""
    at_most: float | None = None
    at_least: float | None = None
    beside: Mapping[str, float | None] = {}
    """The same number of others, in `unit`: {"B": 380.0, "memcpy": 14.0}."""
    note: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None when there is no target."""
        if self.at_most is None and self.at_least is None:
            return None
        if self.value is None:
            return False
        return (self.at_most is None or self.value <= self.at_most) and (
            self.at_least is None or self.value >= self.at_least
        )


class Findings(msgspec.Struct, frozen=True, kw_only=True):
    """What one part found. `samples` is plain JSON: what a reader needs to check the measurements, and plots show."""

    measurements: Sequence[Measurement] = ()
    tables: Sequence[Table] = ()
    samples: Mapping[str, Any] = {}
    about: str = ""
    """Some sentences for the page: what was measured, and how."""
