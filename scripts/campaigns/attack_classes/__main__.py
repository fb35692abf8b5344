"""Run the classes of attacks and print a table: tried, held, failed. Exit 1 when one failed.

python -m scripts.campaigns.attack_classes [CLASS...] [--seed N] [--cases N]
"""

import argparse
import importlib
import pkgutil
import random
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

from fsdplaunch.private_dir import make_process_dir

_OWN = ("case", "runs", "__main__")


def find_classes() -> list[str]:
    """Return the names of the modules beside this one that are classes of attacks."""
    names = (found.name for found in pkgutil.iter_modules([str(Path(__file__).parent)]))
    return sorted(name for name in names if name not in _OWN)


def run_class(name: str, seed: int, count: int | None) -> tuple[int, int]:
    """Run one class; return how many cases were tried and how many failed, each of which is printed."""
    module = importlib.import_module(f"{__package__}.{name}")
    tried = failed = 0
    for case in module.cases(random.Random(f"{name}{seed}"), count):
        tried += 1
        try:
            case.attack()
        except Exception:
            failed += 1
            print(f"FAILED {name}: {case.name}\n{traceback.format_exc(limit=-3)}", flush=True)
    return tried, failed


def main() -> int:
    """Run what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("classes", nargs="*", help=f"of {', '.join(find_classes())}; all when left out")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, help="how many of each class")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    tempfile.tempdir = str(make_process_dir())  # gone with this process, or with the next of its kind
    rows = []
    try:
        for name in options.classes or find_classes():
            start = time.monotonic()
            tried, failed = run_class(name, options.seed, options.cases)
            rows.append((name, tried, failed, time.monotonic() - start))
            print(f"{name}: {tried} tried, {failed} failed, {rows[-1][3]:.0f} s", flush=True)
    except KeyboardInterrupt:
        return 130
    return print_table(rows)


def print_table(rows: list[tuple[str, int, int, float]]) -> int:
    """Print what came of it; return 1 when anything failed."""
    print(f"\n{'class':<12}{'tried':>7}{'held':>7}{'failed':>8}{'seconds':>9}")
    rows.append(("all", *(sum(row[place] for row in rows) for place in (1, 2, 3))))
    for name, tried, failed, seconds in rows:
        print(f"{name:<12}{tried:>7}{tried - failed:>7}{failed:>8}{seconds:>9.0f}")
    return int(rows[-1][2] > 0)


if __name__ == "__main__":
    sys.exit(main())
