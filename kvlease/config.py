"""Settings: what a user may write into ``kv_connector_extra_config``, checked once, and every interval derived from it.

Unknown keys, wrong types and impossible combinations are refused at start-up, each with the value seen and what is
allowed, because a knob that is silently ignored is found in production.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args, get_type_hints

import msgspec

_YEAR_S = 365 * 24 * 3600.0

Seconds = Annotated[float, msgspec.Meta(gt=0, le=_YEAR_S)]
SecondsOrZero = Annotated[float, msgspec.Meta(ge=0, le=_YEAR_S)]
Positive = Annotated[int, msgspec.Meta(ge=1)]

_GIB = 1 << 30


class ConfigError(ValueError):
    """A setting that cannot be honoured; the text names it, its value and what is allowed."""


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The knobs of one engine, all with defaults. Names ending in ``_s`` are seconds.

    ``host`` and ``port`` are what peers are told; ``None`` stands for vLLM's own address and for
    ``kv_port`` + data-parallel index. Port 0 takes any free port (the handoff names the real one).
    """

    host: Annotated[str, msgspec.Meta(min_length=1)] | None = None
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] | None = None
    lease_duration_s: Seconds = 30.0
    lease_extension_s: Seconds = 10.0
    heartbeat_interval_s: Seconds = 3.0
    max_lease_lifetime_s: Seconds = 600.0
    sibling_grace_s: SecondsOrZero = 0.2
    acquire_timeout_s: Seconds = 2.0
    commit_timeout_s: Seconds = 2.0
    peer_timeout_s: Seconds = 2.0
    load_timeout_s: Seconds = 120.0
    load_timeout_s_per_gib: SecondsOrZero = 10.0
    tombstone_ttl_s: Seconds = 600.0
    tombstone_max: Positive = 100_000
    chunk_bytes: Positive = 16 << 20
    chunk_descriptors: Positive = 1024
    backends: Annotated[list[str], msgspec.Meta(min_length=1)] = msgspec.field(default_factory=lambda: ["UCX"])
    num_threads: Annotated[int, msgspec.Meta(ge=0)] = 4
    progress_thread: Literal["auto", "on", "off"] = "auto"
    enforce_handshake_compat: bool = True
    inline_block_ids: bool = True
    kv_checksum: Literal["off", "sampled", "full"] = "off"

    def ping_interval_s(self) -> float:
        """How often a peer with open loads is asked whether it lives: four times within ``peer_timeout_s``."""
        return self.peer_timeout_s / 4

    def load_budget_s(self, len_bytes: int) -> float:
        """How long a load of ``len_bytes`` may take from the order to pull it to its report."""
        return self.load_timeout_s + self.load_timeout_s_per_gib * len_bytes / _GIB

    def check_budget_s(self, len_bytes: int) -> float:
        """How long the checksums of ``len_bytes`` may be waited for, from the last byte that was read."""
        return self.commit_timeout_s + self.load_timeout_s_per_gib * len_bytes / _GIB


def parse_settings(extra: Mapping[str, Any]) -> Settings:
    """Check ``kv_connector_extra_config``.

    Raises:
        ConfigError: an unknown key, a wrong type, a value out of range, or values that contradict each other.
    """
    for name in sorted(set(extra) - set(Settings.__struct_fields__)):
        near = difflib.get_close_matches(name, Settings.__struct_fields__, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError(
            f"kv_connector_extra_config has the unknown key {name!r}; {hint}"
            f"kvlease knows {', '.join(sorted(Settings.__struct_fields__))}"
        )
    try:
        settings = msgspec.convert(dict(extra), Settings)
    except msgspec.ValidationError as error:
        raise ConfigError(_readable(str(error), extra)) from error
    _check_intervals(settings)
    return settings


def _readable(error: str, extra: Mapping[str, Any]) -> str:
    """A msgspec error (it ends in ``at `$.field```) with the value seen and, where they are few, those allowed."""
    what, _, path = error.rpartition(" - at ")
    name = path.strip("`").removeprefix("$.").partition("[")[0]
    allowed = get_args(get_type_hints(Settings).get(name))
    words = [repr(value) for value in allowed if isinstance(value, str)]
    may_be = f"; it may be {', '.join(words)}" if words else ""
    return f"kv_connector_extra_config: {name} is {extra.get(name)!r}: {what or error}{may_be}"


def _check_intervals(settings: Settings) -> None:
    if settings.lease_extension_s < 3 * settings.heartbeat_interval_s * (1 - 1e-9):  # 0.3 is three times 0.1
        raise ConfigError(
            f"lease_extension_s is {settings.lease_extension_s} with heartbeat_interval_s "
            f"{settings.heartbeat_interval_s}; it must be at least three heartbeats, so that two may be lost"
        )
    if settings.max_lease_lifetime_s < settings.lease_duration_s:
        raise ConfigError(
            f"max_lease_lifetime_s is {settings.max_lease_lifetime_s}, less than lease_duration_s "
            f"{settings.lease_duration_s}; a lease cannot outlive its lifetime"
        )
