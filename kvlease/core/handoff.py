"""The handoff: ``kv_transfer_params`` as a router carries them, read and written in exactly one place.

A router sends a producer the six standard keys and passes the producer's answer to a consumer unread, so the handoff
keeps every key of vLLM's own NIXL connector with its name, type and meaning, and puts what is ours under one further
key, ``kvlease``. Nothing in it is believed: it only says whom to ask, and the producer's answer decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec

from kvlease.core.ids import INCARNATION_BYTES, TOKEN_BYTES, EngineId, Incarnation, LeaseId, LeaseToken, PeerKey
from kvlease.core.loads import FailureCause

HANDOFF_VERSION = 1
"""Version of what stands under the ``kvlease`` key."""


class HandoffError(Exception):
    """A handoff that names no lease. ``reason`` is one word for the counter, ``cause`` why its load fails."""

    def __init__(self, reason: str, text: str, cause: FailureCause = FailureCause.BAD_HANDOFF) -> None:
        super().__init__(text)
        self.reason = reason
        self.cause = cause


@dataclass(frozen=True)
class Handoff:
    """Which lease, whose, and where to ask. ``num_tokens`` is how many prompt tokens it says it covers."""

    engine_id: EngineId
    incarnation: Incarnation
    lease: LeaseId
    token: LeaseToken = field(repr=False)
    host: str
    port: int
    num_tokens: int

    @property
    def peer(self) -> PeerKey:
        """The producer, as a consumer addresses it."""
        return PeerKey(self.engine_id, self.incarnation, self.host, self.port)


_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
_Host = Annotated[str, msgspec.Meta(min_length=1, max_length=255)]
_Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]
_Tokens = Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]
_Hex16 = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{32}\Z", max_length=2 * TOKEN_BYTES)]


class _Proof(msgspec.Struct, frozen=True):
    """What stands under ``kvlease``."""

    v: int
    token: _Hex16
    incarnation: _Hex16
    ttl_s: float | None = None


class _Params(msgspec.Struct, frozen=True):
    """The keys a consumer needs; all others are ignored, whatever they hold."""

    remote_engine_id: _Name
    remote_request_id: _Name
    remote_host: _Host
    remote_port: _Port
    remote_num_tokens: _Tokens


def wants_lease(params: object) -> bool:
    """Whether a producer is asked to hand its KV over: ``do_remote_decode`` alone decides."""
    return isinstance(params, dict) and bool(params.get("do_remote_decode"))


def wants_load(params: object) -> bool:
    """Whether a consumer is asked to load: ``do_remote_prefill`` alone decides, as in vLLM's own code."""
    return isinstance(params, dict) and bool(params.get("do_remote_prefill"))


def parse_handoff(params: object) -> Handoff:
    """Read a handoff.

    Raises:
        HandoffError: it names no lease; with the first offending key as ``reason``. Nothing else, whatever it holds.
    """
    if not isinstance(params, dict):
        raise HandoffError("not_an_object", f"kv_transfer_params is {type(params).__name__}, not an object")
    if params.get("kvlease") is None:
        raise HandoffError(
            "no_proof",
            "kv_transfer_params has no 'kvlease' key: it comes from another connector, or a router dropped it, "
            "and cannot prove that its blocks are still there",
            FailureCause.NO_PROOF,
        )
    named = _convert(params, _Params, "")
    proof = _convert(params["kvlease"], _Proof, "kvlease.")
    if proof.v != HANDOFF_VERSION:
        raise HandoffError("kvlease.v", f"kvlease.v is {proof.v}; this version of kvlease reads {HANDOFF_VERSION}")
    return Handoff(
        engine_id=EngineId(named.remote_engine_id),
        incarnation=Incarnation(bytes.fromhex(proof.incarnation)),
        lease=LeaseId(named.remote_request_id),
        token=LeaseToken(bytes.fromhex(proof.token)),
        host=named.remote_host,
        port=named.remote_port,
        num_tokens=named.remote_num_tokens,
    )


def emit_handoff(
    handoff: Handoff, *, block_ids: Sequence[list[int]] | None, tp_size: int, ttl_s: float
) -> dict[str, Any]:
    """The handoff as JSON-safe ``kv_transfer_params`` for the producer's response.

    Args:
        handoff: what it names.
        block_ids: the leased blocks, one list for each KV-cache group, for routers that look at them; None for none.
        tp_size: the producer's tensor-parallel size.
        ttl_s: seconds for which the lease is good from now, unless it is acquired.
    """
    params: dict[str, Any] = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": handoff.engine_id,
        "remote_request_id": handoff.lease,
        "remote_host": handoff.host,
        "remote_port": handoff.port,
        "remote_num_tokens": handoff.num_tokens,
        "remote_blocks_expiry_time": None,
        "tp_size": tp_size,
        "dcp_size": 1,
        "pp_size": 1,
        "transfer_mode": "pull",
        "kvlease": {
            "v": HANDOFF_VERSION,
            "token": handoff.token.hex(),
            "incarnation": handoff.incarnation.hex(),
            "ttl_s": ttl_s,
        },
    }
    if block_ids is not None:
        params["remote_block_ids"] = [list(group) for group in block_ids]
    return params


def _convert(value: object, kind: type[Any], prefix: str) -> Any:
    if not isinstance(value, dict):
        raise HandoffError(prefix.rstrip("."), f"{prefix.rstrip('.')} is {type(value).__name__}, not an object")
    for name in kind.__struct_fields__:
        if value.get(name) is None and name != "ttl_s":
            raise HandoffError(prefix + name, f"kv_transfer_params has no {prefix}{name}")
    try:
        return msgspec.convert({name: value.get(name) for name in kind.__struct_fields__}, kind)
    except (msgspec.ValidationError, OverflowError, RecursionError) as error:
        raise HandoffError(prefix + _field_of(error), f"kv_transfer_params.{prefix}: {error}") from error


def _field_of(error: Exception) -> str:
    """The struct field that a msgspec error names (its text ends in ``at `$.field```)."""
    return str(error).rpartition("$.")[2].strip("`") or "value"


assert INCARNATION_BYTES == TOKEN_BYTES == 16  # _Hex16 reads both
