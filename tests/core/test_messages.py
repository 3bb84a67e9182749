"""The wire: what is written can be read, and whatever else arrives is one ProtocolError and nothing worse."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlease.core import messages as m

TO = b"t" * 16
TOKEN = b"k" * 16

REQUESTS: list[m.AnyRequest] = [
    m.Hello(seq=1, to=TO, version=1, factors={"dtype": "bf16"}, fingerprint="f", ranks=[0, 1]),
    m.Acquire(seq=2, to=TO, lease="l", token=TOKEN, reader="c/r", channel="c", digest=b"d" * 32),
    m.Renew(
        seq=3,
        to=TO,
        channel="c",
        base=1,
        generation=2,
        added=[m.Holding(lease="l", token=TOKEN, reader="c/r")],
        removed=["c/q"],
        full=True,
        more=True,
    ),
    m.Ping(seq=4, to=TO),
    m.Commit(seq=5, to=TO, lease="l", token=TOKEN, reader="c/r", rank=0, of_ranks=2),
    m.Release(seq=6, to=TO, lease="l", token=TOKEN),
    m.Release(seq=7, to=TO, lease="l", token=TOKEN, reader="c/r"),
    m.Checksum(seq=8, to=TO, lease="l", token=TOKEN, reader="c/r", rank=1, positions=[[(0, 3), (9, 1)], []]),
]

REPLIES: list[m.AnyReply] = [
    m.Welcome(
        seq=1,
        incarnation=TO,
        version=1,
        ranks=[m.RankInfo(rank=0, agent_metadata=b"x", regions=[(1 << 47, 4096, 4096, 10, 0, 0)])],
    ),
    m.Refused(seq=1, incarnation=TO, why="w", differences=[m.Difference("dtype", "bf16", None)]),
    m.Granted(seq=2, incarnation=TO, ttl_s=10.0, num_tokens=4096, blocks=[[(7, 3), (1, 1)], []]),
    m.Gone(seq=2, incarnation=TO, why=m.GoneReason.MISMATCH),
    m.Renewed(seq=3, incarnation=TO, ttl_s=9.5, gone=[m.GoneHolding("c/r", m.GoneReason.EXPIRED)]),
    m.Resend(seq=3, incarnation=TO),
    m.Pong(seq=4, incarnation=TO),
    m.Checksums(seq=4, incarnation=TO, sums=[0, 0xFFFFFFFF], is_whole=False),
    m.Committed(seq=5, incarnation=TO),
    m.Released(seq=6, incarnation=TO),
    m.Invalid(seq=0, incarnation=TO, reason="malformed", text="what?"),
]


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda message: type(message).__name__)
def test_every_request_survives_the_wire(request_: m.AnyRequest) -> None:
    assert m.decode_request(m.encode(request_)) == request_


@pytest.mark.parametrize("reply", REPLIES, ids=lambda message: type(message).__name__)
def test_every_reply_survives_the_wire(reply: m.AnyReply) -> None:
    assert m.decode_reply(m.encode(reply)) == reply


def test_a_request_is_no_reply_and_a_reply_is_no_request() -> None:
    for request in REQUESTS:
        with pytest.raises(m.ProtocolError, match="not a kvlease message"):
            m.decode_reply(m.encode(request))
    for reply in REPLIES:
        with pytest.raises(m.ProtocolError, match="not a kvlease message"):
            m.decode_request(m.encode(reply))


@given(st.binary(max_size=400))
def test_any_bytes_at_all_are_a_message_or_a_protocol_error(frame: bytes) -> None:
    for decode in (m.decode_request, m.decode_reply):
        try:
            decode(frame)
        except m.ProtocolError as error:
            assert error.reason == "malformed"


@given(st.sampled_from(REQUESTS), st.data())
def test_a_flipped_byte_is_a_message_or_a_protocol_error(request: m.AnyRequest, data: st.DataObject) -> None:
    frame = bytearray(m.encode(request))
    frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    try:
        m.decode_request(bytes(frame))
    except m.ProtocolError as error:
        assert error.reason == "malformed"


def test_a_frame_beyond_the_limit_is_refused_before_it_is_parsed() -> None:
    with pytest.raises(m.ProtocolError, match="1048577 bytes") as caught:
        m.decode_request(b"\0" * (m.REQUEST_BYTES_MAX + 1))
    assert caught.value.reason == "oversized"


def test_nesting_without_end_is_only_malformed() -> None:
    with pytest.raises(m.ProtocolError) as caught:
        m.decode_request(b"\x91" * 100_000)
    assert caught.value.reason == "malformed"


def raw(message: m.AnyRequest | m.AnyReply, **fields: object) -> bytes:
    return msgspec.msgpack.encode({**msgspec.msgpack.decode(m.encode(message)), **fields})


@pytest.mark.parametrize(
    ("message", "fields"),
    [
        (REQUESTS[3], {"seq": -1}),
        (REQUESTS[3], {"seq": 1 << 53}),
        (REQUESTS[3], {"seq": "1"}),
        (REQUESTS[3], {"to": b"short"}),
        (REQUESTS[3], {"to": b"x" * 17}),
        (REQUESTS[3], {"type": "Pang"}),
        (REQUESTS[1], {"token": b""}),
        (REQUESTS[1], {"lease": "l" * (m.ID_CHARS_MAX + 1)}),
        (REQUESTS[2], {"removed": ["r"] * (m.RENEW_LIST_MAX + 1)}),
        (REQUESTS[4], {"of_ranks": 0}),
        (REQUESTS[4], {"rank": -1}),
    ],
)
def test_a_request_with_a_field_out_of_range_is_malformed(message: m.AnyRequest, fields: dict[str, object]) -> None:
    with pytest.raises(m.ProtocolError) as caught:
        m.decode_request(raw(message, **fields))
    assert caught.value.reason == "malformed"


@pytest.mark.parametrize(
    "fields", [{"why": "tired"}, {"incarnation": b""}, {"incarnation": None}], ids=["why", "incarnation", "none"]
)
def test_a_reply_with_a_field_out_of_range_is_malformed(fields: dict[str, object]) -> None:
    with pytest.raises(m.ProtocolError):
        m.decode_reply(raw(REPLIES[3], **fields))


@pytest.mark.parametrize("run", [(-1, 1), (0, -1), (0, 1 << 60), (0, 1, 2)])
def test_block_runs_are_pairs_of_counts(run: tuple[int, ...]) -> None:
    with pytest.raises(m.ProtocolError):
        m.decode_reply(raw(REPLIES[2], blocks=[[run]]))


def test_fields_that_a_newer_version_adds_are_ignored() -> None:
    assert m.decode_request(raw(REQUESTS[3], mood="good")) == REQUESTS[3]


def test_fields_that_an_older_version_lacks_have_defaults() -> None:
    old = {"type": "Renew", "seq": 1, "to": TO, "channel": "c", "base": 0, "generation": 1}
    renew = m.decode_request(msgspec.msgpack.encode(old))
    assert renew == m.Renew(seq=1, to=TO, channel="c", base=0, generation=1)


def test_a_rank_without_checksums_does_not_speak_of_them() -> None:
    rank = m.RankInfo(rank=0, agent_metadata=b"x", regions=[])
    welcome = m.Welcome(seq=1, incarnation=TO, version=1, ranks=[rank])
    assert b"checksum" not in m.encode(welcome)
    assert m.decode_reply(m.encode(welcome)) == welcome


def test_a_grant_of_a_million_scattered_blocks_fits() -> None:
    blocks = [[(2 * i, 1) for i in range(1_000_000)]]
    granted = m.Granted(seq=1, incarnation=TO, ttl_s=1.0, num_tokens=1, blocks=blocks)
    assert len(m.encode(granted)) < m.REPLY_BYTES_MAX // 4
