"""What stands for vLLM's requests, and what the simulation knows about each beyond that."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.sim.memory import Block

BLOCK_SIZE = 4


class Status(enum.Enum):
    """vLLM's request states, by its names."""

    WAITING = 1
    WAITING_FOR_REMOTE_KVS = 2
    RUNNING = 3
    FINISHED_STOPPED = 4
    FINISHED_LENGTH_CAPPED = 5
    FINISHED_ABORTED = 6
    FINISHED_ERROR = 7

    @property
    def is_finished(self) -> bool:
        return self.value >= Status.FINISHED_STOPPED.value


@dataclass(frozen=True)
class Prompt:
    """What the KV depends on. Two prompts of one length differ in ``text``, ``lora`` or ``salt``."""

    text: int
    length: int
    lora: str | None = None
    salt: str | None = None

    @property
    def tokens(self) -> list[int]:
        return [self.text * 1000 + index for index in range(self.length)]

    def agrees(self, other: Prompt) -> bool:
        """Whether the KV of the tokens that both have is the same."""
        return (self.text, self.lora, self.salt) == (other.text, other.lora, other.salt)


@dataclass(frozen=True)
class Lora:
    lora_name: str


class Outcome(enum.Enum):
    """How a request got its KV."""

    LOADED = "loaded"
    LOCAL = "computed here"
    FAILED = "failed"
    ABORTED = "aborted"
    LOST = "lost with its engine"


@dataclass(eq=False)
class SimRequest:
    """One request; the upper fields are those of vLLM's class that kvlease reads.

    ``number`` is unique, ids come again. ``served`` is told of the handoff, if there is one. ``must_load``: nothing in
    the world is in the way of this load. Others are served before it until ``not_before``.
    """

    request_id: str
    prompt: Prompt
    number: int
    kv_transfer_params: dict[str, Any] | None = None
    served: Callable[[SimRequest, dict[str, Any] | None], None] | None = None
    must_load: bool = False
    local_hit_blocks: int = 0
    steps_left: int = 1
    not_before: float = 0.0
    abort_immediately: bool = False
    status: Status = Status.WAITING
    num_computed_tokens: int = 0
    num_in_flight_tokens: int = 0
    prompt_embeds: None = None
    mm_features: tuple[()] = ()
    blocks: list[Block] = field(default_factory=list)
    load_range: tuple[int, int] | None = None
    outcome: Outcome | None = None
    is_leased: bool = False
    was_preempted: bool = False

    def __post_init__(self) -> None:
        self.prompt_token_ids = self.prompt.tokens
        self.num_prompt_tokens = self.prompt.length
        self.lora_request = Lora(self.prompt.lora) if self.prompt.lora else None
        self.cache_salt = self.prompt.salt

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // BLOCK_SIZE)
