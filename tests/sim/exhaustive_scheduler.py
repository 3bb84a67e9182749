"""The third part of the exhaustive checker: a consumer's scheduler half, in what is left of vLLM's own around it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from kvlease.connector.consumer import ConsumerHalf
from kvlease.connector.reports import WorkerReport
from kvlease.core.handoff import Handoff, emit_handoff
from kvlease.core.ids import Incarnation, LoadId
from kvlease.core.messages import AnyRequest
from kvlease.core.orders import LoadOrder, Orders, Reports
from kvlease.net.claims import Claims
from tests.sim.exhaustive_machine import Part, Violation
from tests.sim.exhaustive_parts import BLOCK_SIZE, CHANNEL, KEY, LEASE, PROMPT, RANKS, SETTINGS, TOKEN, Peers
from tests.sim.requests import Status


@dataclass(eq=False)
class Block:
    """One block of the pool; it may be given to somebody else when nobody refers to it."""

    block_id: int
    ref_cnt: int = 1
    is_null: bool = False


class Pool:
    """What the connector uses of vLLM's block pool."""

    def touch(self, blocks: list[Block]) -> None:
        for block in blocks:
            block.ref_cnt += 1

    def free_blocks(self, blocks: list[Block]) -> None:
        for block in blocks:
            block.ref_cnt -= 1
            if block.ref_cnt < 0:
                raise Violation(f"S3: block {block.block_id} was given back twice")


@dataclass(eq=False)
class VllmRequest:
    """A request as vLLM's scheduler keeps it. ``where``: waiting, loading, local, done, aborted, or its end."""

    request_id: str
    kv_transfer_params: dict[str, Any]
    block: Block
    status: Status = Status.WAITING
    where: str = "waiting"
    ranks_left: int = RANKS
    failed: bool = False
    abort_immediately = False
    num_prompt_tokens = len(PROMPT)
    prompt_token_ids = PROMPT
    prompt_embeds = None
    lora_request = None
    cache_salt = None
    mm_features = ()


@dataclass(frozen=True)
class SchedulerFacts:
    """``calls``: the numbers of unanswered requests. By load: ``reusable`` blocks, ``done``, ``abortable``."""

    calls: frozenset[int]
    beat: bool
    deadline: bool
    reusable: tuple[bool, ...]
    where: tuple[str, ...]
    abortable: tuple[int, ...]
    to_come: tuple[int, ...]
    quiet: str


@dataclass(frozen=True)
class SchedulerOut:
    """What a scheduler half sends to the producer and orders from its ranks."""

    requests: tuple[AnyRequest, ...]
    orders: Orders | None


