"""The endpoint: the producer's side of the wire, in a thread of its own that owns the lease table.

The scheduler's thread only queues grants and fetches ended leases; :mod:`kvlease.net.loop` is what the thread does.
Nothing that a peer sends can stop it; should a bug of ours do it, every lease ends as revoked, and grants are refused.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from kvlease.core.greeting import Site
from kvlease.core.ids import Incarnation
from kvlease.core.leases import Ended, LeaseTiming
from kvlease.core.messages import RankInfo
from kvlease.net.hashing import HasherAddress
from kvlease.net.ledger import AskHashers, GrantItem, GrantRefusedError, Ledger, RevokeAll, Snapshot, Watch
from kvlease.net.lifeline import LifelineAddress, connect
from kvlease.net.loop import Loop
from kvlease.net.router import EndpointError, Router

__all__ = ["Endpoint", "EndpointError", "EndpointStats", "GrantItem", "GrantRefusedError"]

_JOIN_S: Final = 5.0

logger = logging.getLogger("kvlease.endpoint")


@dataclass(frozen=True)
class EndpointStats:
    """What a scrape sees. ``counters`` only grow; ``gauges`` are as of the last thing the endpoint did."""

    counters: dict[str, float]
    gauges: dict[str, float]


class Endpoint:
    """The producer's endpoint. Every public method may be called from any thread, and none of them waits for a peer."""

    def __init__(
        self,
        incarnation: Incarnation,
        timing: LeaseTiming,
        host: str,
        port: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._incarnation = incarnation
        self._address = (host, port)
        self._clock = clock
        self._ledger = Ledger(clock)
        self._router: Router | None = None
        self._thread: threading.Thread | None = None
        self._timing = timing

    def __repr__(self) -> str:
        return f"<Endpoint {self._address[0]}:{self.port} alive={self.is_alive} leases={self.num_live}>"

    @property
    def port(self) -> int:
        """The port that is listened on, once started; what was asked for, before."""
        return self._router.port if self._router else self._address[1]

    @property
    def is_alive(self) -> bool:
        """Whether consumers are answered."""
        return self._thread is not None and self._thread.is_alive() and not self._ledger.is_closing

    @property
    def num_live(self) -> int:
        """How many grants were accepted whose end :meth:`take_ended` has not returned yet."""
        return self._ledger.num_live

    def start(self) -> None:
        """Listen and answer.

        Raises:
            EndpointError: the address cannot be listened on, or the endpoint was started or closed before.
        """
        if self._router is not None or self._ledger.is_closing:
            raise EndpointError("an endpoint starts once")
        self._router = Router(*self._address)
        loop = Loop(self._router, self._ledger, self._incarnation, self._timing, self._clock)
        self._thread = threading.Thread(target=loop.run, name="kvlease-endpoint", daemon=True)
        self._ledger.open()
        self._thread.start()
        logger.info("the kvlease endpoint listens on %s:%d", self._address[0], self.port)

    def grant(self, item: GrantItem) -> None:
        """Lend blocks: queued here, granted before the next message is answered; :meth:`take_ended` tells the end.

        Raises:
            GrantRefusedError: nothing was lent and nothing will end.
        """
        self._ledger.grant(item)
        self._wake()

    def take_ended(self) -> list[Ended]:
        """The leases that ended since the last call, each once: their blocks may be freed."""
        return self._ledger.take_ended()

    def revoke_all(self) -> None:
        """End every lease granted so far, soon; :meth:`take_ended` tells when."""
        self._ledger.order(RevokeAll())
        self._wake()

    def set_ranks(self, ranks: list[RankInfo], factors: dict[str, str], fingerprint: str, enforce: bool) -> None:
        """The workers are up: welcome consumers that fit. ``enforce``: factors other than layout must agree, too."""
        self._ledger.site = Site(tuple(ranks), dict(factors), fingerprint, enforce)

    def watch(self, lifelines: Sequence[LifelineAddress], timeout_s: float = 5.0) -> None:
        """Stop vouching for any page when one of these is severed. Connects here and now, so call it while starting.

        Raises:
            EndpointError: a worker cannot be reached within ``timeout_s`` seconds.
        """
        for address in lifelines:
            try:
                connection = connect(address, timeout_s)
            except OSError as error:
                raise EndpointError(f"the worker's lifeline at {address.host}:{address.port}: {error}") from error
            self._ledger.order(Watch(connection))
        self._wake()
        self._drop_orders_if_stopped()

    def ask_hashers(self, addresses: Sequence[HasherAddress]) -> None:
        """Answer consumers that want checksums by asking these workers, by rank; before they are told of in ranks."""
        self._ledger.order(AskHashers(addresses))
        self._wake()

    @property
    def numbers(self) -> Snapshot:
        """The numbers as the endpoint last published them: the same object until something happened to it."""
        return self._ledger.snapshot

    @property
    def is_accepting(self) -> bool:
        """Whether grants are accepted."""
        return self._ledger.is_open

    def oldest_lease_age_s(self) -> float:
        """The age of the oldest live lease; 0 without any."""
        born = self._ledger.snapshot.oldest_granted_at
        return 0.0 if born is None else max(0.0, self._clock() - born)

    def stats(self) -> EndpointStats:
        """Counters and gauges, all of one moment."""
        snapshot = self._ledger.snapshot
        gauges = {
            "alive": float(self.is_alive),
            "accepting": float(self.is_accepting),
            "oldest_lease_age_s": self.oldest_lease_age_s(),
        }
        return EndpointStats(dict(snapshot.counters), {**snapshot.gauges, **gauges})

    def close(self) -> None:
        """End all leases as revoked and stop answering. A second call does nothing."""
        self._ledger.is_closing = True
        self._ledger.shut("the endpoint is closed")
        self._wake()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_JOIN_S)
            if self._thread.is_alive():
                logger.error("the endpoint's thread is still busy after %.0f s; leaving it behind", _JOIN_S)
        self._drop_orders_if_stopped()

    def _wake(self) -> None:
        if self._router is not None:
            self._router.wake()

    def _drop_orders_if_stopped(self) -> None:
        if self._ledger.is_closing if self._thread is None else not self._thread.is_alive():
            self._ledger.drop_orders()
