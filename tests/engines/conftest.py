"""Engines for the tests of this folder: one module is one set of start-up flags, and its tests share the engines."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from devtools.model import ensure_model
from devtools.prompts import PromptMaker


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.engines)


@pytest.fixture(scope="session")
def prompts() -> PromptMaker:
    return PromptMaker(ensure_model())


@pytest.fixture(scope="module")
def log_dir(request: pytest.FixtureRequest) -> Path:
    """Where the engines of a module write; emptied when it runs again, so that a failure can be looked into."""
    folder = Path(__file__).parents[2] / ".cache" / "engine-tests" / request.module.__name__.rpartition(".")[2]
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder
