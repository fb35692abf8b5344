"""Runs during which the wall clock jumps, by an hour or ten years, forward, back, and back again: nothing notices.

No watchdog fires and nothing times out; the newest checkpoints stay and the newest is loaded; `runs` and `watch`
show the run as it is, and no duration anywhere is negative or of years.

The machine's own clock belongs to everybody on it, and namespaces have none of their own for the time of day. So
a shim gives all processes of a run a clock that jumps. File systems take the kernel's: a clock that is wrong at
first, and jumps to what is right, has files of the time after the jump, as after a jump of the machine's.
"""

import contextlib
import json
import random
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from scripts.campaigns.attack_classes.case import Case
from scripts.campaigns.attack_classes.runs import ROOT, Run, end_all, environ, launch, launch_two_nodes, wait_for
from scripts.campaigns.attack_classes.shims import shim
from scripts.campaigns.attack_classes.whole_saves import SAVES, complete_steps, loaded_step

COUNT = 16
HOUR, YEARS = 3600.0, 10 * 365.25 * 86400
JUMPS: Mapping[str, tuple[float, ...]] = {
    "an hour forward": (0, HOUR),
    "an hour back": (0, -HOUR),
    "ten years forward": (0, YEARS),
    "ten years back": (0, -YEARS),
    "an hour back to the right time": (HOUR, 0),
    "ten years forward to the right time": (-YEARS, 0),
    "ten years back to the right time": (YEARS, 0),
    "there and back": (0, YEARS, -HOUR, HOUR, 0),
}
"""What the clock is ahead by, one after the other."""
_SECRET = "ab" * 32
_STALL_SECONDS, _TIMEOUT_SECONDS = 4, 15
_RUN_SECONDS = 90.0
_LONGEST_SECONDS = 100.0
"""No duration of these runs is longer, whatever the clock does."""
_SCRIPT = """
import os, time
import torch
from pathlib import Path
from scripts.campaigns.attack_classes.whole_saves import make_training, save
training = make_training()
optimizer = training[1]
step = 0
while not Path("enough").exists() or step < 3:
    step += 1
    training[0](torch.ones(2, 16)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    save(step, training)
    if os.environ["RANK"] == "0":
        Path("step").write_text(str(step))
    time.sleep(0.05)
    if os.environ.get("FAILS") == os.environ["RANK"] and Path("enough").exists():
        raise RuntimeError("as it is meant to")
    torch.distributed.barrier()
"""
_WORDS = (
    *("--checkpoint.keep_last", "2", "--launch.stall_seconds", str(_STALL_SECONDS)),
    *("--process-group-timeout-seconds", str(_TIMEOUT_SECONDS)),
)


def cases(_chance: random.Random, count: int | None) -> Iterator[Case]:
    """Make the cases: each jump in a run on one node, then those that fail, restart or have two nodes."""
    ways: list[tuple[str, Callable[[tuple[float, ...]], None]]] = [
        ("a run", jump),
        ("a run whose rank 1 fails", lambda jumps: jump(jumps, fails="1")),
        ("a run on two nodes", jump_on_two_nodes),
    ]
    for number in range(count or COUNT):
        way = 0 if number < len(JUMPS) else 1 + number % 2
        title, jumps = list(JUMPS.items())[number % len(JUMPS)]
        name, attack = ways[way]
        yield Case(name=f"{number}: {title}, {name}", attack=lambda attack=attack, jumps=jumps: attack(jumps))


class _Clock:
    """The clock of a run, which this process moves."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "clock"
        self.move(0)
        self.variables = {"LD_PRELOAD": shim("clock_jumps"), "CLOCK_JUMPS": str(self._path)}

    def move(self, ahead: float) -> None:
        """Have it be so many seconds ahead."""
        if not self._path.exists():
            self._path.write_bytes(bytes(8))
        with self._path.open("r+b") as file:  # in place: processes have mapped it
            file.write(struct.pack("q", int(ahead * 1e9)))


def _said(folder: Path, clock: _Clock, *words: str) -> Any:
    """Return what a command says as JSON, by the run's clock."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", "fsdplaunch", *words, "--json"],
        cwd=folder,
        env={**environ(), **clock.variables},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def _steps(folder: Path) -> int:
    with contextlib.suppress(OSError, ValueError):
        return int((folder / "step").read_text())
    return 0


def _go_through(folder: Path, clock: _Clock, jumps: tuple[float, ...], runs: list["Run[str]"]) -> None:
    """Have the clock jump while steps are made, and look at the run after each jump."""
    wait_for(lambda: _steps(folder) > 2, runs)
    for ahead in jumps[1:]:
        clock.move(ahead)
        before = _steps(folder)
        time.sleep(_STALL_SECONDS / 8)
        wait_for(lambda before=before: _steps(folder) > before + 2, runs)
        (listed,) = _said(folder, clock, "runs")
        assert listed["state"] == "running", listed
        _check_durations(listed)
        _check_durations(_said(folder, clock, "watch", "--once"))
    (folder / "enough").touch()


def _check_durations(value: Any, name: str = "") -> None:
    """Raise for a duration, at any depth, that is negative or of hours."""
    if isinstance(value, dict):
        for key, each in value.items():
            _check_durations(each, key)
    elif isinstance(value, list):
        for each in value:
            _check_durations(each, name)
    elif isinstance(value, int | float) and (name in ("seconds", "took", "age") or name.endswith("_seconds")):
        assert 0 <= value < _LONGEST_SECONDS, (name, value)


def _check_end(folder: Path, said: str) -> None:
    for words in ("no rank has", "is behind", "Timed out", "timed out", "did not come"):
        assert words not in said, said[-2500:]
    (place,) = [path for path in (folder / "runs").iterdir() if not path.is_symlink()]
    _check_durations(json.loads((place / "result.json").read_text()))
    last = _steps(folder)
    steps = complete_steps(folder / SAVES)
    assert steps[-2:] == [last - 1, last] and len(steps) == 2, (steps, last)
    assert loaded_step(folder) == last


def jump(jumps: tuple[float, ...], fails: str = "none") -> None:
    """Have the clock jump during a run on one node; raise when anything takes notice."""
    with tempfile.TemporaryDirectory() as base:
        folder = Path(base)
        clock = _Clock(folder)
        clock.move(jumps[0])
        about = {"PYTHONPATH": str(ROOT), "FAILS": fails, **clock.variables}
        run = launch(folder, _SCRIPT, "--num-processes", "2", *_WORDS, **about)
        _go_through(folder, clock, jumps, [run])
        (said,) = end_all([run], _RUN_SECONDS)
        assert run.returncode == int(fails != "none"), f"ended with {run.returncode}: {said[-2500:]}"
        if fails != "none":
            assert "rank 1 failed with exit code 1" in said, said[-2500:]
        _check_end(folder, said)


def jump_on_two_nodes(jumps: tuple[float, ...]) -> None:
    """Have the clock jump during a run on two nodes, whose launchers hear of each other all the time."""
    with tempfile.TemporaryDirectory() as base:
        folder = Path(base)
        clock = _Clock(folder)
        clock.move(jumps[0])
        about = {"PYTHONPATH": str(ROOT), **clock.variables}
        runs = launch_two_nodes(folder, _SCRIPT, _SECRET, *_WORDS, **about)
        _go_through(folder, clock, jumps, runs)
        said = end_all(runs, _RUN_SECONDS)
        assert [run.returncode for run in runs] == [0, 0], said
        _check_end(folder, said[0])
