"""The worker half: what one rank of an engine does about KV transfers, behind calls that never wait for a peer."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence

from kvlease.config import Settings
from kvlease.core.checksums import ALGORITHM
from kvlease.core.ids import EngineId, Rank
from kvlease.core.messages import RankInfo
from kvlease.core.orders import Orders, Reports
from kvlease.core.silence import PeerTiming
from kvlease.net.channel import Channel
from kvlease.net.hashing import HasherAddress
from kvlease.worker.agent import Agent, NixlAgent
from kvlease.worker.hasher import Hasher
from kvlease.worker.regions import Layout
from kvlease.worker.sources import Identity, Link
from kvlease.worker.transfer import TransferThread, use_device, widen_cpus

logger = logging.getLogger(__name__)

NULL_BLOCK = 0
"""The block id that vLLM puts where a block holds nothing."""


class WorkerHalf:
    """Register once, then exchange orders for reports at every step; shut down once.

    ``make_agent`` is for tests and for other transfer engines.
    """

    def __init__(
        self,
        *,
        settings: Settings,
        engine_id: EngineId,
        rank: Rank,
        of_ranks: int,
        factors: Mapping[str, str],
        fingerprint: str,
        make_agent: Callable[[Settings], Agent] = NixlAgent,
    ) -> None:
        self._settings = settings
        checksum = ALGORITHM if settings.kv_checksum != "off" else ""
        self._identity = Identity(engine_id, rank, of_ranks, dict(factors), fingerprint, checksum)
        self._make_agent = make_agent
        self._thread: TransferThread | None = None
        self._hasher: Hasher | None = None
        self._info: RankInfo | None = None

    def register(self, layout: Layout, block_sizes: Sequence[int], null_block: int | None = NULL_BLOCK) -> None:
        """Start the transfer thread and wait until it has registered our memory. ``block_sizes``: tokens, by KV group.

        Raises:
            AgentError: NIXL cannot be used or does not take the memory.
        """
        if self._identity.checksum:
            self._hasher = Hasher(layout, lambda: _prepare(layout))
        self._thread = TransferThread(
            identity=self._identity,
            settings=self._settings,
            layout=layout,
            block_sizes=block_sizes,
            make_agent=lambda: self._make_agent(self._settings),
            make_link=self._make_link,
            null_block=null_block,
            hashing=self._hasher,
        )
        self._info = self._thread.start()
        if self._hasher is not None:
            self._hasher.start()

    def rank_info(self) -> RankInfo:
        """What the endpoint tells peers about this rank; after :meth:`register`."""
        assert self._info is not None, "register first"
        return self._info

    def hasher_address(self) -> HasherAddress | None:
        """Where the endpoint asks for checksums of this rank's pages; None with ``kv_checksum`` off."""
        return self._hasher.address if self._hasher is not None else None

    def take_orders(self, orders: Orders) -> None:
        """Queue one step's orders for the transfer thread."""
        if self._thread is not None:
            self._thread.take_orders(orders)

    def rest(self) -> None:
        """Wait until a load is reported, a few milliseconds at most. Only for a step that has nothing else to do."""
        if self._thread is not None:
            self._thread.rest()

    def take_reports(self) -> Reports:
        """What happened since the last call."""
        return self._thread.take_reports() if self._thread is not None else Reports()

    def take_stats(self) -> dict[str, float]:
        """Counters since the start, and gauges, by the names of the metrics."""
        return self._thread.stats() if self._thread is not None else {}

    def shutdown(self) -> None:
        """Fail open loads, let posted reads end (bounded), unregister our memory. Reports can still be taken."""
        if self._thread is not None:
            self._thread.shutdown()
        if self._hasher is not None and not self._hasher.shutdown():
            logger.error("the checksum thread is still busy; leaving it behind")

    def _make_link(self) -> Link:
        timing = PeerTiming(
            peer_timeout_s=self._settings.peer_timeout_s, ping_interval_s=self._settings.ping_interval_s()
        )
        return Channel(timing, time.monotonic)


def _prepare(layout: Layout) -> None:
    """What a thread needs that reads pages beside the engine's."""
    widen_cpus()
    use_device(layout)
