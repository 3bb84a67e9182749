"""Two tensor-parallel ranks on each side: each reads its counterpart, and the lease ends when both committed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from devtools.pair import (
    BLOCK_SIZE,
    TOKEN,
    WAIT_S,
    Shape,
    acquire,
    layout_of,
    make_caches,
    make_half,
    make_order,
    start_endpoint,
)
from kvlease.config import Settings
from kvlease.core.ids import EngineId, Incarnation, LeaseId, LoadId, PeerKey
from kvlease.core.orders import LoadOrder, Orders, Reports
from kvlease.core.silence import PeerTiming
from kvlease.net.channel import Channel
from kvlease.net.endpoint import GrantItem

pytestmark = pytest.mark.peer

SHAPE = Shape(3, 32, 4096)
BLOCKS = {1: 9, 2: 5, 3: 6}
PROMPT = list(range(BLOCK_SIZE * len(BLOCKS)))


class Rig:
    """Both engines' ranks in this process; each side's ranks hold different bytes, as slices of heads are."""

    def __init__(self, settings: Settings) -> None:
        self.theirs = [make_caches(SHAPE, seed=rank + 1) for rank in range(2)]
        self.ours = [make_caches(SHAPE, None) for _ in range(2)]
        self.producers = [make_half(settings, "producer", rank, 2) for rank in range(2)]
        self.consumers = [make_half(settings, "consumer", rank, 2) for rank in range(2)]
        for half, caches in zip(self.producers + self.consumers, self.theirs + self.ours, strict=True):
            half.register(layout_of(caches), [BLOCK_SIZE])
        for half in self.producers:
            half.take_orders(Orders(leases_live=1))
        self.incarnation = Incarnation(os.urandom(16))
        self.endpoint = start_endpoint(
            self.incarnation,
            [half.rank_info() for half in self.producers],
            hashers=[half.hasher_address() for half in self.producers],
        )
        self.key = PeerKey(EngineId("producer"), self.incarnation, "127.0.0.1", self.endpoint.port)
        self.channel = Channel(PeerTiming(10.0, 2.5))

    def order(self) -> LoadOrder:
        """The order that both consumer ranks get; its lease has been acquired."""
        lease, load = LeaseId("lease"), LoadId("load")
        self.endpoint.grant(
            GrantItem(lease, TOKEN, PROMPT, len(PROMPT), None, None, [], [list(BLOCKS.values())]),
        )
        granted = acquire(self.channel, self.key, lease, load, PROMPT)
        return make_order(self.key, lease, load, granted, list(BLOCKS))

    def reports_of(self, rank: int, until: Callable[[Reports], bool]) -> Reports:
        """What one consumer rank reports, until it is enough."""
        seen = Reports()
        ends_at = time.monotonic() + WAIT_S
        while not until(seen):
            assert time.monotonic() < ends_at, self.consumers[rank].take_stats()
            more = self.consumers[rank].take_reports()
            seen.received |= more.received
            seen.failed.update(more.failed)
        return seen

    def close(self) -> None:
        self.channel.close()
        for half in self.consumers:
            half.shutdown()
        self.endpoint.close()
        for half in self.producers:
            half.shutdown()


@pytest.fixture(params=["off", "full"])
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    """With and without checksums: each rank's are those of its mirror."""
    made = Rig(Settings(num_threads=0, kv_checksum=request.param))
    yield made
    made.close()


def test_each_rank_reads_its_own_and_the_lease_ends_with_the_second_commit(rig: Rig) -> None:
    order = rig.order()
    for rank in (0, 1):
        rig.consumers[rank].take_orders(Orders(loads=[order]))
        reports = rig.reports_of(rank, lambda seen: bool(seen.received))
        assert reports.failed == {}
        ours, theirs = torch.tensor(list(BLOCKS)), torch.tensor(list(BLOCKS.values()))
        for name, cache in rig.ours[rank].items():
            assert torch.equal(cache[:, ours], rig.theirs[rank][name][:, theirs])
        if rank == 0:
            assert rig.endpoint.take_ended() == []
    ends_at = time.monotonic() + WAIT_S
    ended = rig.endpoint.take_ended()
    while not ended:
        assert time.monotonic() < ends_at
        ended = rig.endpoint.take_ended()
    assert [one.lease for one in ended] == ["lease"]
