"""Sites for the scheduler-level tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.connector.harness import Site


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiny-model")


@pytest.fixture
def make_site(tiny_model: Path) -> Iterator[Callable[..., Site]]:
    from tests.connector.harness import Site

    sites: list[Site] = []

    def make(role: str, **more: Any) -> Site:
        sites.append(Site(tiny_model, role, **more))
        return sites[-1]

    yield make
    for site in sites:
        site.close()
