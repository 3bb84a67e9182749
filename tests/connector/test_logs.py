"""Our lines go where vLLM's go, once, and never over what a user configured."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

pytest.importorskip("vllm")

import vllm.logger  # noqa: F401 - sets up vLLM's handlers

from kvlease.connector.logs import join_vllm_logging


@pytest.fixture
def ours() -> Iterator[logging.Logger]:
    logger = logging.getLogger("kvlease")
    before, level = list(logger.handlers), logger.level
    logger.handlers, logger.level = [], logging.NOTSET
    yield logger
    logger.handlers, logger.level = before, level


def test_joined_once(ours: logging.Logger) -> None:
    join_vllm_logging()
    join_vllm_logging()
    assert ours.handlers == logging.getLogger("vllm").handlers != []
    assert ours.isEnabledFor(logging.INFO)


def test_a_users_own_handlers_stay(ours: logging.Logger) -> None:
    own = logging.NullHandler()
    ours.addHandler(own)
    join_vllm_logging()
    assert ours.handlers == [own]
