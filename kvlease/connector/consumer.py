"""The consumer's part of the scheduler half: follows each load from its request's arrival to its single report.

One :class:`Load` holds one load; the table in :mod:`kvlease.core.loads` says what can happen to it. It enters the one
dictionary in :meth:`ConsumerHalf.admit` and leaves it when vLLM knows the outcome, so a request that vLLM asks about
again (after a failed load, after a preemption) is simply not there any more and is prefilled locally.

Claims, renewals and releases are the leaser thread's, reads and commits the workers'. Nothing here waits for either,
but for one thing: a claim that was just made has the time of a round trip to be answered.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import count
from typing import TYPE_CHECKING, Final

from kvlease.config import Settings
from kvlease.connector.load import Load
from kvlease.connector.metrics import Samples, metric_key
from kvlease.connector.quarantine import Quarantine
from kvlease.connector.reports import WorkerReport, reported_by_us
from kvlease.connector.requests import has_failed, is_sample, prompt_identity
from kvlease.core.handoff import Handoff, HandoffError, parse_handoff, wants_load
from kvlease.core.ids import ChannelId, Incarnation, LeaseId, LeaseToken, LoadId, PeerKey, ReaderId, reader_id
from kvlease.core.loads import FailureCause, LoadEvent, LoadState
from kvlease.core.orders import NO_ORDERS, LoadOrder, Orders
from kvlease.net.leaser import AcquireFailed, AcquireGranted, LeaseGone, Leaser

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger("kvlease.consumer")

CLAIM_WAIT_S: Final = 0.01
"""How long a new claim may hold up the step that would otherwise be scheduled without it. A round trip is shorter, and
the step mostly longer: its request would wait for all of it.
"""

_SLOW_S: Final = 10.0
"""How long nobody waits for a producer that did not answer in that time."""

_OUR_OWN: Final = "own_lease"
_ALL_LOCAL: Final = "prefix_hit"
_LOST_NOTHING: Final = frozenset({FailureCause.GONE_COMMITTED})


class ConsumerHalf:
    """What one consumer engine's scheduler thread does about loads."""

    def __init__(
        self,
        settings: Settings,
        leaser: Leaser,
        channel: ChannelId,
        own_incarnation: Incarnation,
        block_sizes: Sequence[int],
        *,
        recompute: bool,
        may_load: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._leaser = leaser
        self._channel = channel
        self._own_incarnation = own_incarnation
        self._block_sizes = block_sizes
        self._recompute = recompute
        self._may_load = may_load
        self._clock = clock
        self._loads: dict[LoadId, Load] = {}
        self._is_claiming = False  # a request that could run otherwise waits for its claim
        self._slow_until: dict[PeerKey, float] = {}
        self._claim_numbers = count(1)
        self._orders: list[LoadOrder] = []
        self._aborts: list[LoadId] = []
        self._greet: dict[PeerKey, None] = {}
        self._quarantine = Quarantine()
        self.counters: Counter[str] = Counter()  # they only grow, so their total tells whether they changed
        self._samples: Samples = {}
        self._sampled: tuple[int, int, int] | None = None

    def bind_pool(self, pool: BlockPool) -> None:
        """The pool whose blocks a quarantine takes references on."""
        self._quarantine.bind_pool(pool)

    # What vLLM tells and asks, in the order of a request's life

    def admit(self, request: Request) -> None:
        """A request arrived: claim the lease its handoff names, long before it is scheduled."""
        params = request.kv_transfer_params
        if not wants_load(params):
            return
        load_id = LoadId(request.request_id)
        is_clean_up = getattr(request, "abort_immediately", False)
        try:
            handoff = parse_handoff(params)
        except HandoffError as error:
            if not is_clean_up:  # else of a request that was counted
                self.counters[metric_key("refused_input", error.reason)] += 1
                logger.warning("request %s: refused its handoff: %s", load_id, error)
                self._loads[load_id] = self._failed(load_id, None, error.cause)
            return
        if is_clean_up:
            self._leaser.release_unclaimed(handoff.peer, handoff.lease, handoff.token)
            return
        if handoff.incarnation == self._own_incarnation:
            # Our own prefix cache is the better copy; what it lost is prefilled, and the blocks go back at once.
            self._leaser.release_unclaimed(handoff.peer, handoff.lease, handoff.token)
            self._count(_OUR_OWN)
            return
        if not self._may_load:
            # vLLM keeps loads out of blocks that a running step still writes for consumer roles only.
            self._loads[load_id] = self._failed(load_id, handoff, FailureCause.WRONG_ROLE)
            self._log_failure(self._loads[load_id])
            return
        prompt = prompt_identity(request, handoff.num_tokens)
        if prompt is None:
            logger.warning(
                "request %s: its handoff covers %d tokens, its prompt has %d: not the same prompt",
                load_id, handoff.num_tokens, request.num_prompt_tokens,
            )  # fmt: skip
            self._loads[load_id] = self._failed(load_id, handoff, FailureCause.GONE_MISMATCH)
            return
        claim = LoadId(f"{load_id}#{next(self._claim_numbers)}")
        self._loads[load_id] = Load(load_id, handoff, LoadState.ACQUIRING, self._clock(), claim)
        self._leaser.acquire(claim, handoff.peer, handoff.lease, handoff.token, prompt, has_siblings=is_sample(load_id))
        self._greet[handoff.peer] = None

    def match(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens beyond ``num_computed_tokens`` (block-aligned) to load; None while the claim is under way."""
        self.drain_leaser()
        load = self._loads.get(LoadId(request.request_id))
        if load is None:
            return 0, False
        if load.state is LoadState.ACQUIRING:
            self._await_claim(load)
        if load.state is LoadState.ACQUIRING:
            # The leaser answers within acquire_timeout_s; twice that only bounds a leaser that died.
            if self._clock() < load.asked_at + 2 * self._settings.acquire_timeout_s:
                self._is_claiming = True
                return None, False
            load.fail(FailureCause.ACQUIRE_TIMEOUT)
            self._log_failure(load)
            self._leaser.release(load.claim)
        load.start_token = num_computed_tokens
        if load.state is LoadState.FAILED:
            return self._match_failed(load, request, num_computed_tokens)
        if load.state is not LoadState.GRANTED or load.granted is None:
            return 0, False
        num_tokens = min(load.granted.num_tokens, request.num_prompt_tokens) - num_computed_tokens
        if num_tokens <= 0:
            self._drop_unread(load)
            return 0, False
        return num_tokens, True

    def dispatch(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Blocks were allocated: order the pull, or let go when vLLM wants nothing from outside after all."""
        load = self._loads.get(LoadId(request.request_id))
        if load is None or load.state is LoadState.PULLING:
            return
        if num_external_tokens == 0:
            self._drop_unread(load)
            return
        first_block = load.start_token // self._block_sizes[0]
        load.blocks = [group[first_block:] for group in blocks.blocks]
        if load.cause is None:
            load.step(LoadEvent.DISPATCH)
            self._orders.append(self._order(load, blocks, load.start_token + num_external_tokens))
        else:
            load.state = LoadState.PULLING  # a load that its workers fail at once, so that the policy `fail` sees it
            self._orders.append(self._doomed(load, load.cause))

    def finish(self, request: Request) -> None:
        """vLLM is done with a request (aborted, failed or served): let go of what its load still holds."""
        load = self._loads.get(LoadId(request.request_id))
        if load is None:
            return
        if load.state is not LoadState.PULLING:
            self._drop_unread(load, outcome="aborted")
            return
        if not has_failed(request):
            self._aborts.append(load.id)
        self._leaser.release(load.claim)

    def take_orders(self) -> Orders:
        """Loads to start, loads to abort and producers to greet, since the last step."""
        self.drain_leaser()
        if not (self._orders or self._aborts or self._greet):
            return NO_ORDERS
        orders = Orders(loads=self._orders, aborts=self._aborts, greet=list(self._greet))
        self._orders, self._aborts, self._greet = [], [], {}
        return orders

    def take_claiming(self) -> bool:
        """Whether a request that could run otherwise waits for its claim, since the last step."""
        is_claiming, self._is_claiming = self._is_claiming, False
        return is_claiming

    def take_reports(self, output: KVConnectorOutput) -> None:
        """The workers reported: hold back blocks that may still be written to, drop stale ids, settle the loads."""
        report = output.kv_connector_worker_meta
        if isinstance(report, WorkerReport):
            for load_id, cause in report.failed.items():
                if (load := self._loads.get(load_id)) is not None:
                    load.cause = load.cause or cause
            for load_id, ranks in report.unsettled.items():
                self._hold(load_id, ranks)
        if output.finished_recving:
            self._take_received(output.finished_recving, reported_by_us(output), output.failed_recving)
        if isinstance(report, WorkerReport):
            for load_id, ranks in report.settled.items():
                self._let_go(load_id, ranks)

    def _take_received(self, received: set[str], ours: set[str], failed: set[str]) -> None:
        """Settle the loads among ``received``, and drop from it, in place, what vLLM must not hear (now).

        That is a report of ours about no load, and a word of another connector about a load of ours: our workers may
        still write to its blocks.
        """
        wrong = {load_id for load_id in received if (load_id in ours) is not self._is_pulling(load_id)}
        if wrong:
            logger.error("dropped %d wrong reports of received requests: %s", len(wrong), sorted(wrong)[:8])
            received -= wrong
        for load_id in sorted(received & ours):
            load = self._loads[LoadId(load_id)]
            if load.cause is FailureCause.RESET and load_id not in failed:
                received.remove(load_id)  # read before the reset, told after it: reported again, as failed
                self._orders.append(self._doomed(load, FailureCause.RESET))
            else:
                self._settle(self._loads.pop(load.id), failed=load_id in failed)

    def _is_pulling(self, load_id: str) -> bool:
        load = self._loads.get(LoadId(load_id))
        return load is not None and load.state is LoadState.PULLING

    def reset(self) -> None:
        """The cache is being reset: what is under way must not end up in it."""
        for load in list(self._loads.values()):
            if load.state in (LoadState.ACQUIRING, LoadState.GRANTED):
                load.fail(FailureCause.RESET)
                self._leaser.release(load.claim)
            elif load.state is LoadState.PULLING:
                load.cause = load.cause or FailureCause.RESET
                self._aborts.append(load.id)

    def close(self) -> None:
        """Stop claiming and renewing."""
        self._leaser.close()

    @property
    def has_loads(self) -> bool:
        """Whether a request waits for its load."""
        return bool(self._loads)

    @property
    def is_quarantining(self) -> bool:
        """Whether blocks are held back for reads that have not ended."""
        return not self._quarantine.is_empty

    def samples(self) -> Samples:
        """The counters and gauges of this half: the same object until something changed."""
        held_back = len(self._quarantine)
        marks = (self.counters.total(), len(self._loads), held_back)
        if marks != self._sampled:
            self._sampled = marks
            self._samples = {**self.counters, "loads_in_flight": len(self._loads), "quarantined_blocks": held_back}
        return self._samples

    def leaser_samples(self) -> Samples:
        """The leaser thread's counters, likewise."""
        return self._leaser.stats()

    # Claims

    def _await_claim(self, load: Load) -> None:
        """Give a claim that was just made its time, unless its producer let such a wait pass in vain a while ago.

        All that arrived for this step have the same time, so however many they are, the step waits once.
        """
        assert load.handoff is not None
        peer, until = load.handoff.peer, load.asked_at + CLAIM_WAIT_S
        if self._clock() >= until or self._clock() < self._slow_until.get(peer, 0.0):
            return
        while load.state is LoadState.ACQUIRING and (left_s := until - self._clock()) > 0:
            if not self._leaser.wait(left_s):
                break
            self.drain_leaser()
        if load.state is LoadState.ACQUIRING:
            now = self._clock()
            self._slow_until = {slow: over for slow, over in self._slow_until.items() if now < over}
            self._slow_until[peer] = now + _SLOW_S

    def drain_leaser(self) -> None:
        """Take in what the leaser thread learned."""
        for result in self._leaser.take_results():
            load = self._loads.get(LoadId(result.load.rpartition("#")[0]))
            if load is None or load.claim != result.load:
                continue
            match result:
                case AcquireGranted() if load.state is LoadState.ACQUIRING:
                    load.step(LoadEvent.GRANT)
                    load.granted = result.granted
                case AcquireFailed() if load.state is LoadState.ACQUIRING:
                    load.fail(result.cause)
                    self._log_failure(load)
                case LeaseGone() if load.state in (LoadState.ACQUIRING, LoadState.GRANTED):
                    load.fail(FailureCause(f"gone_{result.why.value}"))
                    self._log_failure(load)
                case _:
                    pass

    def _match_failed(self, load: Load, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        missing = request.num_prompt_tokens - num_computed_tokens
        if self._recompute or missing <= 0 or load.cause in _LOST_NOTHING:
            self._count("failed", load.cause)
            del self._loads[load.id]
            return 0, False
        return min(missing, self._block_sizes[0]), True

    def _failed(self, load_id: LoadId, handoff: Handoff | None, cause: FailureCause) -> Load:
        return Load(load_id, handoff, LoadState.FAILED, asked_at=0.0, claim=LoadId(""), cause=cause)

    def _drop_unread(self, load: Load, outcome: str = _ALL_LOCAL) -> None:
        if load.state in (LoadState.ACQUIRING, LoadState.GRANTED):
            self._leaser.release(load.claim)
        if load.state is LoadState.FAILED:
            outcome = "failed"
        self._count(outcome, load.cause)
        del self._loads[load.id]

    # Pulls

    def _order(self, load: Load, blocks: KVCacheBlocks, end_token: int) -> LoadOrder:
        assert load.handoff is not None
        assert load.granted is not None
        return LoadOrder(
            load=load.id,
            lease=load.handoff.lease,
            token=load.handoff.token,
            reader=reader_id(self._channel, load.claim),
            peer=load.handoff.peer,
            start_token=load.start_token,
            end_token=end_token,
            local_blocks=blocks.get_block_ids(),
            remote_blocks=load.granted.blocks,
        )

    def _doomed(self, load: Load, cause: FailureCause) -> LoadOrder:
        """The order to report the load as failed, and nothing else."""
        return LoadOrder(
            load=load.id, lease=LeaseId(""), token=LeaseToken(b""), reader=ReaderId(""), peer=None,
            start_token=0, end_token=0, local_blocks=(), remote_blocks=[], doomed=cause,
        )  # fmt: skip

    def _settle(self, load: Load, *, failed: bool) -> None:
        if not failed:
            self._leaser.finish(load.claim)
            self._count("done")
            return
        self._leaser.release(load.claim)
        if load.cause is FailureCause.ABORTED:
            self._count("aborted")
            return
        load.cause = load.cause or FailureCause.INTERNAL
        self._count("failed", load.cause)
        self._log_failure(load)

    def _count(self, outcome: str, cause: FailureCause | None = None) -> None:
        self.counters[metric_key("loads", outcome, cause.value if cause else "")] += 1

    def _log_failure(self, load: Load) -> None:
        if load.is_logged:
            return
        load.is_logged = True
        then = "it is recomputed here" if self._recompute else "the request fails (kv_load_failure_policy is fail)"
        cause = load.cause.value if load.cause else "unknown"
        logger.warning(
            "request %s: its KV could not be loaded from %s, cause %s; %s",
            load.id, load.handoff.peer if load.handoff else "anywhere", cause, then,
        )  # fmt: skip

    # Quarantine

    def _hold(self, load_id: LoadId, ranks: int) -> None:
        load = self._loads.get(load_id)
        if load is None:
            logger.error("request %s: no blocks to quarantine", load_id)
            return
        blocks = [block for group in load.blocks for block in group if not block.is_null]
        self._quarantine.hold(load_id, [] if load.is_held else blocks, ranks)
        load.is_held = True

    def _let_go(self, load_id: LoadId, ranks: int) -> None:
        if self._quarantine.let_go(load_id, ranks) and (load := self._loads.get(load_id)) is not None:
            load.is_held = False
