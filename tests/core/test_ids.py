"""Names, and how they are written."""

from __future__ import annotations

from kvlease.core.ids import ChannelId, EngineId, Incarnation, LoadId, PeerKey, reader_id


def test_a_reader_is_named_after_its_channel_and_its_load() -> None:
    assert reader_id(ChannelId("c"), LoadId("r-1")) == "c/r-1"


def test_readers_of_different_channels_differ_although_their_loads_have_the_same_name() -> None:
    assert reader_id(ChannelId("c"), LoadId("r")) != reader_id(ChannelId("d"), LoadId("r"))


def test_a_peer_is_logged_with_enough_of_its_incarnation_to_tell_two_lives_apart() -> None:
    key = PeerKey(EngineId("P0"), Incarnation(bytes(range(16))), "10.0.0.1", 5600)
    assert str(key) == "P0@10.0.0.1:5600#00010203"
    assert key != key._replace(incarnation=Incarnation(b"x" * 16))
