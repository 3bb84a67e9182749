"""Our lines go where vLLM's go, once, and never over what a user configured."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

pytest.importorskip("vllm")

from kvlease.connector.logs import join_vllm_logging


@pytest.fixture
def ours() -> Iterator[logging.Logger]:
    logger = logging.getLogger("kvlease")
    before, level = list(logger.handlers), logger.level
    logger.handlers, logger.level = [], logging.NOTSET
    theirs = logging.getLogger("vllm")  # vLLM sets its handlers up when an engine starts
    handler = logging.NullHandler()
    theirs.addHandler(handler)
    yield logger
    theirs.removeHandler(handler)
    logger.handlers, logger.level = before, level


def test_joined_once(ours: logging.Logger) -> None:
    join_vllm_logging()
    join_vllm_logging()
    assert ours.handlers == logging.getLogger("vllm").handlers != []
    assert ours.level == logging.getLogger("vllm").getEffectiveLevel()


def test_a_users_own_handlers_stay(ours: logging.Logger) -> None:
    own = logging.NullHandler()
    ours.addHandler(own)
    join_vllm_logging()
    assert ours.handlers == [own]
