"""Runs rows one after the other, and makes sure that each leaves the fleet as it found it."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import httpx

from devtools.engines import Engine
from tests.engines.support import new_outcomes, outcomes
from tests.faults.fleets import KVLEASE, Fleet
from tests.faults.rows import SLACK_S, Case, Row, Side
from tests.faults.verdict import SERVED, Got, Result, judge

PATIENCE_S = {KVLEASE: 120.0}
"""When a request counts as hanging. All that we promise is far shorter; a prefill on a shared core may not be."""
OTHER_PATIENCE_S = 45.0
KEPT_AFTER_S = 30.0
"""Blocks that are not back so long after their bound are not waited for."""

Starter = Callable[[str], AbstractContextManager[Fleet]]


@dataclass
class Runner:
    """Runs rows against fleets that ``start`` makes. ``watch`` is told what is done now, ``done`` each line."""

    connector: str
    start: Starter
    watch: Callable[[str], None]
    done: Callable[[Result], None]

    def run(self, rows: Sequence[Row]) -> list[Result]:
        """Run all rows, which come grouped by fleet; a row that fails does not stop the others."""
        results: list[Result] = []
        for name in dict.fromkeys(one.fleet for one in rows):
            group = [one for one in rows if one.fleet == name]
            if name is None:
                for one in group:
                    results += self._run(one, None)
                continue
            with self.start(name) as fleet:
                fleet.watch = self.watch
                for one in group:
                    results += self._run(one, fleet)
        return results

    def _run(self, row: Row, fleet: Fleet | None) -> list[Result]:
        self.watch(row.name)
        began = time.monotonic()
        patience_s = PATIENCE_S.get(self.connector, OTHER_PATIENCE_S)
        case = Case(row, fleet, patience_s, bound_s=row.bound_s)
        case.sides = [Side(case, policy, Result(row.name, policy, row.fault)) for policy in row.policies]
        before = self._outcomes(fleet)
        try:
            row.run(case)
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            for side in case.sides:
                side.result.problems.append(f"{type(error).__name__}: {str(error)[:300]} ({last.name}:{last.lineno})")
        if fleet is not None:
            self._check(case, fleet, before)
        for side in case.sides:
            side.result.took_s = time.monotonic() - began
            self.done(side.result)
        return [side.result for side in case.sides]

    def _outcomes(self, fleet: Fleet | None) -> dict[str, tuple[Engine, Mapping[str, float]]]:
        """The counters of each consumer, with the life that they belong to."""
        if fleet is None or self.connector != KVLEASE:
            return {}
        return {policy: (engine, outcomes(engine)) for policy, engine in fleet.consumers.items()}

    def _check(self, case: Case, fleet: Fleet, before: dict[str, tuple[Engine, Mapping[str, float]]]) -> None:
        """What must hold after every row; what does not hold is mended by a restart."""
        since = time.monotonic() if case.blocks_since is None else case.blocks_since
        for engine in fleet.engines:
            engine.thaw()
        self._restart_dead(case, fleet)
        bound_s = case.bound_s + SLACK_S
        back_s, holding = wait_for_blocks(fleet.engines, since, bound_s + KEPT_AFTER_S)
        self._restart_dead(case, fleet)  # one that was dying may have answered before
        for side in case.sides:
            side.result.settle_blocks(back_s, bound_s)
            if side.policy in before:
                engine, counted = before[side.policy]
                diff = new_outcomes(side.consumer, counted if engine is side.consumer else {})
                side.result.causes = {key: int(value) for key, value in diff.items()}
        for engine in holding:
            if engine in fleet.engines:  # else it has died since, and was restarted
                fleet.restart(engine)
        for side in case.sides:
            self._next_handoff(case, side)

    def _restart_dead(self, case: Case, fleet: Fleet) -> None:
        for engine in [engine for engine in fleet.engines if not engine.healthy(20.0)]:
            for side in case.sides:
                side.result.problems.append(f"the engine {engine.name} died")
            fleet.restart(engine)

    def _next_handoff(self, case: Case, side: Side) -> None:
        """The next ordinary handoff must be right, and really one."""
        try:
            prompt = case.prompt(60)
            expected = case.reference(prompt, 4)
            counted = outcomes(side.consumer) if case.is_kvlease else {}
            got = judge(side.ask(prompt, case.handoff(prompt), 4), expected)
            after = new_outcomes(side.consumer, counted) if case.is_kvlease else {"done": 1}
            if got is Got.WRONG:
                side.result.got[Got.WRONG.value] += 1
            if got not in SERVED[side.policy] or after != {"done": 1}:
                side.result.problems.append(f"the next handoff: {got.value} {after}")
        except (AssertionError, RuntimeError, httpx.HTTPError) as error:
            side.result.problems.append(f"the next handoff: {error!r}"[:300])
            got = Got.HANG
        if got is not Got.RIGHT:  # whoever of the two is at fault, the next row must not suffer
            case.fleet.restart(side.consumer)
            case.fleet.restart(case.producer)


def wait_for_blocks(engines: Sequence[Engine], since: float, limit_s: float) -> tuple[float | None, list[Engine]]:
    """Seconds from ``since`` until no engine held a block, or None and those that do after ``limit_s``."""
    while True:
        holding = [engine for engine in engines if _holds_blocks(engine)]
        waited_s = time.monotonic() - since
        if not holding:
            return waited_s, []
        if waited_s > limit_s:
            return None, holding
        time.sleep(0.02)


def _holds_blocks(engine: Engine) -> bool:
    try:
        return engine.kv_usage() > 0
    except httpx.HTTPError:
        return engine.healthy(20.0)  # a dead one holds nothing any more
