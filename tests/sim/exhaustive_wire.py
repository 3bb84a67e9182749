"""Names on the wire: inside the exhaustive checker all consumers are one, and so are all ranks."""

from __future__ import annotations

from typing import Any

import msgspec

from kvlease.core.messages import AnyReply, AnyRequest
from tests.sim.exhaustive_parts import CHANNEL


def at_wire(request: AnyRequest, consumer: int, rank: int) -> AnyRequest:
    """``request`` as the consumer of that number and its rank really sends it: here all consumers and ranks are one."""
    changes: dict[str, Any] = {}
    for name in ("reader", "channel"):
        if getattr(request, name, None):
            changes[name] = getattr(request, name).replace(CHANNEL, f"{CHANNEL}{consumer}")
    if hasattr(request, "added"):
        changes["removed"] = [reader.replace(CHANNEL, f"{CHANNEL}{consumer}") for reader in request.removed]
        changes["added"] = [
            msgspec.structs.replace(one, reader=one.reader.replace(CHANNEL, f"{CHANNEL}{consumer}"))
            for one in request.added
        ]
    if hasattr(request, "rank"):
        changes["rank"] = rank
    return msgspec.structs.replace(request, **changes)


def renamed_event(event: Any, swap_consumers: bool, swap_ranks: tuple[bool, bool]) -> Any:
    """An event of the producer after the exchange of names that :meth:`Model.rename` is for."""
    if not isinstance(event, msgspec.Struct):
        return event
    text = getattr(event, "reader", None) or getattr(event, "channel", "")
    consumer = int(text[len(CHANNEL)])
    rank = getattr(event, "rank", -1)
    if swap_ranks[consumer] and rank >= 0:
        rank = 1 - rank
    plain = at_home(event, consumer)
    return at_wire(plain, 1 - consumer if swap_consumers else consumer, rank)


def at_home(request: Any, consumer: int) -> Any:
    """The reverse of :func:`at_wire`, ranks left as they are."""
    changes: dict[str, Any] = {}
    name_there = f"{CHANNEL}{consumer}"
    for name in ("reader", "channel"):
        if getattr(request, name, None):
            changes[name] = getattr(request, name).replace(name_there, CHANNEL)
    if hasattr(request, "added"):
        changes["removed"] = [reader.replace(name_there, CHANNEL) for reader in request.removed]
        changes["added"] = [
            msgspec.structs.replace(one, reader=one.reader.replace(name_there, CHANNEL)) for one in request.added
        ]
    return msgspec.structs.replace(request, **changes)


def at_consumer(reply: AnyReply, consumer: int) -> AnyReply:
    """A reply with the names that the consumer has for itself."""
    gone = getattr(reply, "gone", None)
    if not gone:
        return reply
    mine = [msgspec.structs.replace(one, reader=one.reader.replace(f"{CHANNEL}{consumer}", CHANNEL)) for one in gone]
    return msgspec.structs.replace(reply, gone=mine)
