"""The producer's part of the scheduler half: leases the blocks of finished requests, and gives them back.

The endpoint's thread owns the lease table. This part, on the scheduler's thread, only puts grants into its queue and
takes ended leases out of it: :meth:`ProducerHalf.grant` returns a handoff at once, because queued grants are applied
before every inbound message.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterable, Sequence, Set
from functools import cache
from typing import TYPE_CHECKING, Any

from kvlease.config import Settings
from kvlease.connector.metrics import Samples, metric_key
from kvlease.connector.requests import is_served, prompt_identity
from kvlease.core.handoff import Handoff, emit_handoff, wants_lease
from kvlease.core.ids import TOKEN_BYTES, EngineId, Incarnation, LeaseId, LeaseToken
from kvlease.core.leases import LeaseTiming
from kvlease.net.endpoint import Endpoint, GrantItem, GrantRefusedError
from kvlease.net.ledger import Snapshot

if TYPE_CHECKING:
    from vllm.v1.request import Request

logger = logging.getLogger("kvlease.producer")

_NAMES = {"granted": "grants", "acquired": "acquires", "renewed": "renewals", "committed": "commits"}
_ENDS = ("expired", "revoked")


class ProducerHalf:
    """What one producer engine's scheduler thread does about leases. ``random_bytes`` mints the tokens."""

    def __init__(
        self,
        settings: Settings,
        endpoint: Endpoint,
        engine_id: EngineId,
        incarnation: Incarnation,
        host: str,
        tp_size: int,
        block_sizes: Sequence[int],
        random_bytes: Callable[[int], bytes] = secrets.token_bytes,
    ) -> None:
        self._settings = settings
        self._endpoint = endpoint
        self._engine_id = engine_id
        self._incarnation = incarnation
        self._host = host
        self._tp_size = tp_size
        self._block_sizes = block_sizes
        self._random_bytes = random_bytes
        self._returning: set[LeaseId] = set()
        self._samples: Samples = {}
        self._sampled_numbers: Snapshot | None = None
        self._sampled_gauges = (0, 0, False)

    def grant(self, request: Request, block_ids: tuple[list[int], ...]) -> dict[str, Any] | None:
        """Lease the KV of a finished request; the handoff to return, or None when there is nothing to hand over.

        Only what is certainly computed is leased: with asynchronous scheduling vLLM counts tokens of steps still in
        flight, one too many when the first token ends the request.
        """
        if not wants_lease(request.kv_transfer_params) or not is_served(request):
            return None
        in_flight: int = getattr(request, "num_in_flight_tokens", 0)
        computed = request.num_computed_tokens - in_flight
        num_tokens = min(request.num_prompt_tokens, computed)
        prompt = prompt_identity(request, num_tokens)
        wanted = [-(-num_tokens // block_size) for block_size in self._block_sizes]
        leased = [ids[:count] for ids, count in zip(block_ids, wanted, strict=True)]
        is_whole = [len(ids) for ids in leased] == wanted  # a preemption in a request's last step takes its blocks away
        if prompt is None or num_tokens <= 0 or not is_whole or not self._endpoint.is_alive:
            logger.warning(
                "request %s: no lease granted, its consumer prefills (%d of %d prompt tokens computed, endpoint %s)",
                request.request_id, num_tokens, request.num_prompt_tokens, "up" if self._endpoint.is_alive else "down",
            )  # fmt: skip
            return None
        handoff = Handoff(
            engine_id=self._engine_id,
            incarnation=self._incarnation,
            lease=LeaseId(request.request_id),
            token=LeaseToken(self._random_bytes(TOKEN_BYTES)),
            host=self._host,
            port=self._endpoint.port,
            num_tokens=num_tokens,
        )
        try:
            self._endpoint.grant(
                GrantItem(
                    lease=handoff.lease,
                    token=handoff.token,
                    token_ids=prompt.token_ids,
                    num_tokens=num_tokens,
                    lora=prompt.lora,
                    cache_salt=prompt.cache_salt,
                    mm_hashes=prompt.mm_hashes,
                    block_ids=leased,
                    is_settled=in_flight == 0,
                )
            )
        except GrantRefusedError as error:
            logger.warning("request %s: %s; its consumer prefills", request.request_id, error)
            return None
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

    def have_returned(self, leases: Iterable[str]) -> None:
        """The blocks of these ended leases are back in the pool."""
        self._returning.difference_update(LeaseId(lease) for lease in leases)

    @property
    def leases_live(self) -> int:
        """How many leases are out."""
        return self._endpoint.num_live

    @property
    def returning(self) -> Set[str]:
        """The ended leases whose blocks are on their way back to the pool."""
        return self._returning

    def samples(self) -> Samples:
        """The endpoint's counters and gauges, under the names of our metrics: the same object until they changed."""
        endpoint, numbers = self._endpoint, self._endpoint.numbers
        gauges = (endpoint.num_live, int(endpoint.oldest_lease_age_s()), endpoint.is_accepting)
        if numbers is self._sampled_numbers and gauges == self._sampled_gauges:
            return self._samples
        self._sampled_numbers, self._sampled_gauges = numbers, gauges
        samples = {_sample_name(name): value for name, value in numbers.counters.items() if name != "ended"}
        ended = numbers.counters.get("ended", 0)
        lost = sum(numbers.counters.get(why, 0) for why in _ENDS)
        samples[metric_key("lease_ends", "released")] = ended - lost
        samples["tombstones"] = numbers.gauges["tombstones"]
        for name, gauge in zip(("leases_held", "oldest_lease_age_seconds", "endpoint_up"), gauges, strict=True):
            samples[name] = float(gauge)
        self._samples = samples
        return samples

    def revoke_all(self) -> None:
        """End every lease now."""
        self._endpoint.revoke_all()

    def close(self) -> None:
        """End every lease and stop answering."""
        self._endpoint.close()


def lease_timing(settings: Settings) -> LeaseTiming:
    """The lease table's share of the settings."""
    return LeaseTiming(
        lease_duration_s=settings.lease_duration_s,
        lease_extension_s=settings.lease_extension_s,
        max_lease_lifetime_s=settings.max_lease_lifetime_s,
        sibling_grace_s=settings.sibling_grace_s,
        tombstone_ttl_s=settings.tombstone_ttl_s,
        tombstone_max=settings.tombstone_max,
    )


@cache
def _sample_name(counter: str) -> str:
    """The metric that one of the endpoint's counters is a sample of."""
    if counter == "refused_hello":
        return metric_key("refused_claims", "incompatible")
    if counter in _NAMES:
        return _NAMES[counter]
    if counter in _ENDS:
        return metric_key("lease_ends", counter)
    for prefix, metric in (("refused_", "refused_claims"), ("invalid_", "refused_input")):
        if counter.startswith(prefix):
            return metric_key(metric, counter.removeprefix(prefix))
    return metric_key("endpoint_events", counter)
