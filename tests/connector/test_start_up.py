"""What happens before the first request: registration, and one sentence for each thing that is not supported."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("vllm")

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec

from kvlease.config import ConfigError
from kvlease.connector import KVLeaseConnector, NixlConnector
from kvlease.connector.support import check_supported
from kvlease.plugin import register

if TYPE_CHECKING:
    from tests.connector.harness import Site

MakeSite = Callable[..., "Site"]


def test_registering_twice_is_fine() -> None:
    register()
    register()
    assert KVConnectorFactory.get_connector_class_by_name("KVLeaseConnector") is KVLeaseConnector
    assert NixlConnector is KVLeaseConnector


def test_an_unknown_knob_stops_the_engine(make_site: MakeSite) -> None:
    with pytest.raises(ConfigError, match=r"lease_duration.*kvlease knows"):
        make_site("kv_producer", lease_duration=3)


def test_a_port_that_is_taken_names_the_setting(make_site: MakeSite) -> None:
    first = make_site("kv_producer")
    port = first.prefill("p", list(range(20)))["remote_port"]
    with pytest.raises(Exception, match=rf"{port}.*port"):
        make_site("kv_producer", port=port)


def test_what_is_not_supported_is_refused_in_a_sentence(make_site: MakeSite) -> None:
    site = make_site("kv_consumer")
    cache = site.scheduler.kv_cache_config
    spec = cache.kv_cache_groups[0].kv_cache_spec
    sliding = SlidingWindowSpec(block_size=16, num_kv_heads=2, head_size=32, dtype=spec.dtype, sliding_window=64)

    def with_groups(*groups: KVCacheGroupSpec) -> KVCacheConfig:
        return replace(cache, kv_cache_groups=list(groups))

    check_supported(site.config, cache)
    with pytest.raises(ConfigError, match="2 KV-cache groups"):
        check_supported(site.config, with_groups(*cache.kv_cache_groups, *cache.kv_cache_groups))
    with pytest.raises(ConfigError, match="SlidingWindowSpec"):
        check_supported(site.config, with_groups(KVCacheGroupSpec(["layer.0"], sliding)))
    for section, name, value in [
        ("parallel_config", "pipeline_parallel_size", 2),
        ("parallel_config", "decode_context_parallel_size", 2),
        ("model_config", "enable_sleep_mode", True),
        ("kv_transfer_config", "kv_buffer_device", "cuda"),
    ]:
        holder = getattr(site.config, section)
        before = getattr(holder, name)
        setattr(holder, name, value)
        with pytest.raises(ConfigError, match="kvlease does not support"):
            check_supported(site.config, cache)
        setattr(holder, name, before)
