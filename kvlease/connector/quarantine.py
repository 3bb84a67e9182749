"""Blocks of loads that are over for vLLM while a posted read may still write to them.

A rank that cannot end a read (its producer is frozen) says so in the report of its load. Until every such rank has
said that the read ended, the blocks have one more reference in vLLM's pool: nobody is given them, whatever the
request's own end did.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvlease.core.ids import LoadId

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool

logger = logging.getLogger("kvlease.consumer")


@dataclass
class _Held:
    """Blocks that ``ranks`` ranks still have a posted read on: those of one load, or of several that had the same
    request id one after another.
    """

    blocks: list[Any]
    ranks: int


class Quarantine:
    """See the module. Belongs to the scheduler's thread."""

    def __init__(self) -> None:
        self._pool: BlockPool | None = None
        self._held: dict[LoadId, _Held] = {}

    def __len__(self) -> int:
        """How many blocks are held back."""
        return sum(len(held.blocks) for held in self._held.values())

    def bind_pool(self, pool: BlockPool) -> None:
        """The pool whose blocks are held back."""
        self._pool = pool

    @property
    def is_empty(self) -> bool:
        """Whether no read is waited for."""
        return not self._held

    def hold(self, load: LoadId, blocks: Sequence[Any], ranks: int) -> None:
        """Hold ``blocks`` back until ``ranks`` more ranks :meth:`let_go`; no blocks, if they are held already."""
        if self._pool is None:
            logger.error("request %s: %d blocks cannot be held back: vLLM named no pool of blocks", load, len(blocks))
            return
        held = self._held.setdefault(load, _Held([], 0))
        held.ranks += ranks
        if blocks:
            self._pool.touch(blocks)
            held.blocks += blocks
            logger.warning("request %s: %d blocks held back until their reads have ended", load, len(blocks))

    def let_go(self, load: LoadId, ranks: int) -> bool:
        """The reads of ``ranks`` ranks have ended. Whether they were the last, so that the blocks were given back."""
        held = self._held.get(load)
        if held is None or self._pool is None:
            return False
        held.ranks -= ranks
        if held.ranks > 0:
            return False
        self._pool.free_blocks(held.blocks)
        del self._held[load]
        return True
