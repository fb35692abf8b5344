"""Run the classes of attacks and print a table: tried, held, failed. Exit 1 when one failed.

python -m scripts.campaigns.attack_classes [CLASS...] [--seed N] [--cases N] [--processes N]
"""

import argparse
import importlib
import os
import pkgutil
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from fsdplaunch.private_dir import make_process_dir
from scripts.campaigns.attack_classes.case import Case
from scripts.campaigns.attack_classes.side_by_side import Outcome, run_all

_OWN = ("case", "runs", "shims", "side_by_side", "whole_saves", "__main__")
_SLOWEST = (
    *("many_launches", "changed_saves", "io_faults", "resumed_saves", "clock_jumps", "full_disks", "beside_saves"),
    *("memory_limits", "side_channel", "kills", "listeners", "stores", "limits"),
)
"""Classes that start whole runs: begun first, so that none is left alone at the end."""
PROCESSES = 4
"""Cases under way at a time: most wait for processes of theirs, or for patience to end."""


def find_classes() -> list[str]:
    """Return the names of the modules beside this one that are classes of attacks."""
    names = [found.name for found in pkgutil.iter_modules([str(Path(__file__).parent)])]
    found = sorted(name for name in names if name not in _OWN)
    return sorted(found, key=lambda name: _SLOWEST.index(name) if name in _SLOWEST else len(_SLOWEST))


def cases_of(names: list[str], seed: int, count: int | None) -> Iterator[tuple[str, Case]]:
    """Return the cases of classes, each with its class: the same for the same seed."""
    for name in names:
        module = importlib.import_module(f"{__package__}.{name}")
        for case in module.cases(random.Random(f"{name}{seed}"), count):
            yield name, case


def main() -> int:
    """Run what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("classes", nargs="*", help=f"of {', '.join(find_classes())}; all when left out")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, help="how many of each class")
    parser.add_argument("--processes", type=int, default=PROCESSES, help="how many cases at a time")
    parser.add_argument("--slowest", type=int, default=0, metavar="N", help="name the N cases that took longest")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    tempfile.tempdir = str(make_process_dir())  # gone with this process, or with the next of its kind
    start = time.monotonic()
    cases = list(cases_of(options.classes or find_classes(), options.seed, options.cases))
    done: list[Outcome] = []
    try:
        for outcome in run_all(cases, options.processes):
            done.append(outcome)
            if outcome.problem:
                print(f"FAILED {outcome.group}: {outcome.name}\n{outcome.problem}", flush=True)
    except KeyboardInterrupt:
        return 130
    for one in sorted(done, key=lambda one: -one.seconds)[: options.slowest]:
        print(f"{one.seconds:>7.1f} s  {one.group}: {one.name[:100]}")
    return print_table(done, time.monotonic() - start)


def print_table(done: list[Outcome], seconds: float) -> int:
    """Print what came of it; return 1 when anything failed."""
    tried, failed, taken = Counter[str](), Counter[str](), Counter[str]()
    for one in done:
        for row in (one.group, "all"):
            tried[row] += 1
            failed[row] += bool(one.problem)
            taken[row] += one.seconds  # type: ignore[assignment]  (a sum, not a count)
    print(f"\n{'class':<12}{'tried':>7}{'held':>7}{'failed':>8}{'seconds':>9}")
    for row in sorted(tried, key=lambda row: (row == "all", row)):
        print(f"{row:<12}{tried[row]:>7}{tried[row] - failed[row]:>7}{failed[row]:>8}{taken[row]:>9.0f}")
    print(f"{seconds:.0f} s, several at a time on {os.cpu_count()} cores")
    return int(failed["all"] > 0 or not done)


if __name__ == "__main__":
    sys.exit(main())
