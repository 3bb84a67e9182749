"""What kvlease does not support yet, refused at start-up in one sentence each, not on somebody's request."""

from __future__ import annotations

import logging
from typing import Any

from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, MLAAttentionSpec

from kvlease.config import ConfigError

logger = logging.getLogger("kvlease.support")

_SUPPORTED_SPECS = (FullAttentionSpec, MLAAttentionSpec)


def check_supported(vllm_config: Any, kv_cache_config: KVCacheConfig) -> None:
    """Refuse an engine configuration that kvlease would not serve right.

    Raises:
        ConfigError: the first unsupported option, its value, and what to use instead.
    """
    parallel = vllm_config.parallel_config
    refusals = [
        (parallel.pipeline_parallel_size > 1, f"pipeline_parallel_size {parallel.pipeline_parallel_size}; use 1"),
        (
            getattr(parallel, "decode_context_parallel_size", 1) > 1,
            "decode context parallelism (decode_context_parallel_size); use 1",
        ),
        (
            getattr(parallel, "prefill_context_parallel_size", 1) > 1,
            "prefill context parallelism (prefill_context_parallel_size); use 1",
        ),
        (
            getattr(parallel, "nnodes", 1) > 1,
            "one engine over several machines (nnodes); use one machine for each engine",
        ),
        (bool(getattr(vllm_config.model_config, "enable_sleep_mode", False)), "sleep mode; drop --enable-sleep-mode"),
        (vllm_config.speculative_config is not None, "speculative decoding; drop --speculative-config"),
        (
            vllm_config.kv_transfer_config.kv_buffer_device != _device_type(vllm_config),
            f"staging KV in {vllm_config.kv_transfer_config.kv_buffer_device!r} memory; leave kv_buffer_device unset",
        ),
    ]
    for refused, what in refusals:
        if refused:
            raise ConfigError(f"kvlease does not support {what}")
    _check_groups(kv_cache_config)


def warn_of_logged_requests(vllm_config: Any) -> None:
    """Say once that vLLM can be told to print handoffs, tokens included."""
    if getattr(getattr(vllm_config, "observability_config", None), "log_requests", False):
        logger.warning("--enable-log-requests prints kv_transfer_params with their lease tokens")


def _device_type(vllm_config: Any) -> str:
    return str(vllm_config.device_config.device_type)


def _check_groups(kv_cache_config: KVCacheConfig) -> None:
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        raise ConfigError(
            f"kvlease does not support models with {len(groups)} KV-cache groups (sliding windows, state space layers) "
            "yet; one group of full attention is supported"
        )
    spec = groups[0].kv_cache_spec
    if type(spec) not in _SUPPORTED_SPECS:
        raise ConfigError(
            f"kvlease does not support a KV cache of {type(spec).__name__} yet; full attention and MLA are supported"
        )
    quant_mode = getattr(spec, "kv_quant_mode", None)
    if quant_mode is not None and getattr(quant_mode, "name", "NONE") != "NONE":
        raise ConfigError(
            f"kvlease does not support a quantised KV cache ({quant_mode}) yet; use --kv-cache-dtype auto"
        )
