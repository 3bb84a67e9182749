"""The handoff: what a router may do to it, and what a consumer makes of the result."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlease.core.handoff import Handoff, HandoffError, emit_handoff, parse_handoff, wants_lease, wants_load
from kvlease.core.ids import EngineId, Incarnation, LeaseId, LeaseToken, PeerKey
from kvlease.core.loads import FailureCause

HANDOFF = Handoff(
    engine_id=EngineId("engine-1"),
    incarnation=Incarnation(bytes(range(16))),
    lease=LeaseId("cmpl-1"),
    token=LeaseToken(bytes(range(16, 32))),
    host="10.0.0.1",
    port=14579,
    num_tokens=2500,
)


def emitted(**changes: Any) -> dict[str, Any]:
    params = emit_handoff(HANDOFF, block_ids=[[1, 2, 3]], tp_size=2, ttl_s=30.0)
    return {**params, **changes}


def test_what_is_emitted_survives_json_and_is_read_back() -> None:
    assert parse_handoff(json.loads(json.dumps(emitted()))) == HANDOFF
    assert HANDOFF.peer == PeerKey(EngineId("engine-1"), HANDOFF.incarnation, "10.0.0.1", 14579)


def test_every_key_of_the_in_tree_connector_is_there_with_its_type() -> None:
    params = emitted()
    assert params["do_remote_prefill"] is True
    assert params["do_remote_decode"] is False
    assert params["remote_block_ids"] == [[1, 2, 3]]
    assert isinstance(params["remote_port"], int)
    assert {"remote_engine_id", "remote_request_id", "remote_host", "tp_size", "dcp_size", "pp_size"} <= params.keys()
    assert {"remote_num_tokens", "remote_blocks_expiry_time", "transfer_mode", "kvlease"} <= params.keys()


def test_block_ids_can_be_left_out() -> None:
    params = emit_handoff(HANDOFF, block_ids=None, tp_size=1, ttl_s=30.0)
    assert "remote_block_ids" not in params
    assert parse_handoff(params) == HANDOFF


def test_the_token_is_never_shown() -> None:
    assert HANDOFF.token.hex() not in repr(HANDOFF)
    assert str(HANDOFF.token) not in repr(HANDOFF)


@pytest.mark.parametrize("junk", [None, [], {}, "x", 7, {"a": 1}])
def test_a_router_may_write_anything_into_the_keys_we_do_not_need(junk: Any) -> None:
    params = emitted(remote_block_ids=junk, tp_size=junk, transfer_mode=junk, dcp_size=junk, more=junk)
    assert parse_handoff(params) == HANDOFF


@pytest.mark.parametrize(
    ("params", "lease", "load"),
    [
        (None, False, False),
        ({}, False, False),
        ([], False, False),
        ({"do_remote_decode": True}, True, False),
        ({"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None}, True, False),
        ({"do_remote_prefill": True}, False, True),
        ({"do_remote_prefill": None}, False, False),
    ],
)
def test_one_key_alone_decides_what_is_asked(params: Any, lease: bool, load: bool) -> None:
    assert (wants_lease(params), wants_load(params)) == (lease, load)


def test_without_our_key_there_is_no_proof() -> None:
    for params in ({"do_remote_prefill": True}, emitted(kvlease=None)):
        with pytest.raises(HandoffError) as error:
            parse_handoff(params)
        assert (error.value.reason, error.value.cause) == ("no_proof", FailureCause.NO_PROOF)


@pytest.mark.parametrize("params", [None, [], "x", 3])
def test_what_is_not_an_object_is_refused(params: Any) -> None:
    with pytest.raises(HandoffError) as error:
        parse_handoff(params)
    assert error.value.reason == "not_an_object"


WRONG: list[Any] = [None, True, 1.5, -1, 0, 1 << 70, "", "x" * 1000, [], [1], {}, {"a": 1}]
NAMED = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port", "remote_num_tokens")
RIGHT = {("remote_num_tokens", 1)}


@pytest.mark.parametrize("key", NAMED)
@pytest.mark.parametrize("value", WRONG, ids=lambda value: repr(value)[:12])
def test_every_needed_key_is_checked_and_named(key: str, value: Any) -> None:
    with pytest.raises(HandoffError) as error:
        parse_handoff(emitted(**{key: value}))
    assert error.value.reason == key
    assert error.value.cause is FailureCause.BAD_HANDOFF


@pytest.mark.parametrize("key", NAMED)
def test_every_needed_key_must_be_there(key: str) -> None:
    params = emitted()
    del params[key]
    with pytest.raises(HandoffError) as error:
        parse_handoff(params)
    assert error.value.reason == key


@pytest.mark.parametrize("key", ["v", "token", "incarnation"])
@pytest.mark.parametrize("value", [*WRONG, "ab" * 15, "ab" * 17, "AB" * 16, "zz" * 16, "ab" * 16 + "\n"], ids=repr)
def test_every_part_of_the_proof_is_checked_and_named(key: str, value: Any) -> None:
    params = emitted(kvlease={**emitted()["kvlease"], key: value})
    with pytest.raises(HandoffError) as error:
        parse_handoff(params)
    assert error.value.reason == f"kvlease.{key}"


def test_a_proof_that_is_no_object_is_refused() -> None:
    for proof in ("x", 3, [1], True):
        with pytest.raises(HandoffError) as error:
            parse_handoff(emitted(kvlease=proof))
        assert error.value.reason == "kvlease"


def test_another_version_is_refused_by_name_and_further_fields_are_not() -> None:
    proof = emitted()["kvlease"]
    for version in (0, 2):
        with pytest.raises(HandoffError, match="this version of kvlease reads 1"):
            parse_handoff(emitted(kvlease={**proof, "v": version}))
    assert parse_handoff(emitted(kvlease={**proof, "sig": "x", "ttl_s": None})) == HANDOFF


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from([*NAMED, "kvlease", "do_remote_prefill"]), JSON), JSON)
def test_no_json_raises_anything_else(changes: dict[str, Any], proof: Any) -> None:
    for params in (changes, {**emitted(), **changes}, emitted(kvlease=proof), proof):
        try:
            handoff = parse_handoff(params)
        except HandoffError as error:
            assert error.reason
        else:
            assert 1 <= handoff.port <= 65535
