"""A run in words: who did what when, messages spelt out."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvlease.core.messages import ProtocolError, decode_reply, decode_request
from tests.sim.simulation import Result

LAST = 40
_SECRET = ("token", "digest", "to", "incarnation", "agent_metadata")


def tell(result: Result, last: int | None = LAST) -> Iterable[str]:
    """The last lines of a run's story, oldest first."""
    story = result.story if last is None else result.story[-last:]
    for now, who, what, args in story:
        words = [_spell(arg) for arg in args]
        yield f"{now:10.4f}  {who:<16} {what % tuple(words) if words else what}"


def replay(seed: int) -> str:
    """The command that tells the story again."""
    return f"python -m tests.sim --seed {seed}"


def _spell(arg: Any) -> Any:
    if not isinstance(arg, bytes):
        return arg
    for decode in (decode_request, decode_reply):
        try:
            message = decode(arg)
        except ProtocolError:
            continue
        fields = {name: getattr(message, name) for name in message.__struct_fields__}
        shown = {name: value for name, value in fields.items() if name not in _SECRET and value not in ([], None)}
        return f"{type(message).__name__}({', '.join(f'{name}={_short(value)}' for name, value in shown.items())})"
    return f"{len(arg)} bytes of nothing"


def _short(value: Any) -> str:
    text = repr(value) if not isinstance(value, float) else f"{value:.2f}"
    return text if len(text) < 90 else text[:87] + "..."
