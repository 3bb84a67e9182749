"""What must hold, whatever happens: the rules of docs/simulation.md, checked from outside of kvlease.

The oracle knows what no process knows: what every block really holds, and which request it was computed for.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvlease.core.messages import (
    Acquire,
    AnyReply,
    Commit,
    Committed,
    Gone,
    GoneReason,
    Granted,
    Release,
    Released,
)
from tests.sim.requests import BLOCK_SIZE, Outcome, Prompt, SimRequest
from tests.sim.world import World

if TYPE_CHECKING:
    from tests.sim.engine import Life


STEPS_S = 0.8
"""Room for the steps and turns after a deadline, which come more rarely here than in an engine."""


@dataclass(frozen=True)
class Lent:
    """One lease as it really is. ``number``: of the producer's request, the writer in its pages' tags."""

    number: int
    lease: str
    prompt: Prompt
    num_tokens: int
    life: Life
    request: SimRequest
    granted_at: float


class Oracle:
    """``outcomes`` counts requests with a handoff by how they got their KV; ``causes`` the loads by outcome."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.lent: dict[str, Lent] = {}
        self._last_of: dict[tuple[str, str], Lent] = {}
        self._asked_for: set[int] = set()
        self._released: set[tuple[str, str, str]] = set()
        self._vouched: dict[tuple[str, str, int], float] = {}
        self.outcomes: Counter[str] = Counter()
        self.causes: Counter[str] = Counter()

    def granted(self, request: SimRequest, handoff: dict[str, Any], life: Life) -> None:
        """A producer gave out a handoff."""
        number, tokens = request.number, handoff["remote_num_tokens"]
        token = handoff["kvlease"]["token"]
        if token in self.lent:
            self.world.violate("S2", f"a token was minted twice: {request.request_id}")
        lent = self.lent[token] = Lent(
            number, request.request_id, request.prompt, tokens, life, request, self.world.now
        )
        self._last_of[life.name, lent.lease] = lent
        settings, slow = life.around.settings, 1 + 2 * life.around.drift
        self.world.after(settings.max_lease_lifetime_s * slow + STEPS_S, self._must_have_ended, lent, "its lifetime")

    def good_load(self, request: SimRequest, life: Life) -> None:
        """S1 and S2: a load was reported as received and not failed, and its request still waits for it."""
        params: Any = request.kv_transfer_params
        lent = self.lent.get(params["kvlease"]["token"])
        what = f"load {request.request_id} on {life.name}"
        if lent is None:
            self.world.violate("S2", f"{what} was reported good, and its token names no lease")
            return
        if not lent.prompt.agrees(request.prompt):
            self.world.violate("S2", f"{what} is of {request.prompt}, its lease of {lent.prompt}")
        if request.load_range is None:
            self.world.violate("S3", f"{what} was reported good and was never ordered")
            return
        start, end = request.load_range
        token, reader = params["kvlease"]["token"], life.readers[request.request_id]
        unproven = [rank for rank in range(life.engine.ranks) if (token, reader, rank) not in self._vouched]
        if unproven:
            self.world.violate("S1", f"{what} was reported good, but nobody vouched for ranks {unproven}")
        if end > lent.num_tokens:
            self.world.violate("S1", f"{what} covers {end} tokens, the lease {lent.num_tokens}")
        for rank, tags in enumerate(life.memory.tags):
            for position in range(start // BLOCK_SIZE, -(-end // BLOCK_SIZE)):
                block = request.blocks[position]
                block.is_sealed = True
                if tags[block.block_id] != (lent.number, position):
                    self.world.violate(
                        "S1",
                        f"{what} was reported good, but on rank {rank} {block} holds {tags[block.block_id]} "
                        f"instead of {(lent.number, position)}",
                    )
                    return

    def answered(self, request: Acquire | Commit | Release, reply: AnyReply, life: Life) -> None:
        """An endpoint answers a claim: what it says has to be true at this very moment."""
        lent = self.lent.get(request.token.hex())
        is_first = lent is not None and lent.number not in self._asked_for
        if lent is not None:
            self._asked_for.add(lent.number)
        match request, reply:
            case Acquire(), Gone(why=GoneReason.UNKNOWN) if lent is not None and is_first:
                self._knows_nothing(request, lent, life)
            case Commit(), Committed():
                self._vouches(request, life)
            case Commit(), Gone():
                self._takes_back(request, life)
            case Release(reader=str() as reader), Released():
                self._released.add((request.token.hex(), reader, life.name))
            case Acquire(), Granted() if (request.token.hex(), request.reader, life.name) in self._released:
                self.world.violate("P1", f"{life.name} grants {request.lease} to {request.reader}, who released it")
        if isinstance(reply, Gone) and reply.why is GoneReason.EXPIRED and reply.age_s == 0.0:
            self.world.violate("P1", f"{life.name} let {request.lease} expire while a message for it was waiting")

    def _knows_nothing(self, acquire: Acquire, lent: Lent, life: Life) -> None:
        """P1: never of a lease whose handoff it gave out a moment ago."""
        is_meant = lent.life is life and lent.lease == acquire.lease and acquire.to == life.incarnation
        is_young = self.world.now < lent.granted_at + 0.8 * life.around.settings.lease_duration_s
        if is_meant and is_young and not life.may_forget and self._last_of[life.name, lent.lease] is lent:
            self.world.violate("P1", f"{life.name} gave out a handoff for {lent.lease}, and knows of no such lease")

    def _vouches(self, commit: Commit, life: Life) -> None:
        """S1: for the first time only while the blocks are still lent."""
        name = commit.token.hex(), commit.reader, commit.rank
        if name in self._vouched:
            return
        self._vouched[name] = self.world.now
        lent = self.lent.get(name[0])
        what = f"{life.name} vouches for a read of lease {commit.lease}"
        if lent is None or lent.lease != commit.lease or lent.life is not life:
            self.world.violate("S1", f"{what}, which is not one of its own")
        elif life.memory.is_dead or not lent.request.blocks:
            self.world.violate("S1", f"{what}, whose blocks were given back before")

    def _takes_back(self, commit: Commit, life: Life) -> None:
        """P1: never a commit that was answered ``Committed`` and has to be remembered."""
        name = commit.token.hex(), commit.reader, commit.rank
        settings = life.around.settings
        vouched_at, lent = self._vouched.get(name), self.lent.get(name[0])
        if vouched_at is None or lent is None or lent.life is not life or life.is_disturbed:
            return
        is_young = self.world.now < vouched_at + settings.tombstone_ttl_s * 0.8
        if is_young and settings.tombstone_max > 10 and self._last_of[life.name, lent.lease] is lent:
            self.world.violate("P1", f"{life.name} vouched for {commit.reader} and now says that {lent.lease} is gone")

    def _must_have_ended(self, lent: Lent, bound: str) -> None:
        """L1: a lease does not outlive its bound by more than a turn of the endpoint.

        Blocks of an engine that shuts down return to no pool: they end with its process.
        """
        life = lent.life
        is_held = lent.request.blocks and life.scheduler.requests.get(lent.lease) is lent.request
        if is_held and life.core.alive and not (life.is_disturbed or life.scheduler.is_closed):
            self.world.violate("L1", f"{life.name} still holds the blocks of lease {lent.lease} after {bound}")

    def lease_blocks_freed(self, request: SimRequest, life: Life) -> None:
        """S4: the blocks of a finished request that was leased go back to the pool."""
        state = life.loop.table.state_of(request.request_id) if life.loop else None
        if state is not None:
            self.world.violate("S4", f"{life.name} frees the blocks of lease {request.request_id}, which is {state}")

    def ended(self, request: SimRequest, outcome: Outcome, cause: str = "") -> None:
        """A consumer's request got its KV, or will not."""
        if request.outcome is not None or not request.kv_transfer_params:
            return
        request.outcome = outcome
        self.outcomes[outcome.value] += 1
        if request.must_load and outcome is not Outcome.LOADED:
            self.world.violate(
                "L3", f"nothing was in the way of load {request.request_id}, yet it is {outcome.value} {cause}"
            )

    def peer_of(self, request: SimRequest) -> Life | None:
        """The producer that a load really reads from."""
        proof: Any = (request.kv_transfer_params or {}).get("kvlease")
        lent = self.lent.get(str(proof.get("token"))) if isinstance(proof, dict) else None
        return None if lent is None else lent.life
