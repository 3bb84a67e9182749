"""Hello: welcome who fits, and tell everybody else in words what differs."""

from __future__ import annotations

from typing import Any

import pytest

from kvlease.core.compat import fingerprint
from kvlease.core.greeting import Site, answer_hello
from kvlease.core.ids import Incarnation
from kvlease.core.messages import PROTOCOL_VERSION, Difference, Hello, RankInfo, Refused, Welcome

US = Incarnation(b"producer-life-01")
FACTORS = {"block_size": "16", "model": "opt"}
RANKS = [RankInfo(rank=rank, agent_metadata=b"agent", regions=[]) for rank in range(2)]


def hello(**fields: Any) -> Hello:
    ours: dict[str, Any] = {"version": PROTOCOL_VERSION, "factors": FACTORS, "ranks": [0, 1]}
    ours |= fields
    return Hello(seq=3, **({"to": US, "fingerprint": fingerprint(ours["factors"])} | ours))


def answer(enforce: bool = True, **fields: Any) -> Welcome | Refused:
    return answer_hello(hello(**fields), US, Site(RANKS, FACTORS, fingerprint(FACTORS), enforce))


def test_a_worker_that_fits_gets_the_ranks_it_wants() -> None:
    assert answer(ranks=[1, 1]) == Welcome(seq=3, incarnation=US, version=PROTOCOL_VERSION, ranks=[RANKS[1]])
    assert answer(ranks=[]) == Welcome(seq=3, incarnation=US, version=PROTOCOL_VERSION, ranks=[])


@pytest.mark.parametrize(
    ("fields", "words", "differing"),
    [
        ({"to": b"producer-life-00"}, ["another incarnation lives here"], []),
        ({"version": 9}, ["versions", "producer 1, consumer 9"], ["version"]),
        ({"factors": {"block_size": "32", "model": "opt"}}, ["block_size: producer 16, consumer 32"], ["block_size"]),
        ({"factors": {"block_size": "16"}}, ["model: producer opt, consumer None"], ["model"]),
        ({"factors": {**FACTORS, "rope": "x"}}, ["rope: producer None, consumer x"], ["rope"]),
        ({"fingerprint": "other"}, ["fingerprint"], ["fingerprint"]),
        ({"ranks": [0, 7]}, ["no ranks [7]", "[0, 1]"], []),
    ],
)
def test_a_worker_that_does_not_fit_is_told_why(fields: Any, words: list[str], differing: list[str]) -> None:
    reply = answer(**fields)
    assert isinstance(reply, Refused)
    assert (reply.seq, reply.incarnation) == (3, US)
    assert all(word in reply.why for word in words), reply.why
    assert [one.name for one in reply.differences] == differing


def test_without_enforcement_only_the_layout_must_agree() -> None:
    assert isinstance(answer(enforce=False, factors={"block_size": "16", "model": "llama"}), Welcome)
    assert isinstance(answer(enforce=False, fingerprint="other"), Welcome)
    reply = answer(enforce=False, factors={"block_size": "32", "model": "llama"})
    assert isinstance(reply, Refused)
    assert reply.differences == [Difference(name="block_size", ours="16", theirs="32")]


def test_before_the_workers_are_up_everybody_is_asked_to_come_again() -> None:
    reply = answer_hello(hello(), US, None)
    assert isinstance(reply, Refused)
    assert reply.why == "starting"
