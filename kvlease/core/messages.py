"""Every message that crosses the wire, and the only code that encodes or decodes one.

Messages are tagged msgspec structs in msgpack: typed, versioned, size-capped, never pickled. A consumer sends a
:class:`Request` and gets exactly one :class:`Reply` with the same ``seq``; either may be lost, repeated or late, so
every request is idempotent. New fields get defaults and no field ever changes its type; unknown fields are ignored, so
that neighbouring versions can talk far enough to refuse each other in words.
"""

from __future__ import annotations

import enum
from typing import Annotated, TypeVar

import msgspec

from kvlease.core.ids import INCARNATION_BYTES, TOKEN_BYTES

PROTOCOL_VERSION = 1
"""Spoken by this code. Peers with another version refuse each other by name at ``Hello``."""

REQUEST_BYTES_MAX = 1 << 20
"""The largest request a producer accepts; larger frames are refused before they are parsed."""

REPLY_BYTES_MAX = 64 << 20
"""The largest reply a consumer accepts (a ``Granted`` of a million scattered blocks is 12 MiB)."""

RENEW_LIST_MAX = 2048
"""How many additions and removals one ``Renew`` may list; the rest goes into the next one."""

ID_CHARS_MAX = 512
"""How many characters an id may have on the wire."""


class ProtocolError(Exception):
    """A message that cannot be honoured: malformed, oversized or of the wrong kind.

    ``reason`` is one short word for the counter; the text says what was wrong.
    """

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


class GoneReason(enum.Enum):
    """Why a lease is not, or no longer, the asker's to read."""

    RELEASED = "released"
    COMMITTED = "committed"
    EXPIRED = "expired"
    UNKNOWN = "unknown"
    REVOKED = "revoked"
    BAD_TOKEN = "bad_token"  # noqa: S105 - the name of a refusal, not a secret
    MISMATCH = "mismatch"


Bytes16 = Annotated[bytes, msgspec.Meta(min_length=INCARNATION_BYTES, max_length=INCARNATION_BYTES)]
Token16 = Annotated[bytes, msgspec.Meta(min_length=TOKEN_BYTES, max_length=TOKEN_BYTES)]
ShortStr = Annotated[str, msgspec.Meta(max_length=ID_CHARS_MAX)]
Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]

BlockRuns = list[tuple[Count, Count]]
"""Block ids of one KV-cache group as ``(first block, how many)`` runs, in token order."""


class Request(msgspec.Struct, frozen=True, kw_only=True, tag=True, tag_field="type"):
    """What a consumer asks. ``to`` is the incarnation it means, whoever answers at the address."""

    seq: Count
    to: Bytes16


class Reply(msgspec.Struct, frozen=True, kw_only=True, tag=True, tag_field="type"):
    """What a producer answers to the request with the same ``seq``, and who it is."""

    seq: Count
    incarnation: Bytes16


class Hello(Request, frozen=True, kw_only=True):
    """A worker introduces itself: may our layouts be read into each other, and where are your pages?"""

    version: int
    factors: dict[ShortStr, ShortStr]
    fingerprint: ShortStr
    ranks: list[Count]


class Acquire(Request, frozen=True, kw_only=True):
    """Claim a lease for one reader. ``digest`` is the consumer's own, over its own prompt.

    ``has_siblings``: others may be about to claim the same lease, because the reader is one of several samples of one
    request. Without any the lease ends with the reader's commit, and waits for nobody.
    """

    lease: ShortStr
    token: Token16
    reader: ShortStr
    channel: ShortStr
    digest: bytes
    has_siblings: bool = True


class Holding(msgspec.Struct, frozen=True):
    """One lease that a channel says it holds for one reader."""

    lease: ShortStr
    token: Token16
    reader: ShortStr


class Renew(Request, frozen=True, kw_only=True):
    """Renew all that ``channel`` holds, in one small message however many leases that is.

    ``added`` and ``removed`` bring the producer's list from ``base`` to ``generation``; with ``full`` the list starts
    from nothing. A producer whose list is at neither answers ``Resend``. With ``more`` the list goes on in the next
    ``Renew``: what a full list does not name is out only when its last part has come.
    """

    channel: ShortStr
    base: Count
    generation: Count
    added: Annotated[list[Holding], msgspec.Meta(max_length=RENEW_LIST_MAX)] = []
    removed: Annotated[list[ShortStr], msgspec.Meta(max_length=RENEW_LIST_MAX)] = []
    full: bool = False
    more: bool = False


class Ping(Request, frozen=True, kw_only=True):
    """Are you there?"""


class Checksum(Request, frozen=True, kw_only=True):
    """What are the checksums of the lease's pages that rank ``rank`` has at these positions?

    ``positions`` count a KV group's blocks in token order from 0, as runs. Asked while the pages are being read.
    """

    lease: ShortStr
    token: Token16
    reader: ShortStr
    rank: Count
    positions: list[BlockRuns]