class SchedulerPart(Part):
    """The real ``ConsumerHalf`` over the real ``Claims``, in what is left of vLLM's scheduler around them."""

    def __init__(self, loads: tuple[str, ...]) -> None:
        self.links = Peers()
        self.results: deque[Any] = deque()
        self.claims = Claims(CHANNEL, SETTINGS, self.links, lambda: self.now, self.results.append)  # type: ignore[arg-type]
        own = Incarnation(b"the consumer....")
        self.half = ConsumerHalf(
            SETTINGS, self, CHANNEL, own, [BLOCK_SIZE], recompute=True, may_load=True, clock=lambda: self.now
        )  # type: ignore[arg-type]
        self.half.bind_pool(Pool())  # type: ignore[arg-type]
        self.half._await_claim = lambda load: None  # type: ignore[method-assign]  # nobody would bring an answer
        self.requests: dict[str, VllmRequest] = {}
        self.to_come = list(loads)
        self.acquire, self.finish, self.release = self.claims.acquire, self.claims.finish, self.claims.release
        self.release_unclaimed = self.claims.release_unclaimed
        self.loads = loads
        self.arrived: SchedulerOut = self.apply(("arrive", loads[0]))

    @property
    def now(self) -> float:  # type: ignore[override]
        return self.links.now

    def take_results(self) -> list[Any]:
        """The leaser's results: the thread between the two is left out."""
        results = list(self.results)
        self.results.clear()
        return results

    def apply(self, event: Any) -> SchedulerOut:
        match event:
            case ("arrive", load):
                self.to_come.remove(load)
                handoff = Handoff(KEY.engine_id, KEY.incarnation, LEASE, TOKEN, KEY.host, KEY.port, len(PROMPT))
                params = emit_handoff(handoff, block_ids=None, tp_size=RANKS, ttl_s=30.0)
                block = Block(1 + self.loads.index(load))
                self.requests[load] = VllmRequest(load, params, block)
                self.half.admit(self.requests[load])  # type: ignore[arg-type]
            case ("hear", reply):
                self.links.hear(reply)
            case ("abort", load):
                self._abort(self.requests[load])
            case ("report", report):
                self._take_report(report)
            case "tick" | "expire":
                self.links.now = self.next_deadline() if event == "tick" else self.now + SETTINGS.acquire_timeout_s
                for peer in self.links.peers.values():
                    peer.tick(self.now)
                self._take_events()
                self.claims.tick()
        return self._pump()

    def next_deadline(self) -> float:
        """When time has something to do here; now, if it never has."""
        beat = self.claims.next_deadline()
        return min([*self.links.deadlines(), *([] if beat is None else [beat])], default=self.now)

    def _take_events(self) -> None:
        while events := self.links.take_events():
            for key, event in events:
                self.claims.happen(key, event)

    def _pump(self) -> SchedulerOut:
        """Let vLLM's scheduler take its steps until nothing more comes of them."""
        loads: list[LoadOrder] = []
        aborts: list[LoadId] = []
        busy = True
        while busy:
            self._take_events()
            for request in self.requests.values():
                if request.where == "waiting":
                    self._schedule(request)
            new = self.half.take_orders()
            loads += new.loads
            aborts += new.aborts
            busy = bool(new.loads or new.aborts or self.results or any(p._events for p in self.links.peers.values()))
        orders = Orders(loads=loads, aborts=aborts) if loads or aborts else None
        return SchedulerOut(self.links.take_requests(), orders)

    def _schedule(self, request: VllmRequest) -> None:
        num_tokens, is_async = self.half.match(request, 0)  # type: ignore[arg-type]
        if num_tokens is None:
            return
        ids = ([request.block.block_id],)
        blocks = SimpleNamespace(blocks=[[request.block]], get_block_ids=lambda: ids)
        self.half.dispatch(request, blocks, num_tokens)  # type: ignore[arg-type]
        if is_async:
            request.where, request.status = "loading", Status.WAITING_FOR_REMOTE_KVS
        else:
            self._run(request, "local")

    def _run(self, request: VllmRequest, where: str) -> None:
        """The request computes the rest, and ends."""
        request.where, request.status = where, Status.FINISHED_STOPPED
        self.half.finish(request)  # type: ignore[arg-type]

    def _abort(self, request: VllmRequest) -> None:
        request.status = Status.FINISHED_ABORTED
        waits = request.where == "loading"
        self.half.finish(request)  # type: ignore[arg-type]
        request.where = "aborting" if waits else "aborted"
        if not waits:
            request.block.ref_cnt -= 1

    def _take_report(self, report: Reports) -> None:
        """One rank's report: an id is handed on when its last rank has reported it, as vLLM's aggregator does."""
        finished: set[str] = set()
        failed: set[str] = set()
        for load in report.received:
            request = self.requests[load]
            request.ranks_left -= 1
            request.failed = request.failed or load in report.failed
            if request.ranks_left < 0:
                raise Violation(f"S3: a rank reported {load} twice")
            if request.ranks_left == 0:
                finished.add(load)
                failed |= {load} if request.failed else set()
        output = SimpleNamespace(  # as vLLM's KVConnectorOutput
            finished_recving=finished,
            failed_recving=failed,
            kv_connector_worker_meta=WorkerReport(
                failed=dict(report.failed),
                unsettled=dict.fromkeys(report.unsettled, 1),
                settled=dict.fromkeys(report.settled, 1),
                reported=set(report.received),
            ),
        )
        self.half.take_reports(output)  # type: ignore[arg-type]
        for load in output.finished_recving or ():
            self._received(self.requests[load], load in failed)

    def _received(self, request: VllmRequest, failed: bool) -> None:
        if request.where == "aborting":
            request.where = "aborted"
            request.block.ref_cnt -= 1
        elif request.where != "loading":
            raise Violation(f"S3: {request.request_id} was reported as received while it is {request.where}")
        elif failed:
            request.block.ref_cnt -= 1
            self._run(request, "local")
        else:
            self._run(request, "done")

    def facts(self) -> SchedulerFacts:
        requests = [self.requests.get(load) for load in self.loads]
        beat = self.claims.next_deadline()
        calls = self.links.calls()
        quarantined = self.half.is_quarantining
        held = list(self.half._loads.values())
        busy = [f"{len(self.claims)} claims"] * bool(len(self.claims)) + [f"calls {sorted(calls)}"] * bool(calls)
        busy += [f"loads {held}"] * bool(held) + ["a quarantine"] * quarantined
        busy += [f"{r.request_id} {r.where}" for r in requests if r and r.where in ("waiting", "loading", "aborting")]
        return SchedulerFacts(
            calls=calls,
            beat=beat is not None and not calls,
            deadline=beat is not None or bool(self.links.deadlines()),
            reusable=tuple(bool(r) and r.block.ref_cnt == 0 for r in requests),
            where=tuple(r.where if r else "to come" for r in requests),
            abortable=tuple(i for i, r in enumerate(requests) if r and r.where in ("waiting", "loading")),
            to_come=tuple(self.loads.index(load) for load in self.to_come),
            quiet="; ".join(busy),
        )

    def core(self) -> Any:
        half = self.half
        if not (self.facts().quiet or self.to_come):  # over: nothing that it still remembers can matter
            return [(request.where, request.ranks_left, request.block) for request in self.requests.values()]
        return (
            self.claims,
            half._loads,
            half._quarantine,
            half._claim_numbers,
            self.links.peers,
            self.requests,
            tuple(self.to_come),
        )
