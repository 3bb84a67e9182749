"""Settings are checked once, in words."""

from __future__ import annotations

from typing import Any

import pytest

from kvlease.config import ConfigError, Settings, parse_settings


def test_without_anything_the_defaults_hold_and_agree_with_each_other() -> None:
    settings = parse_settings({})
    assert settings == Settings()
    assert settings.lease_duration_s == 30.0
    assert settings.lease_extension_s >= 3 * settings.heartbeat_interval_s
    assert settings.host is None
    assert settings.port is None


def test_what_is_given_counts_and_whole_numbers_are_seconds_too() -> None:
    settings = parse_settings({"lease_duration_s": 12, "port": 0, "host": "10.0.0.1", "backends": ["UCX", "GDS"]})
    assert settings.lease_duration_s == 12.0
    assert settings.port == 0
    assert settings.backends == ["UCX", "GDS"]


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"lease_duration": 12}, ["lease_duration", "lease_duration_s", "unknown"]),
        ({"lease_duration_s": 0}, ["lease_duration_s", "0"]),
        ({"lease_duration_s": -1.0}, ["lease_duration_s", "-1"]),
        ({"lease_duration_s": "30"}, ["lease_duration_s", "30"]),
        ({"lease_duration_s": None}, ["lease_duration_s"]),
        ({"lease_duration_s": float("nan")}, ["lease_duration_s", "nan"]),
        ({"peer_timeout_s": float("inf")}, ["peer_timeout_s", "inf"]),
        ({"tombstone_max": 0}, ["tombstone_max"]),
        ({"tombstone_max": 1.5}, ["tombstone_max"]),
        ({"port": 70000}, ["port", "70000"]),
        ({"backends": []}, ["backends"]),
        ({"progress_thread": "maybe"}, ["progress_thread", "maybe"]),
        ({"inline_block_ids": 1}, ["inline_block_ids"]),
        ({"lease_extension_s": 5.0}, ["lease_extension_s", "5.0", "heartbeat_interval_s", "three"]),
        ({"heartbeat_interval_s": 4}, ["heartbeat_interval_s", "4.0"]),
        ({"max_lease_lifetime_s": 20}, ["max_lease_lifetime_s", "20.0", "lease_duration_s", "30.0"]),
    ],
)
def test_what_cannot_be_honoured_is_refused_with_its_name_and_value(extra: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_settings(extra)
    for word in words:
        assert word in str(caught.value)


def test_a_peer_is_asked_four_times_before_it_is_given_up() -> None:
    assert parse_settings({"peer_timeout_s": 2}).ping_interval_s() == 0.5


def test_a_load_may_take_longer_the_more_it_moves() -> None:
    settings = parse_settings({"load_timeout_s": 100, "load_timeout_s_per_gib": 10})
    assert settings.load_budget_s(0) == 100
    assert settings.load_budget_s(3 << 30) == 130


def test_a_misspelt_knob_is_answered_with_the_one_that_was_meant() -> None:
    with pytest.raises(ConfigError, match=r"'lease_duration'; did you mean 'lease_duration_s'\?"):
        parse_settings({"lease_duration": 3})


def test_a_word_that_is_none_of_few_is_answered_with_those() -> None:
    with pytest.raises(ConfigError, match=r"progress_thread is 'yes'.*'auto', 'on', 'off'"):
        parse_settings({"progress_thread": "yes"})