class Commit(Request, frozen=True, kw_only=True):
    """Rank ``rank`` of ``of_ranks`` has read everything. Only ``Committed`` makes the bytes usable."""

    lease: ShortStr
    token: Token16
    reader: ShortStr
    rank: Count
    of_ranks: Annotated[int, msgspec.Meta(ge=1, le=4096)]


class Release(Request, frozen=True, kw_only=True):
    """The reader will not read. Without ``reader`` it ends only a lease that nobody ever acquired."""

    lease: ShortStr
    token: Token16
    reader: ShortStr | None = None


class RankInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a reader needs to reach one producer rank: its NIXL agent and where its pages lie.

    ``regions`` are ``(base address, page stride, page length, pages, KV group, device id)``, one for each contiguous
    array of pages, in the order both sides derive from their layers' names. Addresses and lengths in bytes.
    ``checksum`` is how the rank computes checksums of its pages; empty: it does not.
    """

    rank: Count
    agent_metadata: bytes
    regions: list[tuple[int, int, int, int, int, int]]
    memory: ShortStr = "DRAM"
    checksum: ShortStr = ""


class Difference(msgspec.Struct, frozen=True):
    """One compatibility factor in which two engines differ."""

    name: str
    ours: str | None
    theirs: str | None


class Welcome(Reply, frozen=True, kw_only=True):
    """The layouts fit; here is how to reach the ranks that were asked for."""

    version: int
    ranks: list[RankInfo]


class Refused(Reply, frozen=True, kw_only=True):
    """The layouts do not fit, or the versions do not. ``ours`` is the producer's value, ``theirs`` the consumer's."""

    why: str
    differences: list[Difference] = []


class Granted(Reply, frozen=True, kw_only=True):
    """The lease is yours for ``ttl_s`` seconds from now. ``blocks`` is authoritative, whatever a router carried."""

    ttl_s: float
    num_tokens: Count
    blocks: list[BlockRuns]


class Gone(Reply, frozen=True, kw_only=True):
    """There is no such claim, and why. ``age_s``: how long ago the lease ended, where that is remembered."""

    why: GoneReason
    age_s: float | None = None


class GoneHolding(msgspec.Struct, frozen=True):
    """A reader whose lease ended although its channel still holds it."""

    reader: str
    why: GoneReason


class Renewed(Reply, frozen=True, kw_only=True):
    """All that the channel holds is good for ``ttl_s`` more seconds, except ``gone``."""

    ttl_s: float
    gone: list[GoneHolding] = []


class Resend(Reply, frozen=True, kw_only=True):
    """The producer's list of the channel's leases is at another generation: send it all."""


class Pong(Reply, frozen=True, kw_only=True):
    """Yes."""


class Checksums(Reply, frozen=True, kw_only=True):
    """One for each region, in order; the lease was live when they had been computed.

    ``is_whole`` is false when the last block of each KV group was left out, because the engine may still write to it.
    """

    sums: list[Count]
    is_whole: bool = True


class Committed(Reply, frozen=True, kw_only=True):
    """The lease was live when this rank's commit was handled: every byte it read was the lease's."""


class Released(Reply, frozen=True, kw_only=True):
    """The reader is out, or was already."""


class Invalid(Reply, frozen=True, kw_only=True):
    """The request could not be honoured as sent. ``reason`` is one word, ``text`` says more."""

    reason: str
    text: str


AnyRequest = Hello | Acquire | Renew | Ping | Checksum | Commit | Release
AnyReply = Welcome | Refused | Granted | Gone | Renewed | Resend | Pong | Checksums | Committed | Released | Invalid

_T = TypeVar("_T")

_encoder = msgspec.msgpack.Encoder()
_request_decoder: msgspec.msgpack.Decoder[AnyRequest] = msgspec.msgpack.Decoder(AnyRequest)
_reply_decoder: msgspec.msgpack.Decoder[AnyReply] = msgspec.msgpack.Decoder(AnyReply)


def encode(message: AnyRequest | AnyReply) -> bytes:
    """The wire form of ``message``."""
    return _encoder.encode(message)


def decode_request(frame: bytes) -> AnyRequest:
    """Read what a consumer sent.

    Raises:
        ProtocolError: ``oversized`` or ``malformed``. Nothing else, whatever the bytes are.
    """
    return _decode(frame, _request_decoder, REQUEST_BYTES_MAX)


def decode_reply(frame: bytes) -> AnyReply:
    """Read what a producer answered.

    Raises:
        ProtocolError: ``oversized`` or ``malformed``. Nothing else, whatever the bytes are.
    """
    return _decode(frame, _reply_decoder, REPLY_BYTES_MAX)


def _decode(frame: bytes, decoder: msgspec.msgpack.Decoder[_T], limit_bytes: int) -> _T:
    if len(frame) > limit_bytes:
        raise ProtocolError("oversized", f"a frame of {len(frame)} bytes; at most {limit_bytes} are read")
    try:
        return decoder.decode(frame)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ProtocolError("malformed", f"not a kvlease message: {error}") from error
