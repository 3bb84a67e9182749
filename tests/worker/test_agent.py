"""What the transfer thread relies on, of NIXL and of its stand-in alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from kvlease.config import Settings
from kvlease.testing import FakeAgent, FakeFabric, Fate
from kvlease.worker.agent import Agent, AgentError, NixlAgent, ReadState
from kvlease.worker.regions import MemoryRange

PAGE = 64
PAGES = 16


class Side:
    """An agent and its memory: two arrays of pages, the second with gaps between its pages."""

    def __init__(self, agent: Agent, fill: int | None) -> None:
        self.agent = agent
        self.memory = np.zeros((3, PAGES, PAGE), dtype=np.uint8)
        if fill is not None:
            self.memory[:] = np.random.default_rng(fill).integers(0, 256, self.memory.shape)
        base = self.memory.ctypes.data
        agent.register([MemoryRange(base, self.memory.nbytes, 0)], "DRAM")
        self.rows = [(base, PAGE, 0, PAGE, PAGES), (base + PAGES * PAGE, PAGE // 2, 0, 2 * PAGE, PAGES)]

    def page(self, index: int) -> bytes:
        flat = self.memory.reshape(-1)
        if index < PAGES:
            return flat[index * PAGE : (index + 1) * PAGE].tobytes()
        start = PAGES * PAGE + (index - PAGES) * 2 * PAGE
        return flat[start : start + PAGE // 2].tobytes()


def ids(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.int32)


@pytest.fixture(params=["fake", pytest.param("nixl", marks=pytest.mark.peer)])
def new_agent(request: pytest.FixtureRequest) -> Callable[[], Agent]:
    if request.param == "nixl":
        return lambda: NixlAgent(Settings(num_threads=0))
    fabric = FakeFabric()
    return lambda: FakeAgent(fabric, polls=2)


@pytest.fixture
def sides(new_agent) -> Iterator[tuple[Side, Side]]:
    """A reader, and whom it reads from."""
    here, there = Side(new_agent(), None), Side(new_agent(), 1)
    yield here, there
    here.agent.close()
    there.agent.close()


def ended(read: object, here: Side, there: Side) -> ReadState:
    """Ask until the read has ended; the other side ticks, or it could not be reached."""
    until = time.monotonic() + 10
    while (state := here.agent.state(read)) is ReadState.BUSY:
        assert time.monotonic() < until
        there.agent.tick()
        here.agent.tick()
    return state


class TestEveryAgent:
    def test_has_a_name_of_its_own(self, new_agent) -> None:
        assert new_agent().name != new_agent().name

    def test_reads_pages_by_index_across_regions(self, sides) -> None:
        here, there = sides
        peer = here.agent.add_peer(there.agent.metadata())
        local, remote = here.agent.prepare(None, here.rows, "DRAM"), here.agent.prepare(peer, there.rows, "DRAM")
        read = here.agent.post(local, ids(3, 4, 20), remote, ids(7, 8, 31))
        assert ended(read, here, there) is ReadState.DONE
        assert [here.page(i) for i in (3, 4, 20)] == [there.page(i) for i in (7, 8, 31)]
        assert here.page(5) == bytes(PAGE)
        here.agent.release(read)

    def test_reads_itself(self, sides) -> None:
        _, there = sides
        peer = there.agent.add_peer(there.agent.metadata())
        own, target = there.agent.prepare(peer, there.rows, "DRAM"), there.agent.prepare(None, there.rows, "DRAM")
        wanted = there.page(2)
        read = there.agent.post(target, ids(1), own, ids(2))
        assert ended(read, there, there) is ReadState.DONE
        assert there.page(1) == wanted

    def test_knows_a_peer_by_its_name_and_may_add_it_twice(self, sides) -> None:
        here, there = sides
        assert here.agent.add_peer(there.agent.metadata()) == there.agent.name
        assert here.agent.add_peer(there.agent.metadata()) == there.agent.name

    def test_refuses_what_is_no_metadata(self, sides) -> None:
        here, there = sides
        whole = there.agent.metadata()
        for metadata in (b"", b"nonsense", whole[: len(whole) // 2]):
            with pytest.raises(AgentError):
                here.agent.add_peer(metadata)

    def test_refuses_pages_that_are_not_registered(self, sides) -> None:
        here, there = sides
        peer = here.agent.add_peer(there.agent.metadata())
        base, size, device, stride, count = there.rows[0]
        for rows in ([(base, size, device, stride, 4 * count)], [(base - 4096, size, device, stride, 1)]):
            with pytest.raises(AgentError):
                here.agent.prepare(peer, rows, "DRAM")

    def test_refuses_pages_of_strangers_and_odd_memory(self, sides) -> None:
        here, there = sides
        with pytest.raises(AgentError):
            here.agent.prepare("nobody", there.rows, "DRAM")
        with pytest.raises(AgentError):
            here.agent.prepare(None, here.rows, "VRAM")

    @pytest.mark.parametrize("pages", [(ids(32), ids(0)), (ids(0), ids(32)), (ids(0), ids(-1)), (ids(0, 1), ids(0))])
    def test_refuses_indices_that_do_not_fit(self, sides, pages) -> None:
        here, there = sides
        peer = here.agent.add_peer(there.agent.metadata())
        local, remote = here.agent.prepare(None, here.rows, "DRAM"), here.agent.prepare(peer, there.rows, "DRAM")
        with pytest.raises(AgentError):
            here.agent.post(local, pages[0], remote, pages[1])

    def test_refuses_lists_of_a_peer_that_was_forgotten(self, sides) -> None:
        here, there = sides
        peer = here.agent.add_peer(there.agent.metadata())
        local, remote = here.agent.prepare(None, here.rows, "DRAM"), here.agent.prepare(peer, there.rows, "DRAM")
        here.agent.remove_peer(peer)
        with pytest.raises(AgentError):
            here.agent.post(local, ids(0), remote, ids(0))

    def test_reads_from_a_peer_that_was_forgotten_and_came_back(self, sides) -> None:
        here, there = sides
        local = here.agent.prepare(None, here.rows, "DRAM")
        for page in (1, 2):
            peer = here.agent.add_peer(there.agent.metadata())
            remote = here.agent.prepare(peer, there.rows, "DRAM")
            read = here.agent.post(local, ids(page), remote, ids(page))
            assert ended(read, here, there) is ReadState.DONE
            assert here.page(page) == there.page(page)
            here.agent.release(read)
            here.agent.discard(remote)
            here.agent.remove_peer(peer)


@pytest.mark.peer
def test_nixl_says_which_backends_it_lacks() -> None:
    with pytest.raises(AgentError, match="no backends \\['NOPE'\\]; it has"):
        NixlAgent(Settings(backends=["NOPE"]))


class TestTheFake:
    """What only a script can bring about."""

    @pytest.fixture
    def posted(self):
        def post(fate: Fate):
            here, there = Side(FakeAgent(FakeFabric()), None), None
            there = Side(FakeAgent(here.agent.fabric), 1)
            here.agent.script.append(fate)
            peer = here.agent.add_peer(there.agent.metadata())
            local, remote = here.agent.prepare(None, here.rows, "DRAM"), here.agent.prepare(peer, there.rows, "DRAM")
            return here, there, here.agent.post(local, ids(0), remote, ids(0))

        return post

    def test_a_hanging_read_ends_when_told_to_and_only_then_brings_bytes(self, posted) -> None:
        here, there, read = posted(Fate.HANG)
        assert [here.agent.state(read) for _ in range(9)] == [ReadState.BUSY] * 9
        assert here.page(0) == bytes(PAGE)
        here.agent.finish()
        assert here.agent.state(read) is ReadState.DONE
        assert here.page(0) == there.page(0)

    def test_a_hanging_read_may_end_in_an_error(self, posted) -> None:
        here, _, read = posted(Fate.HANG)
        here.agent.fail()
        assert here.agent.state(read) is ReadState.ERROR
        assert here.agent.error(read)

    def test_reads_may_fail_be_refused_or_get_lost(self, posted) -> None:
        here, _, read = posted(Fate.ERROR)
        assert here.agent.state(read) is ReadState.ERROR
        with pytest.raises(AgentError):
            posted(Fate.REFUSED)
        here, _, read = posted(Fate.LOST)
        with pytest.raises(AgentError):
            here.agent.state(read)

    def test_releasing_or_closing_under_a_busy_read_is_a_mistake_of_ours(self, posted) -> None:
        here, _, read = posted(Fate.HANG)
        with pytest.raises(AssertionError, match="busy"):
            here.agent.release(read)
        with pytest.raises(AssertionError, match="busy"):
            here.agent.close()
