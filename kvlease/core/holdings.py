"""What a consumer's scheduler half holds at one producer, and how it tells it so in one small message per heartbeat.

The producer learns of a reader by its ``Acquire`` and forgets it by its last ``Commit`` or its ``Release``; a ``Renew``
lists only what changed since the generation the producer acknowledged, which mends whatever got lost on the way. The
first list, and each after a ``Resend``, is full: readers it does not name are out.

- A list that was not acknowledged is offered again as it was (same generation), unless it was full. A full list must
  not arrive after an ``Acquire`` that was sent later, for it would put that reader out: send it once, never resend it.
- A full list names readers whose ``Acquire`` is still unanswered, too; other lists only those that were confirmed.
- A removed reader is named until a list that names it was acknowledged; with too many of them a full list must do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Final, NamedTuple

from kvlease.core.ids import LeaseId, LeaseToken, ReaderId
from kvlease.core.messages import RENEW_LIST_MAX, REQUEST_BYTES_MAX, Holding

_LIST_BYTES: Final = REQUEST_BYTES_MAX * 3 // 8
"""What one of the two lists of a ``Renew`` may take."""

_ITEM_BYTES: Final = 64
"""What a holding takes on the wire beside its two ids, rounded up."""


class Renewal(NamedTuple):
    """The varying fields of one ``Renew``."""

    base: int
    generation: int
    added: list[Holding]
    removed: list[ReaderId]
    full: bool
    more: bool


@dataclass
class _Held:
    """One reader, and whether a list that names it was made since the last full one began."""

    holding: Holding
    listed: bool = False


class Holdings:
    """The readers held at one peer, by reader id.

    ``generations`` gives ever larger numbers; whoever keeps several of these one after another for the same peer passes
    one iterator to all, so that an old list can never pass for a new one.
    """

    def __init__(self, generations: Iterator[int] | None = None) -> None:
        self._generations = count(1) if generations is None else generations
        self._held: dict[ReaderId, _Held] = {}
        self._unlisted: dict[ReaderId, None] = {}
        self._removed: dict[ReaderId, None] = {}
        self._base = 0
        self._full = True
        self._listing = False
        self._offered: Renewal | None = None

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, reader: ReaderId) -> bool:
        return reader in self._held

    def __iter__(self) -> Iterator[ReaderId]:
        return iter(self._held)

    def __repr__(self) -> str:
        return (
            f"<Holdings {len(self)} base={self._base} +{len(self._unlisted)} -{len(self._removed)} full={self._full}>"
        )

    @property
    def send_once(self) -> bool:
        """Whether the list on its way is (a part of) a full one: if it is lost, call :meth:`resend`."""
        return self._listing

    def add(self, lease: LeaseId, token: LeaseToken, reader: ReaderId) -> None:
        """Hold ``lease`` for ``reader``, whose ``Acquire`` is being sent."""
        self._held[reader] = _Held(Holding(lease=lease, token=token, reader=reader))
        self._removed.pop(reader, None)
        if self._listing:
            self._unlisted[reader] = None

    def confirm(self, reader: ReaderId) -> None:
        """The ``Acquire`` of ``reader`` was granted: name it in the next list."""
        held = self._held.get(reader)
        if held is not None and not held.listed:
            self._unlisted[reader] = None

    def remove(self, reader: ReaderId) -> None:
        """Hold it no more, and have the producer told until it knows. Unknown readers are left alone."""
        if self._held.pop(reader, None) is not None:
            self._unlisted.pop(reader, None)
            self._removed[reader] = None
            if len(self._removed) > len(self._held) + RENEW_LIST_MAX:
                self._removed.clear()
                self.resend()

    def drop(self, reader: ReaderId) -> None:
        """Hold it no more; the producer refused it, so it is told only if a list named the reader."""
        held = self._held.get(reader)
        if held is not None and held.listed:
            self.remove(reader)
        elif held is not None:
            del self._held[reader]
            self._unlisted.pop(reader, None)

    def renewal(self) -> Renewal:
        """What the next ``Renew`` says, until :meth:`renewed` or :meth:`resend`."""
        if self._offered is None or self._listing:
            begin = self._full or self._offered is not None
            self._offered = self._make_full() if begin else self._make()
        return self._offered

    def renewed(self) -> bool:
        """The list on its way was acknowledged.

        Returns:
            Whether there is more to tell than fits into one list: then send the next at once.
        """
        offered, self._offered = self._offered, None
        if offered is None:
            return False
        self._base = offered.generation
        for reader in offered.removed:
            self._removed.pop(reader, None)
        self._listing = self._listing and offered.more
        return offered.more

    def resend(self) -> None:
        """The producer is at another generation, or (a part of) a full list was lost: begin again with a full one."""
        self._offered = None
        self._full = True
        self._listing = False

    def _make_full(self) -> Renewal:
        self._full = False
        self._listing = True
        for held in self._held.values():
            held.listed = False
        self._unlisted = dict.fromkeys(self._held)
        return self._make(full=True)

    def _make(self, full: bool = False) -> Renewal:
        added = []
        for reader in _fitting(self._unlisted, lambda reader: self._held[reader].holding.lease + reader):
            self._held[reader].listed = True
            del self._unlisted[reader]
            added.append(self._held[reader].holding)
        removed = _fitting(self._removed, str)
        more = bool(self._unlisted) or len(removed) < len(self._removed)
        return Renewal(0 if full else self._base, next(self._generations), added, removed, full, more)


def _fitting(readers: Iterable[ReaderId], text: Callable[[ReaderId], str]) -> list[ReaderId]:
    """The first of ``readers`` that fit into one list, where each is written as ``text`` gives it."""
    fitting: list[ReaderId] = []
    len_bytes = 0
    for reader in readers:
        len_bytes += _ITEM_BYTES + len(text(reader).encode("utf-8", "surrogatepass"))
        if len_bytes > _LIST_BYTES or len(fitting) == RENEW_LIST_MAX:
            break
        fitting.append(reader)
    return fitting
