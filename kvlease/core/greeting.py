"""The producer's answer to ``Hello``: may this consumer's worker read our pages, and where are they?

A refusal is written for the operator who reads it in the *consumer's* log: it names what differs, with both values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvlease.core.compat import differences, is_layout
from kvlease.core.ids import Incarnation
from kvlease.core.messages import PROTOCOL_VERSION, Difference, Hello, RankInfo, Refused, Welcome


@dataclass(frozen=True)
class Site:
    """What a producer says of itself once its workers are up; ``enforce``: non-layout factors must agree, too."""

    ranks: Sequence[RankInfo]
    factors: Mapping[str, str]
    fingerprint: str
    enforce: bool


def answer_hello(hello: Hello, incarnation: Incarnation, site: Site | None) -> Welcome | Refused:
    """Welcome a consumer's worker, or refuse it in words. ``site`` is None while the workers are still starting."""

    def refused(why: str, differing: Sequence[Difference] = ()) -> Refused:
        return Refused(seq=hello.seq, incarnation=incarnation, why=why, differences=list(differing))

    if hello.to != incarnation:
        return refused("another incarnation lives here")
    if site is None:
        return refused("starting")
    if hello.version != PROTOCOL_VERSION:
        version = Difference(name="version", ours=str(PROTOCOL_VERSION), theirs=str(hello.version))
        return refused(f"protocol versions differ: {_in_words([version])}", [version])
    differing = differences(site.factors, hello.factors)
    if not site.enforce:
        differing = [one for one in differing if is_layout(one.name)]
    elif not differing and hello.fingerprint != site.fingerprint:
        differing = [Difference(name="fingerprint", ours=site.fingerprint, theirs=hello.fingerprint)]
    if differing:
        return refused(f"the engines do not fit: {_in_words(differing)}", differing)
    by_rank = {info.rank: info for info in site.ranks}
    missing = sorted(set(hello.ranks) - by_rank.keys())
    if missing:
        return refused(f"no ranks {missing[:8]} here; the ranks are {sorted(by_rank)}")
    wanted = [by_rank[rank] for rank in dict.fromkeys(hello.ranks)]
    return Welcome(seq=hello.seq, incarnation=incarnation, version=PROTOCOL_VERSION, ranks=wanted)


def _in_words(differing: Sequence[Difference]) -> str:
    return "; ".join(f"{one.name}: producer {one.ours}, consumer {one.theirs}" for one in differing)
