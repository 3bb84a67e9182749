"""A small model of vLLM's scheduler around the real halves of kvlease's connector.

It calls the connector's hooks where and in the order in which vLLM 0.32 calls them, and asserts what vLLM asserts:
each of its assertions is one that kills an engine (rule S3).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from kvlease.connector.reports import WorkerReport, keep_sent, reported_by_us
from kvlease.core.ids import LoadId
from kvlease.core.orders import Orders
from tests.sim.memory import Blocks
from tests.sim.requests import BLOCK_SIZE, Outcome, SimRequest, Status
from tests.sim.world import Actor

if TYPE_CHECKING:
    from tests.sim.engine import Life

STEP_S = 0.02
IDLE_STEP_S = 0.25
"""vLLM steps on every millisecond; here a step happens when there may be news, and now and then."""


@dataclass
class StepOutput:
    """What is used of vLLM's ``KVConnectorOutput``."""

    finished_sending: set[str] = field(default_factory=set)
    finished_recving: set[str] = field(default_factory=set)
    failed_recving: set[str] = field(default_factory=set)
    kv_connector_worker_meta: WorkerReport | None = None


NOTHING = StepOutput()
"""What a rank without news reports."""


class Aggregator:
    """Joins the ranks' reports as vLLM does: an id is finished when as many reports as ranks were seen."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._recv: dict[str, int] = {}
        self._send: dict[str, int] = {}
        self._failed: set[str] = set()

    def join(self, outputs: list[StepOutput]) -> StepOutput:
        joined = StepOutput()
        for output in outputs:
            if output is NOTHING:
                continue
            self._count(output.finished_sending, self._send, joined.finished_sending)
            self._count(output.finished_recving, self._recv, joined.finished_recving)
            self._failed |= output.failed_recving
            meta, report = joined.kv_connector_worker_meta, output.kv_connector_worker_meta
            if meta is None:
                joined.kv_connector_worker_meta = report
            elif report is not None:
                joined.kv_connector_worker_meta = meta.aggregate(report)
        joined.failed_recving = self._failed & joined.finished_recving
        self._failed -= joined.failed_recving
        return joined

    def _count(self, ids: set[str], seen: dict[str, int], finished: set[str]) -> None:
        for one in ids:
            seen[one] = seen.get(one, 0) + 1
            if seen[one] == self._ranks:
                del seen[one]
                finished.add(one)


class ModelScheduler:
    """See the module. One per life of an engine; its actor takes a turn at the beginning and at the end of a step."""

    def __init__(self, life: Life, *, recompute: bool) -> None:
        self.life = life
        self.world = life.world
        self.recompute = recompute
        self.requests: dict[str, SimRequest] = {}
        self.waiting: list[SimRequest] = []
        self.running: list[SimRequest] = []
        self._finished_recving: set[str] = set()
        self._failed_recving: set[str] = set()
        self._aggregator = Aggregator(life.engine.ranks)
        self._in_step = False
        self.is_closed = False
        self.actor = Actor(life.core, "scheduler", self._turn)

    @property
    def is_idle(self) -> bool:
        """Whether every request is over and every block is back."""
        return not self.requests and not self.life.consumer.is_quarantining

    def news(self) -> None:
        """Something may have changed for the next step."""
        if self.requests or self.life.consumer.is_quarantining:
            self.actor.wake(self.world.rng.random() * STEP_S)

    # From outside

    def add(self, request: SimRequest) -> bool:
        """A request arrived. False if one of its id is still here: vLLM's front end would refuse it."""
        if self.is_closed or request.request_id in self.requests:
            return False
        self.world.tell(self.life.name, "request %s (number %s) arrives: %s", request.request_id, request.number,
                        str(request.prompt))  # fmt: skip
        self.life.consumer.admit(request)
        self.requests[request.request_id] = request
        self.waiting.append(request)
        if request.abort_immediately:
            self.abort(request)
        self.actor.wake(self.world.rng.random() * STEP_S)
        return True

    def abort(self, request: SimRequest) -> None:
        """The client has gone."""
        if self.requests.get(request.request_id) is request and not request.status.is_finished and not self.is_closed:
            self._finish(request, Status.FINISHED_ABORTED)
            self.news()

    def reset(self) -> None:
        """``reset_prefix_cache`` reached the connector."""
        self.world.tell(self.life.name, "resets its cache")
        self.life.may_forget = True
        if self.life.producer is not None:
            self.life.producer.revoke_all()
        self.life.consumer.reset()
        self.news()

    # A step

    def _turn(self) -> float | None:
        clock = self.life.core.clock
        if self.is_closed:
            return None
        if not self._in_step:
            self._schedule()
            self.life.take_orders(self._orders())
            self._in_step = True
            return clock() + self.world.rng.random() * STEP_S
        if any(rank.process.is_paused for rank in self.life.ranks):
            return clock() + IDLE_STEP_S
        self._in_step = False
        self._update(self._aggregator.join([rank.take_output() for rank in self.life.ranks]))
        if not self.requests and not self.life.consumer.is_quarantining:
            return None
        return clock() + (self.world.rng.random() * STEP_S if self.running else IDLE_STEP_S)

    def _orders(self) -> Orders:
        orders, producer = self.life.consumer.take_orders(), self.life.producer
        if producer is None:
            return orders
        return replace(orders, ended=producer.take_ended(), leases_live=producer.leases_live)

    def _schedule(self) -> None:
        for request in self.waiting:
            self._promote(request)
        now = self.world.now
        for request in [one for one in self.waiting if one.status is Status.WAITING and one.not_before <= now]:
            if not self._admit(request):
                self._make_room(request)
                break

    def _make_room(self, request: SimRequest) -> None:
        """Nothing runs that could free blocks: take those of a request that was loaded and waits for more."""
        if self.running:
            return
        for other in reversed(self.waiting):
            if other is not request and other.status is Status.WAITING and other.blocks:
                self._free_blocks(other)
                other.num_computed_tokens = 0
                return

    def _promote(self, request: SimRequest) -> None:
        """A request whose load is over can be scheduled."""
        if request.status is not Status.WAITING_FOR_REMOTE_KVS or request.request_id not in self._finished_recving:
            return
        self._finished_recving.remove(request.request_id)
        if request.request_id in self._failed_recving:
            self._failed_recving.remove(request.request_id)
            self._free_blocks(request)
        request.status = Status.WAITING

    def _admit(self, request: SimRequest) -> bool:
        """Schedule one request. False: there are no blocks, and those behind it wait, too."""
        consumer = self.life.consumer
        external, is_load = 0, False
        if request.num_computed_tokens == 0:
            hit = min(request.local_hit_blocks * BLOCK_SIZE, (request.prompt.length - 1) // BLOCK_SIZE * BLOCK_SIZE)
            found, is_load = consumer.match(request, hit)
            if found is None:
                return True
            external = found
            if external and hit + external > request.prompt.length:
                self.world.violate("S3", f"{request.request_id} is offered {external} tokens beyond {hit}: too many")
            request.num_computed_tokens = hit + external if is_load else hit
        num_tokens = request.num_computed_tokens if is_load else request.prompt.length
        more = request.blocks_for(num_tokens) - len(request.blocks)
        blocks = self.life.memory.allocate(max(0, more), request.request_id)
        if blocks is None:
            if not request.blocks:
                request.num_computed_tokens = 0
            return False
        request.blocks += blocks
        consumer.dispatch(request, Blocks(request.blocks), external)
        if is_load:
            request.status = Status.WAITING_FOR_REMOTE_KVS
            request.load_range = (num_tokens - external, num_tokens)
            self.life.load_begins(request)
            return True
        self.life.oracle.ended(request, Outcome.LOCAL)
        self._compute(request)
        self.waiting.remove(request)
        self.running.append(request)
        request.status = Status.RUNNING
        return True

    def _compute(self, request: SimRequest) -> None:
        """The engine computes what it has not got; what it computes is there at the end of the step."""
        first = request.blocks_for(request.num_computed_tokens)
        self.life.memory.write(request.blocks[first:], request.number, first)
        request.num_computed_tokens = request.prompt.length

    def _update(self, output: StepOutput) -> None:
        failing = self._handle_failed(output)
        for request in list(self.running):
            request.steps_left -= 1
            if request.steps_left <= 0:
                self._finish(request, Status.FINISHED_LENGTH_CAPPED)
        for request in failing:
            self._finish(request, Status.FINISHED_ERROR)
        self._take_reports(output)

    def _handle_failed(self, output: StepOutput) -> list[SimRequest]:
        affected = []
        report = output.kv_connector_worker_meta
        for request_id in sorted(output.failed_recving):
            request = self.requests.get(request_id)
            if request is not None and request.status is Status.WAITING_FOR_REMOTE_KVS:
                cause = report.failed.get(LoadId(request_id)) if report else None
                self.life.oracle.ended(request, Outcome.FAILED, str(cause))
                if self.recompute:
                    request.num_computed_tokens = 0
                    self._failed_recving.add(request_id)
                else:
                    affected.append(request)
        return affected

    def _take_reports(self, output: StepOutput) -> None:
        self.life.consumer.take_reports(output)
        keep_sent(output.finished_sending, reported_by_us(output), self.life.producer)
        for request_id in sorted(output.finished_recving):
            request = self.requests.get(request_id)
            if request is None:
                self.world.violate("S3", f"{self.life.name}: {request_id} was received, and is no request here")
                return
            self.life.load_ends(request)
            if request.status is Status.WAITING_FOR_REMOTE_KVS:
                self._finished_recving.add(request_id)
                if request_id not in output.failed_recving:
                    self.world.tell(self.life.name, "load %s is good", request_id)
                    self.life.oracle.good_load(request, self.life)
                    self.life.oracle.ended(request, Outcome.LOADED)
            elif request.status.is_finished:
                self._forget(request)
            else:
                self.world.violate("S3", f"{self.life.name}: {request_id} was received while {request.status.name}")
        for lease in sorted(output.finished_sending):
            request = self.requests.get(lease)
            if request is None or not request.is_leased:
                self.world.violate("S3", f"{self.life.name}: {lease} was sent, and no such request is held")
                return
            self.life.oracle.lease_blocks_freed(request, self.life)
            self.world.tell(self.life.name, "frees the blocks of lease %s", lease)
            self._forget(request)

    # Endings

    def preempt(self, request: SimRequest) -> None:
        """Take its blocks and let it begin again."""
        if request in self.running:
            self.running.remove(request)
            self.waiting.insert(0, request)
            self._free_blocks(request)
            request.num_computed_tokens = 0
            request.status = Status.WAITING

    def _finish(self, request: SimRequest, status: Status) -> None:
        must_wait = False
        if request.status is Status.WAITING_FOR_REMOTE_KVS:
            must_wait = request.request_id not in self._finished_recving
            self._finished_recving.discard(request.request_id)
            self._failed_recving.discard(request.request_id)
        if request in self.waiting:
            self.waiting.remove(request)
        if request in self.running:
            self.running.remove(request)
        request.status = status
        self.world.tell(self.life.name, "request %s is %s", request.request_id, status.name)
        self.life.consumer.finish(request)
        if status is Status.FINISHED_ABORTED:
            self.life.oracle.ended(request, Outcome.ABORTED)
        handoff = None
        if self.life.producer is not None:
            handoff = self.life.producer.grant(request, ([block.block_id for block in request.blocks],))
        if handoff is not None:
            request.is_leased = True
            self.life.oracle.granted(request, handoff, self.life)
        elif not must_wait:
            self._forget(request)
        if request.served is not None and status in (Status.FINISHED_LENGTH_CAPPED, Status.FINISHED_STOPPED):
            request.served(request, handoff)

    def _forget(self, request: SimRequest) -> None:
        self._free_blocks(request)
        del self.requests[request.request_id]

    def _free_blocks(self, request: SimRequest) -> None:
        self.life.memory.free_blocks(reversed(request.blocks))
        request.blocks = []
