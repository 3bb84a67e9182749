"""What both of a consumer's ends of the wire are tested with: a clock that stands still, and a producer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvlease.testing import FakeClock

from .router import Router


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def router() -> Iterator[Router]:
    router = Router()
    yield router
    router.close()
