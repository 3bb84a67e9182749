"""Whether the bytes of a load are those that the producer has: asked while they are read, compared before the commit.

::

    pages begin to be read --ask--> the producer computes      (off its engine's thread, while we read)
    all is read, and the answer is here --> we compute         (in the hasher's thread)
    equal --> commit          different, refused or late --> the load fails

Exists only with ``kv_checksum`` on. Nothing is ever used that was to be compared and was not.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from kvlease.config import Settings
from kvlease.core.checksums import (
    blocks_at,
    check_bytes,
    differing_regions,
    positions_to_check,
    without_last,
)
from kvlease.core.ids import Incarnation, Rank
from kvlease.core.loads import FailureCause, LoadState
from kvlease.core.messages import AnyReply, Checksum, Checksums, Gone
from kvlease.core.runs import Ids, block_runs
from kvlease.worker.open_loads import OpenLoads
from kvlease.worker.pulls import Pull

if TYPE_CHECKING:
    from kvlease.worker.puller import Local


class Hashing(Protocol):
    """What is used of :class:`kvlease.worker.hasher.Hasher`."""

    def submit(self, blocks: Sequence[Ids], tell: Callable[[list[int] | str], None]) -> Any:
        """Compute the checksums of ``blocks`` elsewhere; a job with ``is_wanted``."""


@dataclass(eq=False)
class Check:
    """One load's comparison; it also names the call to the producer. ``theirs`` are the producer's checksums.

    ``read_at`` is when the last byte had arrived.
    """

    pull: Pull
    positions: list[Ids]
    theirs: list[int] | None = None
    read_at: float | None = None
    job: Any = field(default=None, repr=False)

    def __repr__(self) -> str:
        return f"<Check {self.pull.order.load} blocks={self.num_blocks} answered={self.theirs is not None}>"

    @property
    def num_blocks(self) -> int:
        """How many blocks are compared, over all KV groups."""
        return sum(len(group) for group in self.positions)

    def drop(self) -> None:
        """The load is over: nobody waits for an answer any more."""
        self.pull.source.peer.cancel(self)
        if self.job is not None:
            self.job.is_wanted = False


class Checks:
    """All comparisons of one rank, in the transfer thread. ``counts`` only grow.

    ``commit`` goes on with a load whose bytes are right. ``wake`` is called from another thread when there is something
    for :meth:`step`.
    """

    def __init__(
        self,
        settings: Settings,
        rank: Rank,
        local: Local,
        loads: OpenLoads,
        hashing: Hashing | None,
        commit: Callable[[Pull, float], None],
        wake: Callable[[], None],
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._settings, self._rank, self._local, self._loads = settings, rank, local, loads
        self._hashing, self._commit, self._wake = hashing, commit, wake
        self._told: deque[tuple[Check, list[int] | str]] = deque()  # by the hasher's thread

    def ask(self, pull: Pull, now: float) -> None:
        """The load's pages are about to be read: ask the producer for its checksums."""
        extent, order = self._settings.kv_checksum, pull.order
        if self._hashing is None or extent == "off":
            return
        seed = f"{order.reader} {self._rank}".encode()
        positions = positions_to_check(order, self._local.block_sizes, self._local.null_block, extent, seed)
        check = Check(pull, positions)
        if not check.num_blocks:
            return
        pull.check = check
        self._call(check, now, self._allowed_s(check))

    def ask_again(self, check: Check, now: float) -> bool:
        """An answer has not come in time. Whether there is more: that of a commit, from when the last byte arrived."""
        since = now if check.read_at is None else check.read_at
        left_s = since + self._allowed_s(check) - now
        if check.pull.state.is_terminal or left_s <= 0:
            return False
        self._call(check, now, left_s)
        return True

    def answered(self, check: Check, reply: AnyReply, now: float) -> None:
        """The producer answered."""
        if check.pull.state.is_terminal:
            return
        match reply:
            case Checksums(sums=sums, is_whole=is_whole):
                check.theirs = sums
                if not is_whole:
                    check.positions = without_last(check.positions, check.pull.order.remote_blocks)
                self.go_on(check, now)
            case Gone():
                self._loads.fail_gone(check.pull, reply, now)
            case _:
                text = f"answered the question for checksums with {type(reply).__name__}: {reply}"
                self._loads.fail(check.pull, FailureCause.PEER_CONFUSED, text[:300], now)

    def read(self, check: Check, now: float) -> None:
        """The load's last byte has arrived."""
        check.read_at = now
        self.go_on(check, now)

    def go_on(self, check: Check, now: float) -> None:
        """Compute our own checksums, if all is read and the producer's are here."""
        pull = check.pull
        if pull.state is not LoadState.COMMITTING or check.theirs is None or self._hashing is None:
            return
        if not check.num_blocks:  # the lease has one block, and the producer may still write to it
            self.counts["checksums|left_out"] += 1
            self._commit(pull, now)
            return
        blocks = blocks_at(check.positions, pull.order.local_blocks)
        check.job = self._hashing.submit(blocks, lambda found: self._tell(check, found))

    def step(self, now: float) -> None:
        """Commit or fail the loads whose own checksums are there."""
        while self._told:
            check, ours = self._told.popleft()
            if check.pull.state is LoadState.COMMITTING:
                self._loads.guard(check.pull, partial(self._judge, check, ours), now)

    def _allowed_s(self, check: Check) -> float:
        return self._settings.check_budget_s(check_bytes(self._local.pages, check.positions))

    def _call(self, check: Check, now: float, timeout_s: float) -> None:
        order, rank = check.pull.order, self._rank
        runs = [block_runs(group.tolist()) for group in check.positions]

        def request(seq: int, to: Incarnation) -> Checksum:
            return Checksum(
                seq=seq, to=to, lease=order.lease, token=order.token, reader=order.reader, rank=rank, positions=runs
            )

        check.pull.source.peer.call(check, request, now, timeout_s)

    def _tell(self, check: Check, found: list[int] | str) -> None:
        self._told.append((check, found))
        self._wake()

    def _judge(self, check: Check, ours: list[int] | str, _: Pull, now: float) -> None:
        theirs = check.theirs or []
        if isinstance(ours, str):
            self._loads.fail(check.pull, FailureCause.INTERNAL, f"our own checksums: {ours}", now)
            return
        wrong = differing_regions(ours, theirs)
        self.counts["checksums|differ" if wrong else "checksums|equal"] += 1
        self.counts["bytes_checked"] += check_bytes(self._local.pages, check.positions)
        if not wrong:
            self._commit(check.pull, now)
            return
        pairs = [f"{at}: {_hex(ours, at)} here, {_hex(theirs, at)} at the producer" for at in wrong[:4]]
        text = (
            f"rank {self._rank}: the checksums of {len(wrong)} of {len(ours)} regions differ over {check.num_blocks} "
            f"blocks; region {'; region '.join(pairs)}"
        )
        self._loads.fail(check.pull, FailureCause.CHECKSUM, text, now)


def _hex(sums: Sequence[int], at: int) -> str:
    return f"{sums[at]:08x}" if at < len(sums) else "none"
