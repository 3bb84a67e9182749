"""Writes docs/faults.md from the results of two runs, so that nobody edits it by hand.

python -m tests.faults.report OURS.json THEIRS.json [--docs FILE]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.faults.verdict import Got

DOCS = Path(__file__).parents[2] / "docs" / "faults.md"

_HEAD = """# Faults

What happens when engines die, freeze and restart, leases run out, handoffs are not what a router thinks they are,
clients hang up and blocks are few. Each row but the last on real engines. Written by `python -m tests.faults.report`
from the results of a run with kvlease and, where there is one, of a run with the connector that ships in vLLM; not
edited by hand.

Run it: `make faults` (all rows), `make faults ROW=swapped`, `make faults CONNECTOR=NixlConnector`.

- **policy** is `kv_load_failure_policy`: under `recompute` a failed load must end in the right text, under `fail` in
  HTTP 500.
- **right text** is the greedy text that one engine gives alone (float32); **WRONG TEXT** is HTTP 200 with another one.
- Before the semicolon: what clients got; nothing, where they had gone. After it: what kvlease's consumers counted
  (`loads_total`: outcome and cause), and what else was seen. **no answer**: none in {patience:.0f} s (kvlease) or
  {other_patience:.0f} s (NixlConnector). In bold: what is not as it should be.
- Time-outs are longer than by default, so that an engine that starves for a moment is not taken for dead.
- **blocks back** is the time until no engine held a block, counted from the end of the fault, and the bound: the
  lease's own plus {slack:.0f} s for the step that is running and a machine with other work. *kept*: not {kept:.0f} s
  after the bound.
"""

_DASH = """\
- NixlConnector runs without NIXL's progress thread and without its core pinning (`devtools/quiet_nixl.py`): as shipped,
  the engines of a fleet spin on every core of a small machine, and what is measured is the machine. It meets the
  policies one after the other, because its waiting consumers spin, too.
- A dash: the row leads messages through a relay that knows kvlease's, and is not run with the other one.
"""


def render(ours: Mapping[str, Any], theirs: Mapping[str, Any] | None) -> str:
    """The page."""
    from tests.faults.fleets import KVLEASE
    from tests.faults.rows import SLACK_S
    from tests.faults.runner import KEPT_AFTER_S, OTHER_PATIENCE_S, PATIENCE_S

    runs = [ours] if theirs is None else [ours, theirs]
    head = _HEAD if theirs is None else _HEAD + _DASH
    head = head.format(slack=SLACK_S, kept=KEPT_AFTER_S, patience=PATIENCE_S[KVLEASE], other_patience=OTHER_PATIENCE_S)
    parts = [head, "## Runs\n"]
    parts.append("| connector | date | versions | settings | as they should be | wrong texts | rows that kept blocks |")
    parts.append("|---|---|---|---|---|---|---|")
    parts += [_run_line(one) for one in runs]
    names = list(dict.fromkeys((one["row"], one["policy"]) for one in ours["results"]))
    found = [{(one["row"], one["policy"]): one for one in run["results"]} for run in runs]
    parts.append("\n## Rows\n")
    parts.append("| row | policy | " + " | ".join(f"{run['connector']} | blocks back" for run in runs) + " |")
    parts.append("|---|---|" + "---|---|" * len(runs))
    for key in names:
        cells = [cell for results in found for cell in _cells(results.get(key))]
        parts.append(f"| {key[0]} | {key[1]} | " + " | ".join(cells) + " |")
    if theirs is not None:
        parts += ["", *_comparison(found[0], found[1])]
    parts.append("\n## What each row does\n")
    faults = {one["row"]: one["fault"] for one in ours["results"]}
    parts += [f"- **{name}**: {fault}." for name, fault in faults.items()]
    return "\n".join(parts) + "\n"


def _run_line(run: Mapping[str, Any]) -> str:
    results = run["results"]
    versions = ", ".join(f"{name} {number}" for name, number in run["versions"].items())
    settings = ", ".join(f"{name} {value}" for name, value in run["settings"].items())
    good = sum(one["is_ok"] for one in results)
    wrong = sum(one["got"].get(Got.WRONG.value, 0) for one in results)
    kept = sum(one["leaked"] for one in results)
    return (
        f"| {run['connector']} | {run['date']} | {versions} | {settings} | {good}/{len(results)} | {wrong} | {kept} |"
    )


def _cells(one: Mapping[str, Any] | None) -> list[str]:
    if one is None:
        return ["–", "–"]
    happened = one["happened"] if one["is_ok"] else f"{one['happened']}; **{one['verdict']}**"
    return [happened.strip("; ").replace("|", "\\|").replace("\n", " "), one["blocks"]]


def _comparison(ours: Mapping[Any, Any], theirs: Mapping[Any, Any]) -> list[str]:
    """Where the other connector is as good, or better; counted, so that no sentence of ours is needed."""
    both = [key for key in ours if key in theirs]
    same = [key for key in both if theirs[key]["is_ok"] and ours[key]["is_ok"]]
    better = [key for key in both if theirs[key]["is_ok"] and not ours[key]["is_ok"]]
    lines = [f"Of {len(both)} lines run with both, {len(same)} are as they should be with both"]
    if same:
        lines[0] += ": " + ", ".join(f"{row} ({policy})" for row, policy in same)
    lines[0] += "."
    listed = ", ".join(f"{row} ({policy})" for row, policy in better) or "none"
    return [*lines, "", f"Only the connector that ships in vLLM is as it should be in: {listed}."]


def main(arguments: list[str] | None = None) -> int:
    """Write the page."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.report", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("ours", type=Path)
    parser.add_argument("theirs", type=Path, nargs="?")
    parser.add_argument("--docs", type=Path, default=DOCS)
    options = parser.parse_args(arguments)
    theirs = json.loads(options.theirs.read_text()) if options.theirs else None
    options.docs.write_text(render(json.loads(options.ours.read_text()), theirs))
    print(options.docs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
