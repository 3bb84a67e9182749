"""What must hold, whatever happens: the rules of docs/simulation.md, checked from outside of kvlease.

The oracle knows what no process knows: what every block really holds, and which request it was computed for.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvlease.core.messages import Commit
from tests.sim.requests import BLOCK_SIZE, Outcome, Prompt, SimRequest
from tests.sim.world import World

if TYPE_CHECKING:
    from tests.sim.engine import Life


@dataclass(frozen=True)
class Lent:
    """One lease as it really is. ``number``: of the producer's request, the writer in its pages' tags."""

    number: int
    lease: str
    prompt: Prompt
    num_tokens: int
    life: Life
    request: SimRequest


class Oracle:
    """``outcomes`` counts requests with a handoff by how they got their KV; ``causes`` the loads by outcome."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.lent: dict[str, Lent] = {}
        self._vouched: set[tuple[str, str, int]] = set()
        self.outcomes: Counter[str] = Counter()
        self.causes: Counter[str] = Counter()

    def granted(self, request: SimRequest, handoff: dict[str, Any], life: Life) -> None:
        """A producer gave out a handoff."""
        number, tokens = request.number, handoff["remote_num_tokens"]
        token = handoff["kvlease"]["token"]
        if token in self.lent:
            self.world.violate("S2", f"a token was minted twice: {request.request_id}")
        self.lent[token] = Lent(number, request.request_id, request.prompt, tokens, life, request)

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

    def vouched(self, commit: Commit, life: Life) -> None:
        """S1: an endpoint answers ``Committed``: for the first time only while the blocks are still lent."""
        name = commit.token.hex(), commit.reader, commit.rank
        if name in self._vouched:
            return
        self._vouched.add(name)
        lent = self.lent.get(name[0])
        what = f"{life.name} vouches for a read of lease {commit.lease}"
        if lent is None or lent.lease != commit.lease or lent.life is not life:
            self.world.violate("S1", f"{what}, which is not one of its own")
        elif life.memory.is_dead or not lent.request.blocks:
            self.world.violate("S1", f"{what}, whose blocks were given back before")

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
