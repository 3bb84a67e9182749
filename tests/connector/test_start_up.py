"""What happens before the first request: registration, and one sentence for each thing that is not supported."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("vllm")

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec, get_kv_quant_mode

from kvlease.config import ConfigError, Settings
from kvlease.connector import KVLeaseConnector, NixlConnector
from kvlease.connector.scheduler import advertised
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


def test_every_data_parallel_rank_has_a_port_of_its_own() -> None:
    for index, ports in enumerate([(14579, 7, 0), (14580, 8, 0)]):
        parallel = SimpleNamespace(data_parallel_index=index)
        given = [advertised(Settings(host="10.0.0.1", port=port), 14579, parallel) for port in (None, 7, 0)]
        assert given == [("10.0.0.1", port) for port in ports]


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "[::]"])
@pytest.mark.parametrize("is_set", [True, False], ids=["set", "found by vLLM"])
def test_an_address_that_leads_every_peer_to_itself_stops_the_engine(
    monkeypatch: pytest.MonkeyPatch, host: str, is_set: bool
) -> None:
    monkeypatch.setenv("VLLM_HOST_IP", host)
    with pytest.raises(ConfigError, match=rf"{re.escape(host)}.*set 'host'"):
        advertised(Settings(host=host if is_set else None), 14579, SimpleNamespace())


@pytest.mark.parametrize(("host", "warns"), [("127.0.0.1", True), ("localhost", True), ("10.0.0.1", False)])
def test_an_address_that_only_this_machine_can_reach_is_warned_of_unless_it_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, host: str, warns: bool
) -> None:
    monkeypatch.setenv("VLLM_HOST_IP", host)
    with caplog.at_level(logging.WARNING, logger="kvlease.scheduler"):
        assert advertised(Settings(host=host), 14579, SimpleNamespace()) == (host, 14579)
        assert not caplog.messages
        assert advertised(Settings(), 14579, SimpleNamespace()) == (host, 14579)
    assert bool(caplog.messages) is warns


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
    for dtype in ("fp8", "int8_per_token_head", "nvfp4_ds_mla"):
        quantised = replace(spec, kv_quant_mode=get_kv_quant_mode(dtype))
        with pytest.raises(ConfigError, match="quantised KV cache"):
            check_supported(site.config, with_groups(KVCacheGroupSpec(["layer.0"], quantised)))
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
