"""The way to a violation, in words: the names of consumers and ranks stay what they were at the beginning."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

from kvlease.core.orders import Orders, Reports
from tests.sim.exhaustive_world import Explorer, Step, World

_PRODUCER = {
    "tick": "the clock of the producer moves to its next deadline",
    "revoke": "the producer revokes its leases",
    "nudge": "some time passes at the producer",
    "crash": "the producer dies and starts again at the same address",
}
_SELF = {
    "tick": "its clock moves to the next deadline",
    "expire": "its clock jumps until what it waits for has timed out",
    "start": "begins to read",
}


def tell(explorer: Explorer, parents: Mapping[World, World | None]) -> Iterator[str]:
    """The steps from the beginning to what ``explorer`` did last."""
    last, which = explorer.model.attempt, explorer.which
    path = []
    at: World | None = explorer.at
    while at is not None:
        path.append(at)
        at = parents[at]
    path.reverse()
    names = Names(explorer)
    for before, after in pairwise(path):
        step = next(explorer.step for found in explorer.successors(before) if found == after)
        yield names.tell(step.label)
        names.follow(step)
    yield names.tell(last if last[:1] in ((), ("producer",), ("silence",)) else (which, *last))


class Names:
    """What the consumers and ranks of a world, which change places, were called at first."""

    def __init__(self, explorer: Explorer) -> None:
        self._consumers = ["A", "B"]
        self._ranks = {"A": [0, 1], "B": [0, 1]}
        self._is_one = explorer.scope.consumers == 1

    def follow(self, step: Step) -> None:
        """Remember who changed places."""
        for name, swapped in zip(self._consumers, step.swaps, strict=True):
            if swapped:
                self._ranks[name].reverse()
        if step.swap:
            self._consumers.reverse()

    def tell(self, label: tuple[Any, ...]) -> str:
        """One step as a sentence."""
        match label:
            case ("silence",):
                text = "and from now on nobody says anything"
            case ("producer", event, _):
                text = _PRODUCER[event]
            case (int() as which, "handle", rank, request, reply, *lost):
                text = f"the producer handles {_message(request)} of {self._who(which, rank)}"
                text += f", says {_message(reply)}" * (reply is not None) + ", which is lost" * bool(lost)
            case (int() as which, "scheduler", event):
                text = f"{self._who(which, -1)}: {_event(event)}"
            case (int() as which, "rank", rank, event):
                text = f"{self._who(which, rank)}: {_event(event)}"
            case (int() as which, "report", rank, report):
                text = f"{self._who(which, -1)} hears from rank {self._rank(which, rank)}: {_report(report)}"
            case (int() as which, "lose" | "duplicate" as verb, rank, message):
                what = f"{_message(message)} of {self._who(which, rank)}"
                text = f"{what} is {'lost' if verb == 'lose' else 'repeated by the network'}"
            case (int() as which, "crash", _):
                text = f"consumer {self._consumers[which]} dies"
            case _:
                text = repr(label)
        return text

    def _rank(self, which: int, rank: int) -> int:
        return self._ranks[self._consumers[which]][rank]

    def _who(self, which: int, rank: int) -> str:
        consumer = "consumer" if self._is_one else f"consumer {self._consumers[which]}"
        return f"{consumer}'s scheduler half" if rank < 0 else f"{consumer}'s rank {self._rank(which, rank)}"


def _event(event: Any) -> str:
    match event:
        case ("hear", reply):
            text = f"hears {_message(reply)}"
        case ("end", load, good):
            text = f"its read for {load} {'has ended' if good else 'fails'}"
        case ("abort", load):
            text = f"vLLM aborts {load}"
        case ("arrive", load):
            text = f"request {load} arrives"
        case ("orders", Orders(loads=loads, aborts=aborts)):
            text = f"is told to load {[order.load for order in loads]} and to abort {aborts}"
        case ("report", report):
            text = f"hears from a rank: {_report(report)}"
        case _:
            text = _SELF.get(event, repr(event))
    return text


def _report(report: Reports) -> str:
    parts = [
        f"{load}: {report.failed[load].value if load in report.failed else 'received'}" for load in report.received
    ]
    parts += [f"{load} has posted reads" for load in report.unsettled]
    parts += [f"the reads of {load} have ended" for load in report.settled]
    return ", ".join(sorted(parts))


def _message(message: Any) -> str:
    why = getattr(message, "why", None)
    name = type(message).__name__
    return f"{name}({why.value})" if why is not None and hasattr(why, "value") else name
