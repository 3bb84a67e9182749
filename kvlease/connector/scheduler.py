"""The scheduler half: the producer's and the consumer's part side by side, in the roles this engine has."""

from __future__ import annotations

import ipaddress
import logging
import math
import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from vllm.utils.network_utils import get_ip
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from kvlease.config import ConfigError, Settings
from kvlease.connector.consumer import ConsumerHalf
from kvlease.connector.metadata import KVLeaseHandshake
from kvlease.connector.producer import ProducerHalf, lease_timing
from kvlease.connector.reports import keep_sent, reported_by_us
from kvlease.connector.stats import KVLeaseStats, StatsDelta
from kvlease.core.compat import fingerprint
from kvlease.core.ids import INCARNATION_BYTES, ChannelId, EngineId, Incarnation
from kvlease.core.orders import NO_ORDERS, REST, Orders
from kvlease.net.endpoint import Endpoint
from kvlease.net.leaser import Leaser

logger = logging.getLogger("kvlease.scheduler")

STATS_PERIOD_S: Final = 0.1
"""How late numbers may be told while loads or leases keep vLLM stepping."""


class SchedulerHalf:
    """What vLLM's scheduler thread sees of kvlease; only a claim that was just made is waited for."""

    def __init__(
        self,
        vllm_config: Any,
        kv_cache_config: KVCacheConfig,
        settings: Settings,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        transfer = vllm_config.kv_transfer_config
        engine_id = EngineId(transfer.engine_id)
        incarnation = Incarnation(secrets.token_bytes(INCARNATION_BYTES))
        block_sizes = [group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups]
        self._settings = settings
        self._tp_size: int = vllm_config.parallel_config.tensor_parallel_size
        self._stats = StatsDelta()
        self._clock = clock
        self._told_at = -math.inf
        self._endpoint: Endpoint | None = None
        self._producer: ProducerHalf | None = None
        if transfer.is_kv_producer:
            host, port = advertised(settings, transfer.kv_port, vllm_config.parallel_config)
            self._endpoint = Endpoint(incarnation, lease_timing(settings), host, port, clock=clock)
            self._endpoint.start()
            self._producer = ProducerHalf(
                settings, self._endpoint, engine_id, incarnation, host, self._tp_size, block_sizes
            )
        channel = ChannelId(secrets.token_hex(INCARNATION_BYTES))
        leaser = Leaser(channel, settings, clock=clock)
        leaser.start()
        # Every role has a consumer half: a handoff sent to a mere producer is refused by its policy, like any other.
        self._consumer = ConsumerHalf(
            settings,
            leaser,
            channel,
            incarnation,
            block_sizes,
            recompute=transfer.kv_load_failure_policy == "recompute",
            may_load=transfer.is_kv_consumer,
            clock=clock,
        )
        logger.info(
            "kvlease: role %s, engine %s, incarnation %s, policy %s%s",
            transfer.kv_role, engine_id, incarnation.hex()[:8], transfer.kv_load_failure_policy,
            f", leases at {host}:{self._endpoint.port}" if self._endpoint else "",
        )  # fmt: skip

    def introduce(self, ranks: Mapping[int, KVLeaseHandshake]) -> None:
        """Tell the endpoint what to tell peers about each rank.

        Raises:
            ConfigError: ranks are missing or do not agree about the engine they are part of.
        """
        if self._endpoint is None:
            return
        if sorted(ranks) != list(range(self._tp_size)):
            raise ConfigError(f"handshake metadata came from ranks {sorted(ranks)} of {self._tp_size}")
        factors = ranks[0].factors
        for rank, handshake in ranks.items():
            if handshake.factors != factors:
                raise ConfigError(f"rank {rank} says {handshake.factors} of this engine, rank 0 says {factors}")
        self._endpoint.watch([ranks[rank].lifeline for rank in sorted(ranks)])
        hashers = [one.hasher for _, one in sorted(ranks.items()) if one.hasher is not None]
        if hashers:
            self._endpoint.ask_hashers(hashers)
        self._endpoint.set_ranks(
            [ranks[rank].info for rank in sorted(ranks)],
            factors,
            fingerprint(factors),
            enforce=self._settings.enforce_handshake_compat,
        )

    def bind_pool(self, pool: BlockPool) -> None:
        """The pool that a quarantine takes references on."""
        self._consumer.bind_pool(pool)

    def admit(self, request: Request) -> None:
        """A request arrived."""
        self._consumer.admit(request)

    def match(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens to load from outside."""
        return self._consumer.match(request, num_computed_tokens)

    def dispatch(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Blocks were allocated."""
        self._consumer.dispatch(request, blocks, num_external_tokens)

    def finish(self, request: Request, block_ids: tuple[list[int], ...]) -> tuple[bool, dict[str, Any] | None]:
        """A request finished: whether its blocks stay (they are leased), and the handoff."""
        self._consumer.finish(request)
        handoff = self._producer.grant(request, block_ids) if self._producer else None
        return handoff is not None, handoff

    def take_orders(self, num_scheduled_tokens: int) -> Orders:
        """This step's orders to the workers. ``num_scheduled_tokens``: 0 in a step that runs no model."""
        orders = self._consumer.take_orders()
        ended, leases_live = [], 0
        if self._producer is not None:
            ended, leases_live = self._producer.take_ended(), self._producer.leases_live
        is_claiming = self._consumer.take_claiming()
        may_rest = not (is_claiming or num_scheduled_tokens or ended) and self._is_kept_stepping
        if ended or leases_live or (may_rest and orders is not NO_ORDERS):
            return Orders(orders.loads, orders.aborts, ended, leases_live, orders.greet, may_rest)
        return REST if may_rest else orders

    def take_reports(self, output: KVConnectorOutput) -> None:
        """The workers' reports, before the scheduler acts on them."""
        self._consumer.take_reports(output)
        if output.finished_sending:
            keep_sent(output.finished_sending, reported_by_us(output), self._producer)

    @property
    def _is_kept_stepping(self) -> bool:
        """Whether vLLM steps on for loads or leases, even if there is nothing to compute."""
        return self._consumer.has_loads or (self._producer is not None and self._producer.leases_live > 0)

    @property
    def is_returning(self) -> bool:
        """Whether an ended lease's blocks are on their way back to the pool."""
        return self._producer is not None and bool(self._producer.returning)

    @property
    def is_quarantining(self) -> bool:
        """Whether blocks are held back for reads that have not ended."""
        return self._consumer.is_quarantining

    def reset(self) -> bool:
        """Revoke all leases and fail all loads."""
        if self._producer is not None:
            self._producer.revoke_all()
        self._consumer.reset()
        return True

    def take_stats(self) -> KVLeaseStats | None:
        """What was counted since the last call that returned numbers, on both sides.

        vLLM asks in every step, and looking costs as much as all else here, so some steps are let pass; but not the
        last one before the engine falls idle. (One that is paused may have to be resumed first.)
        """
        now = self._clock()
        if now < self._told_at + STATS_PERIOD_S and self._is_kept_stepping:
            return None
        self._told_at = now
        return self._stats.take(
            self._consumer.samples(),
            self._consumer.leaser_samples(),
            self._producer.samples() if self._producer is not None else {},
        )

    def shutdown(self) -> None:
        """Stop both sides."""
        self._consumer.close()
        if self._producer is not None:
            self._producer.close()


def advertised(settings: Settings, kv_port: int, parallel: Any) -> tuple[str, int]:
    """The host and port that peers are told.

    Raises:
        ConfigError: the host means "every address of this machine", which would lead each peer to itself.
    """
    host = settings.host or get_ip()
    index = getattr(parallel, "data_parallel_index", 0) or 0
    port = settings.port if settings.port is not None else kv_port
    if port:
        port += index
    if _is(host, "is_unspecified"):
        raise ConfigError(
            f"peers cannot be told to reach this engine at {host}: each would reach itself; "
            "set 'host' in kv_connector_extra_config to an address of this machine that they can reach"
        )
    if settings.host is None and (host == "localhost" or _is(host, "is_loopback")):
        logger.warning(
            "peers are told to reach this engine at %s, where only this machine can; set `host` in its extra config",
            host,
        )
    return host, port


def _is(host: str, what: str) -> bool:
    """Whether ``host`` is an IP address of that kind."""
    try:
        return bool(getattr(ipaddress.ip_address(host.strip("[]")), what))
    except ValueError:
        return False
