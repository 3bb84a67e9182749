"""The transfer thread of one worker process: it owns the NIXL agent and the channel, and nobody else calls either.

It is never busy for its own sake. While reads are posted it looks often; while leases of ours are out it calls NIXL
every two milliseconds, which lets peers connect and serves transports that need our side (no progress thread spins
for that); else it sleeps until a message comes. Whatever goes wrong in one turn is logged, counted and forgotten: the
next turn comes.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

import torch

from kvlease.config import Settings
from kvlease.core.loads import FailureCause
from kvlease.core.messages import RankInfo
from kvlease.core.orders import Orders, Reports
from kvlease.logs import RateLimitedLog
from kvlease.worker.agent import Agent
from kvlease.worker.checks import Hashing
from kvlease.worker.outbox import Outbox
from kvlease.worker.puller import Local, Puller
from kvlease.worker.regions import Layout, pages_of, strided_rows, to_wire
from kvlease.worker.sources import Identity, Link

logger = logging.getLogger(__name__)

TICK_SERVING_S: Final = 0.002
"""How long NIXL may wait for us while leases of ours are out."""

TICK_IDLE_S: Final = 0.1
TICK_LOADING_S: Final = 0.01

REST_S: Final = 0.001
"""How long a step without a model may be drawn out: about as long as vLLM itself sleeps after one. Whoever arrives
meanwhile waits for the step to end.
"""

REST_CROWDED_S: Final = 0.01
"""The same where CPUs are few: what such steps cost is taken from the reads they wait for."""

FEW_CPUS: Final = 4
"""An engine has three or four processes that want to run."""

SPIN_S: Final = 0.001
"""A posted read is asked for without a pause for so long; most of what is near is over by then."""

PAUSE_S: Final = 0.0001
"""The pause between two looks at a read that takes longer."""

_AFTER_ERROR_S: Final = 0.05
_PUBLISH_S: Final = 0.05
_SETTLE_AT_END_S: Final = 1.0


class TransferThread:
    """See the module. All methods are for other threads; orders go in and reports come out without waiting."""

    def __init__(
        self,
        *,
        identity: Identity,
        settings: Settings,
        layout: Layout,
        block_sizes: Sequence[int],
        make_agent: Callable[[], Agent],
        make_link: Callable[[], Link],
        null_block: int | None = None,
        hashing: Hashing | None = None,
    ) -> None:
        self._identity, self._settings, self._layout = identity, settings, layout
        self._block_sizes, self._null_block = list(block_sizes), null_block
        self._make_agent, self._make_link, self._hashing = make_agent, make_link, hashing
        self._outbox = Outbox()
        self._rest_s = REST_CROWDED_S if len(allowed_cpus()) <= FEW_CPUS else REST_S
        self._orders: deque[Orders] = deque()
        self._leases_live = 0
        self._stopping = False
        self._started = threading.Event()
        self._error: BaseException | None = None
        self._info: RankInfo | None = None
        self._link: Link | None = None
        self._agent: Agent | None = None
        self._puller: Puller | None = None
        self._log = RateLimitedLog(logger)
        self._busy_since: float | None = None
        self._publish_at = 0.0
        self._thread = threading.Thread(target=self._run, name="kvlease-transfer", daemon=True)

    def start(self) -> RankInfo:
        """Start the thread and wait until our memory is registered; what peers need to know of this rank.

        Raises:
            AgentError: NIXL cannot be used or does not take the memory.
        """
        self._thread.start()
        self._started.wait()
        if self._error is not None:
            self._thread.join()
            raise self._error
        assert self._info is not None
        return self._info

    @property
    def is_alive(self) -> bool:
        """Whether orders are still taken."""
        return self._thread.is_alive() and not self._stopping

    def take_orders(self, orders: Orders) -> None:
        """Queue one step's orders. Ended leases come back in the next reports."""
        for lease in orders.ended:
            self._outbox.sent(lease)
        has_begun = orders.leases_live > 0 and self._leases_live == 0
        self._leases_live = orders.leases_live
        if orders.loads or orders.aborts or orders.greet:
            if not self.is_alive:
                self._refuse(orders)
                return
            self._orders.append(orders)
            has_begun = True
        if has_begun and self._link is not None and self.is_alive:
            self._link.wake()

    def rest(self) -> None:
        """Wait a moment, or until a load is reported. Only for a step that has nothing else to do."""
        self._outbox.wait(self._rest_s)

    def take_reports(self) -> Reports:
        """What happened since the last call."""
        return self._outbox.take()

    def stats(self) -> dict[str, float]:
        """Counters since the start, and gauges."""
        return self._outbox.stats()

    def shutdown(self, timeout_s: float = 5.0) -> bool:
        """Fail open loads, let posted reads end (bounded), unregister our memory; whether that was done in time."""
        self._stopping = True
        if self._thread.is_alive():
            if self._link is not None:
                self._link.wake()
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # In the thread

    def _run(self) -> None:
        widen_cpus()
        try:
            puller = self._set_up()
        except BaseException as error:
            self._error = error
            return
        finally:
            self._started.set()
        while not self._stopping:
            try:
                self._turn(puller)
            except Exception as error:
                text = "the transfer thread goes on after this"
                self._log("turn", time.monotonic(), text, level=logging.ERROR, trace=error)
                time.sleep(_AFTER_ERROR_S)
        try:
            self._tear_down(puller)
        except Exception:
            logger.exception("the transfer thread could not end cleanly")

    def _set_up(self) -> Puller:
        use_device(self._layout)
        agent = self._agent = self._make_agent()
        agent.register(self._layout.ranges, self._layout.memory)
        prepared = agent.prepare(None, strided_rows(self._layout.regions), self._layout.memory)
        self._info = RankInfo(
            rank=self._identity.rank,
            agent_metadata=agent.metadata(),
            regions=[to_wire(region) for region in self._layout.regions],
            memory=self._layout.memory,
            checksum=self._identity.checksum,
        )
        self._link = self._make_link()
        self._puller = Puller(
            identity=self._identity,
            settings=self._settings,
            agent=agent,
            link=self._link,
            local=Local(pages_of(self._layout.regions), self._block_sizes, prepared, self._null_block),
            outbox=self._outbox,
            clock=time.monotonic,
            hashing=self._hashing,
        )
        return self._puller

    def _turn(self, puller: Puller) -> None:
        assert self._link is not None
        assert self._agent is not None
        self._link.poll(self._patience_s(puller))
        while self._orders:
            puller.take(self._orders.popleft(), time.monotonic())
        was_idle, now = puller.is_idle, time.monotonic()
        puller.step(now)
        if now >= self._publish_at or (puller.is_idle and not was_idle):
            self._publish_at = now + _PUBLISH_S
            self._outbox.publish(puller.stats())
        self._agent.tick()

    def _patience_s(self, puller: Puller) -> float:
        """How long to wait for messages. While reads are busy the pause is made here: a poll counts in milliseconds."""
        if self._orders or puller.has_work:
            return 0.0
        if puller.is_reading:
            now = time.monotonic()
            self._busy_since = self._busy_since or now
            if now - self._busy_since > SPIN_S:
                time.sleep(PAUSE_S)
            return 0.0
        self._busy_since = None
        if self._leases_live > 0:
            return TICK_SERVING_S
        return TICK_IDLE_S if puller.is_idle else TICK_LOADING_S

    def _tear_down(self, puller: Puller) -> None:
        assert self._link is not None
        assert self._agent is not None
        while self._orders:
            self._refuse(self._orders.popleft())
        puller.stop(time.monotonic())
        until = time.monotonic() + _SETTLE_AT_END_S
        while not puller.is_settled and time.monotonic() < until:
            puller.step(time.monotonic())
            time.sleep(PAUSE_S)
        puller.close()
        self._link.close()
        if puller.is_settled:
            self._agent.close()
        else:
            logger.error("reads are still busy at shutdown; our memory stays registered until the process ends")
        self._outbox.publish(puller.stats())

    def _refuse(self, orders: Orders) -> None:
        for order in orders.loads:
            self._outbox.received(order.load, FailureCause.SHUTDOWN)


def use_device(layout: Layout) -> None:
    """Make the GPU that holds the KV current in the calling thread: CUDA remembers it by thread, and UCX asks CUDA."""
    if layout.memory == "VRAM":
        torch.cuda.set_device(layout.ranges[0].device_id)
        torch.cuda.synchronize()  # selecting the first GPU is a no-op until something is asked of it


def allowed_cpus() -> set[int]:
    """Where this process's parent may run, and so this process: an engine pins its own threads to few cores.

    The parent still has what the user allowed; a container's or cgroup's limits hold anyway.
    """
    own = os.sched_getaffinity(0)
    try:
        return own | os.sched_getaffinity(os.getppid())
    except OSError as error:
        logger.info("only the engine's own CPUs are known: %s", error)
        return own


def widen_cpus() -> None:
    """Let the calling thread run wherever its process may."""
    try:
        os.sched_setaffinity(0, allowed_cpus())
    except OSError as error:
        logger.info("the transfer thread keeps its CPUs: %s", error)
