"""How much of a core idle engines use; run as a script with the process ids of engines to print a table.

python -m devtools.idle PID [PID ...]
"""

import argparse
import time
from collections.abc import Sequence

import psutil


def cpu_shares(processes: Sequence[psutil.Process], over_s: float) -> dict[str, float]:
    """The share of one core that each process used, on average over `over_s` seconds; keys are `name[pid]`."""
    before = [_cpu_s(process) for process in processes]
    started = time.monotonic()
    time.sleep(over_s)
    elapsed_s = time.monotonic() - started
    return {
        f"{_name(process)}[{process.pid}]": (_cpu_s(process) - cpu_s) / elapsed_s
        for process, cpu_s in zip(processes, before, strict=True)
    }


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _name(process: psutil.Process) -> str:
    return str((process.cmdline() or [process.name()])[0])


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("pids", type=int, nargs="+", metavar="PID")
    parser.add_argument("--seconds", type=float, default=20.0)
    options = parser.parse_args()
    roots = [psutil.Process(pid) for pid in options.pids]
    processes = [process for root in roots for process in (root, *root.children(recursive=True))]
    for name, share in cpu_shares(processes, options.seconds).items():
        print(f"{share:7.2%}  {name}")


if __name__ == "__main__":
    main()
