"""Who reads a lease, and what a consumer's channel holds: the two records under the producer's lease table.

::

    reader:   READING --renewed too late, or no longer listed--> LAPSED --acquired or listed again--> READING
              READING, LAPSED --every rank committed--> COMMITTED
              READING, LAPSED --released--> RELEASED         (also when it was never heard of before)

Only a ``READING`` reader keeps a lease alive. A ``LAPSED`` one does not, but while something else does it may still
commit: the lease has not ended since it was acquired, so its bytes are as good as any. The last two states are final.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from dataclasses import dataclass, field

from kvlease.core.ids import ChannelId, LeaseId, ReaderId
from kvlease.core.messages import RENEW_LIST_MAX, GoneReason, Renew


class ReaderState(enum.Enum):
    """Where one reader of one lease stands."""

    READING = "reading"
    LAPSED = "lapsed"
    RELEASED = "released"
    COMMITTED = "committed"


@dataclass(slots=True)
class Reader:
    """One reader of one lease. ``channel`` is set exactly while it is ``READING``; ``ranks`` have committed.

    ``listed``: the consumer has named it in a ``Renew``, so it knows of it; before that, only of its own ``Acquire``.
    """

    state: ReaderState
    channel: ChannelId | None = None
    listed: bool = False
    of_ranks: int = 0
    ranks: set[int] = field(default_factory=set)


class RenewStep(enum.Enum):
    """What a ``Renew`` means to the list that is already there."""

    APPLY = "apply"
    REPEAT = "repeat"
    RESEND = "resend"


@dataclass(slots=True)
class Channel:
    """All that one consumer's scheduler half holds; one deadline for everything, so renewing it all is one assignment.

    ``held`` are its ``READING`` readers and the lease each reads. A full list makes all of them ``unlisted`` until they
    are listed or acquired again. Those are not renewed and lapse at the time noted there, which leaves the rest of a
    long list time to arrive. ``listing``: parts of a full list are still to come.
    ``gone`` are readers whose lease ended under them, until the consumer removes them.
    """

    deadline: float
    generation: int | None = None
    listing: bool = False
    held: dict[ReaderId, LeaseId] = field(default_factory=dict)
    unlisted: OrderedDict[ReaderId, float] = field(default_factory=OrderedDict)
    gone: dict[ReaderId, GoneReason] = field(default_factory=dict)

    def step(self, request: Renew) -> RenewStep:
        """How ``request`` continues the list. Generations only grow, so a late copy of an old list changes nothing."""
        at = self.generation or 0
        if request.generation == self.generation:
            return RenewStep.REPEAT
        if request.generation >= at and (request.full or request.base == at):
            return RenewStep.APPLY
        return RenewStep.RESEND

    def begin_full_list(self, lapse_at: float) -> None:
        """Expect everything to be listed anew before ``lapse_at``."""
        self.listing = True
        self.gone.clear()
        for reader in self.held:
            self.unlisted.setdefault(reader, lapse_at)

    def hold(self, reader: ReaderId, lease: LeaseId) -> None:
        """``reader`` reads ``lease``, and the consumer knows."""
        self.held[reader] = lease
        self.unlisted.pop(reader, None)
        self.gone.pop(reader, None)

    def drop(self, reader: ReaderId) -> None:
        """``reader`` reads no more."""
        del self.held[reader]
        self.unlisted.pop(reader, None)

    def mark_gone(self, reader: ReaderId, why: GoneReason) -> None:
        """Tell the consumer with its next renewals that ``reader`` lost its lease: a hint, so the list is bounded."""
        self.gone[reader] = why
        if len(self.gone) > RENEW_LIST_MAX:
            del self.gone[next(iter(self.gone))]

    def lapsing(self, now: float) -> list[ReaderId]:
        """The readers that were not renewed in time: all of them when the channel itself was not."""
        if self.deadline <= now:
            return list(self.held)
        lapsed = []
        for reader, lapse_at in self.unlisted.items():  # in the order of their times: a full list never shortens one
            if lapse_at > now:
                break
            lapsed.append(reader)
        return lapsed

    def next_deadline(self) -> float:
        """When something here lapses if nothing is heard before."""
        return min(self.deadline, next(iter(self.unlisted.values()), self.deadline))
