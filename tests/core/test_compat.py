"""Compatibility: a refusal names what differs, with both values."""

from __future__ import annotations

import pytest

from kvlease.core.compat import differences, fingerprint, is_layout
from kvlease.core.messages import Difference

OURS = {"block_size": "128", "model_dtype": "bfloat16", "tp_size": "1"}


def test_equal_factors_have_equal_fingerprints_in_any_order() -> None:
    assert fingerprint(OURS) == fingerprint(dict(reversed(OURS.items())))
    assert differences(OURS, dict(OURS)) == []


@pytest.mark.parametrize("name", OURS)
def test_every_factor_changes_the_fingerprint_and_is_named(name: str) -> None:
    theirs = {**OURS, name: "other"}
    assert fingerprint(theirs) != fingerprint(OURS)
    assert differences(OURS, theirs) == [Difference(name=name, ours=OURS[name], theirs="other")]


def test_a_factor_one_side_lacks_is_a_difference() -> None:
    assert differences({"a": "1"}, {"b": "2"}) == [
        Difference(name="a", ours="1", theirs=None),
        Difference(name="b", ours=None, theirs="2"),
    ]


def test_names_and_values_cannot_run_into_each_other() -> None:
    assert fingerprint({"a": "bc"}) != fingerprint({"ab": "c"})
    assert fingerprint({"a": "1", "b": "2"}) != fingerprint({"a": "1b2"})


def test_layout_factors_are_those_that_no_setting_may_overrule() -> None:
    assert is_layout("block_size")
    assert not is_layout("model_config")
