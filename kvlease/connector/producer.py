"""The producer's part of the scheduler half: leases the blocks of finished requests, and gives them back.

The endpoint's thread owns the lease table. This part, on the scheduler's thread, only puts grants into its queue and
takes ended leases out of it: :meth:`ProducerHalf.grant` returns a handoff at once, because queued grants are applied
before every inbound message.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Sequence
from typing import Any

from vllm.v1.request import Request, RequestStatus

from kvlease.config import Settings
from kvlease.connector.requests import prompt_identity
from kvlease.core.handoff import Handoff, emit_handoff, wants_lease
from kvlease.core.ids import TOKEN_BYTES, EngineId, Incarnation, LeaseId, LeaseToken
from kvlease.net.endpoint import Endpoint, GrantItem

logger = logging.getLogger("kvlease.producer")

_GRANTABLE = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)


class ProducerHalf:
    """What one producer engine's scheduler thread does about leases."""

    def __init__(
        self,
        settings: Settings,
        endpoint: Endpoint,
        engine_id: EngineId,
        incarnation: Incarnation,
        host: str,
        tp_size: int,
        block_sizes: Sequence[int],
    ) -> None:
        self._settings = settings
        self._endpoint = endpoint
        self._engine_id = engine_id
        self._incarnation = incarnation
        self._host = host
        self._tp_size = tp_size
        self._block_sizes = block_sizes
        self._returning: set[LeaseId] = set()

    def grant(self, request: Request, block_ids: tuple[list[int], ...]) -> dict[str, Any] | None:
        """Lease the KV of a finished request; the handoff to return, or None when there is nothing to hand over.

        Only what is certainly computed is leased: with asynchronous scheduling vLLM counts tokens of steps still in
        flight, one too many when the first token ends the request.
        """
        if not wants_lease(request.kv_transfer_params) or request.status not in _GRANTABLE:
            return None
        computed = request.num_computed_tokens - getattr(request, "num_in_flight_tokens", 0)
        num_tokens = min(request.num_prompt_tokens, computed)
        prompt = prompt_identity(request, num_tokens)
        if prompt is None or num_tokens <= 0 or not self._endpoint.alive:
            logger.warning(
                "request %s: no lease granted, its consumer prefills (%d of %d prompt tokens computed, endpoint %s)",
                request.request_id, num_tokens, request.num_prompt_tokens, "up" if self._endpoint.alive else "down",
            )  # fmt: skip
            return None
        leased = [
            ids[: -(-num_tokens // block_size)] for ids, block_size in zip(block_ids, self._block_sizes, strict=True)
        ]
        handoff = Handoff(
            engine_id=self._engine_id,
            incarnation=self._incarnation,
            lease=LeaseId(request.request_id),
            token=LeaseToken(secrets.token_bytes(TOKEN_BYTES)),
            host=self._host,
            port=self._endpoint.port,
            num_tokens=num_tokens,
        )
        self._endpoint.grant(GrantItem(lease=handoff.lease, token=handoff.token, prompt=prompt, block_ids=leased))
        return emit_handoff(
            handoff,
            block_ids=leased if self._settings.inline_block_ids else None,
            tp_size=self._tp_size,
            ttl_s=self._settings.lease_duration_s,
        )

    def take_ended(self) -> list[LeaseId]:
        """Leases that ended since the last call: their blocks go back once every worker has said so."""
        ended = self._endpoint.take_ended()
        for lease in ended:
            logger.debug("lease %s ended: %s after %.2f s", lease.lease, lease.why.value, lease.age_s)
        ids = [lease.lease for lease in ended]
        self._returning.update(ids)
        return ids

    def keep_sent(self, reported: set[str]) -> None:
        """Drop from ``reported`` (in place) what is not an ended lease on its way back: the scheduler asserts on it."""
        stale = reported - self._returning
        if stale:
            logger.error("dropped %d stale reports of sent requests: %s", len(stale), sorted(stale)[:8])
            reported -= stale
        self._returning -= reported

    @property
    def leases_live(self) -> int:
        """How many leases are out."""
        return self._endpoint.num_live

    @property
    def is_returning(self) -> bool:
        """Whether blocks of an ended lease are on their way back to the pool."""
        return bool(self._returning)

    def samples(self) -> dict[str, float]:
        """The endpoint's counters and gauges, under the names of our metrics."""
        return self._endpoint.samples()

    def revoke_all(self) -> None:
        """End every lease now."""
        self._endpoint.revoke_all()

    def close(self) -> None:
        """End every lease and stop answering."""
        self._endpoint.close()
