"""A fault that repeats says so once in a while, and never fills a disk."""

from __future__ import annotations

import logging

import pytest

from kvlease.logs import INTERVAL_S, RateLimitedLog

logger = logging.getLogger("tests.logs")


def test_one_line_of_each_kind_passes_and_the_next_one_counts_the_others(caplog):
    log = RateLimitedLog(logger)
    for now in (0.0, 1.0, INTERVAL_S - 0.1):
        log("bad", now, "bad at %.1f", now)
    log("worse", 2.0, "worse")
    log("bad", INTERVAL_S, "bad again")
    log("bad", 2 * INTERVAL_S, "and again")
    assert caplog.messages == [
        "bad at 0.0",
        "worse",
        "bad again (2 more like this since the last such line)",
        "and again",
    ]


def test_a_burst_passes_in_each_interval(caplog):
    log = RateLimitedLog(logger, burst=2)
    for now in (0, 1, 2, 9, 10, 11, 12):
        log("load", now, "load %d", now)
    assert caplog.messages == [
        "load 0",
        "load 1",
        "load 10 (2 more like this since the last such line)",
        "load 11",
    ]


@pytest.mark.parametrize("explicit", [True, False], ids=["given", "being handled"])
def test_an_error_comes_with_its_traceback_at_the_level_asked_for(caplog, explicit):
    log = RateLimitedLog(logger)
    try:
        raise ValueError("no")
    except ValueError as error:
        log("crash", 0.0, "it broke", level=logging.ERROR, trace=error if explicit else True)
        (record,) = caplog.records
        assert (record.levelno, record.exc_info[1]) == (logging.ERROR, error)
