"""What both halves tell each other says what it is about, and never a token."""

from __future__ import annotations

import pytest

from kvlease.core.ids import EngineId, Incarnation, LeaseId, LeaseToken, LoadId, PeerKey, ReaderId
from kvlease.core.loads import FailureCause
from kvlease.core.orders import NO_ORDERS, LoadOrder, Orders, Reports


@pytest.mark.parametrize(
    ("doomed", "end"),
    [(None, "tokens=[16, 48)>"), (FailureCause.BAD_HANDOFF, "tokens=[16, 48) doomed=bad_handoff>")],
)
def test_an_order_shows_what_is_read_and_no_token(doomed: FailureCause | None, end: str) -> None:
    order = LoadOrder(
        load=LoadId("load"),
        lease=LeaseId("lease"),
        token=LeaseToken(b"a secret of 16 b"),
        reader=ReaderId("channel/load"),
        peer=PeerKey(EngineId("producer"), Incarnation(b"producer-life-01"), "127.0.0.1", 1),
        start_token=16,
        end_token=48,
        local_blocks=([1, 2, 3],),
        remote_blocks=[[(7, 3)]],
        doomed=doomed,
    )
    assert repr(order) == f"<LoadOrder load lease=lease {end}"


def test_a_step_in_which_nothing_happens_orders_and_reports_nothing_of_another_step() -> None:
    Reports().received.add(LoadId("load"))
    assert Reports() == Reports(set(), set(), {}, set(), set())
    assert Orders() == Orders(loads=[], aborts=[], ended=[], leases_live=0, greet=[]) == NO_ORDERS
