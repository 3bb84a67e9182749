"""Where the scheduler's thread and the endpoint's thread meet: orders go one way, ended leases and numbers come back.

The ledger keeps the promise that matters when things break: a grant that was accepted is reported as ended exactly
once, whatever becomes of the endpoint's thread. Nothing in here waits: the lock is held for a few dictionary
operations.
"""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvlease.core.greeting import Site
from kvlease.core.ids import LeaseId, LeaseToken
from kvlease.core.leases import Ended
from kvlease.core.messages import GoneReason
from kvlease.net.hashing import HasherAddress


class GrantRefusedError(ValueError):
    """No lease was granted and none will end: free the blocks as if no one had asked for them."""


@dataclass(frozen=True)
class GrantItem:
    """A grant as the scheduler's thread has it at hand; digest and block runs are computed by the endpoint's thread.

    ``token_ids`` must not change in its first ``num_tokens`` any more. ``block_ids``: one list for each KV group.
    ``is_settled``: see :class:`~kvlease.core.lease.Grant`.
    """

    lease: LeaseId
    token: LeaseToken = field(repr=False)
    token_ids: Sequence[int] = field(repr=False)
    num_tokens: int
    lora: str | None
    cache_salt: str | None = field(repr=False)
    mm_hashes: Sequence[str]
    block_ids: Sequence[Sequence[int]] = field(repr=False)
    is_settled: bool = True


@dataclass(frozen=True)
class RevokeAll:
    """End every lease that was granted before this order."""


@dataclass(frozen=True)
class Watch:
    """Revoke everything for good when this lifeline is severed."""

    lifeline: socket.socket


@dataclass(frozen=True)
class AskHashers:
    """From now on the workers, by rank, are asked for checksums of their pages."""

    addresses: Sequence[HasherAddress]


Order = GrantItem | RevokeAll | Watch | AskHashers


@dataclass(frozen=True)
class Snapshot:
    """The endpoint's numbers at one moment; ``oldest_granted_at`` is of the oldest live lease, by the clock."""

    counters: dict[str, float] = field(default_factory=dict)
    gauges: dict[str, float] = field(default_factory=dict)
    oldest_granted_at: float | None = None


class Ledger:
    """Orders for the endpoint, accepted grants that have not been reported, and reports that were not fetched yet.

    Three attributes are simply replaced, each by one side only: ``site`` and ``is_closing`` are told to the endpoint's
    thread, ``snapshot`` by it.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._orders: deque[Order] = deque()
        self._granted_at: dict[LeaseId, float] = {}  # until its end is fetched
        self._ended: dict[LeaseId, Ended] = {}
        self.site: Site | None = None
        self.is_closing = False
        self.snapshot = Snapshot()
        self._closed_because: str | None = "the endpoint has not been started"

    # For the scheduler's thread (or any other)

    @property
    def num_live(self) -> int:
        """How many accepted grants there are whose end was not fetched."""
        return len(self._granted_at)

    @property
    def is_open(self) -> bool:
        """Whether grants are accepted."""
        return self._closed_because is None

    def grant(self, item: GrantItem) -> None:
        """Accept a grant: its end will be fetched exactly once.

        Raises:
            GrantRefusedError: the ledger is shut, or that name has a lease whose end was not fetched yet.
        """
        with self._lock:
            if self._closed_because is not None:
                raise GrantRefusedError(f"no lease for {item.lease}: {self._closed_because}")
            if item.lease in self._granted_at:
                raise GrantRefusedError(f"no lease for {item.lease}: one of that name has not ended yet")
            self._granted_at[item.lease] = self._clock()
            self._orders.append(item)

    def order(self, order: RevokeAll | Watch | AskHashers) -> None:
        """Queue anything but a grant."""
        self._orders.append(order)

    def take_ended(self) -> list[Ended]:
        """The leases whose end was reported since the last call."""
        if not self._ended:  # the usual case, in each step of the engine
            return []
        with self._lock:
            ended = list(self._ended.values())
            self._ended.clear()
            for one in ended:
                del self._granted_at[one.lease]
        return ended

    # For the endpoint's thread

    def open(self) -> None:
        """Accept grants from now on."""
        self._closed_because = None

    def shut(self, because: str) -> None:
        """Accept no grants from now on; those accepted are still among the orders."""
        with self._lock:
            self._closed_because = self._closed_because or because

    def next_order(self) -> Order | None:
        """The oldest order that was not taken, if there is one."""
        try:
            return self._orders.popleft()
        except IndexError:
            return None

    def drop_orders(self) -> None:
        """Nobody will carry the orders out. Grants among them stay accepted: see :meth:`report_all_revoked`."""
        while (order := self.next_order()) is not None:
            if isinstance(order, Watch):
                order.lifeline.close()

    def report(self, ended: Sequence[Ended]) -> None:
        """These leases are over."""
        if ended:
            with self._lock:
                self._ended.update((one.lease, one) for one in ended)

    def report_revoked(self, lease: LeaseId) -> None:
        """An accepted grant could not be carried out."""
        with self._lock:
            self._revoked(lease)

    def report_all_revoked(self) -> None:
        """Nobody will answer for any lease any more: whatever was not reported is over."""
        with self._lock:
            for lease in self._granted_at:
                if lease not in self._ended:
                    self._revoked(lease)

    def _revoked(self, lease: LeaseId) -> None:
        self._ended[lease] = Ended(lease, GoneReason.REVOKED, self._clock() - self._granted_at[lease])
