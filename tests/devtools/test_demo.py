"""The demo's last line and status: green only when every text is right and came the way it should."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scripts.demo import PULLED, RECOMPUTED, Ask, Row, verdict

PULL = Row(Ask("a", PULLED, [1]), 10, 2_500_000.0, 0.1, PULLED, "", identical=True)
LOSS = Row(Ask("b", RECOMPUTED, [1]), 10, 0.0, 0.1, RECOMPUTED, "peer_dead", identical=True)


def test_all_well() -> None:
    assert verdict([PULL, PULL, LOSS]) == "demo: OK, 3/3 outputs identical, 5.0 MB pulled, 1 recomputed"


@pytest.mark.parametrize(
    ("row", "line"),
    [
        (replace(PULL, identical=False), "demo: FAILED, 1/2 outputs identical, 2.5 MB pulled, 1 recomputed"),
        (replace(PULL, outcome=RECOMPUTED), "demo: FAILED, 2/2 outputs identical, 2.5 MB pulled, 2 recomputed"),
    ],
    ids=["another text", "another way"],
)
def test_what_makes_it_fail(row: Row, line: str) -> None:
    assert not row.is_right
    assert verdict([row, LOSS]) == line
