"""The ghost in the blocks: what every page really holds, and a pool that hands blocks out again as soon as it can.

A tag stands for the bytes of one page: which request wrote them, and of which block of its prompt they are. What is
freed is poisoned at once, so bytes read a moment too late are never mistaken for the right ones.
"""

from __future__ import annotations

from collections.abc import Iterable

from tests.sim.world import World

Tag = tuple[int, int]
"""The number of the request that wrote the page, and the block's position in its prompt."""


class Block:
    """One block of one engine. ``age`` counts its allocations; ``reads`` are those that may still write to it.

    ``is_sealed``: its load was reported as good, so nobody but its own engine may write to it any more.
    """

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.is_null = block_id == 0
        self.ref_cnt = 0
        self.age = 0
        self.reads = 0
        self.is_sealed = False
        self.holder = ""

    def __repr__(self) -> str:
        return f"block {self.block_id} (age {self.age}, of {self.holder or 'nobody'})"


class Memory:
    """The blocks of one life of one engine, and what each of its ranks' pages hold."""

    def __init__(self, world: World, name: str, num_blocks: int, ranks: int) -> None:
        self.world = world
        self.name = name
        self.is_dead = False
        self.blocks = [Block(number) for number in range(num_blocks)]
        self.tags: list[list[Tag | None]] = [[None] * num_blocks for _ in range(ranks)]
        self._free = list(range(num_blocks - 1, 0, -1))  # the last one freed is the first to be used again

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int, holder: str) -> list[Block] | None:
        """``count`` blocks with whatever they hold, or None if there are not so many."""
        if count > len(self._free):
            return None
        blocks = [self.blocks[self._free.pop()] for _ in range(count)]
        for block in blocks:
            block.ref_cnt, block.holder, block.is_sealed = 1, holder, False
            block.age += 1
        return blocks

    def write(self, blocks: Iterable[Block], writer: int, first: int = 0) -> None:
        """The engine itself computes these blocks of a request's prompt."""
        for position, block in enumerate(blocks, first):
            if block.reads:
                self.world.violate("S4", f"{self.name} computes into {block}, which a posted read may write to")
            for tags in self.tags:
                tags[block.block_id] = (writer, position)

    # What the connector uses of vLLM's block pool

    def touch(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            if block.ref_cnt == 0:
                self.world.violate("S4", f"{self.name} holds {block} back, which is in the pool already")
            block.ref_cnt += 1

    def free_blocks(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            block.ref_cnt -= 1
            if block.ref_cnt < 0:
                self.world.violate("S4", f"{self.name} frees {block} twice")
            if block.ref_cnt == 0:
                if block.reads:
                    self.world.violate("S4", f"{self.name} frees {block}, which a posted read may write to")
                block.holder = ""
                for tags in self.tags:
                    tags[block.block_id] = None
                self._free.append(block.block_id)

    def die(self) -> None:
        """The process is gone, or has unregistered it all: nothing here is worth reading any more."""
        self.is_dead = True
        for tags in self.tags:
            tags[:] = [None] * len(tags)


class Blocks:
    """What the connector uses of vLLM's ``KVCacheBlocks``: one KV group."""

    def __init__(self, blocks: list[Block]) -> None:
        self.blocks = (blocks,)

    def get_block_ids(self) -> tuple[list[int], ...]:
        return ([block.block_id for block in self.blocks[0]],)
