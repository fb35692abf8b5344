"""Disks that fill during a run: the one with the run's folder, and checkpoints on another, or on the same.

A small tmpfs is mounted where runs are written, in a mount namespace of the launcher's own, and is filled while
ranks train and print, but for some bytes. The run ends well, or with one message that names its failure or the
disk, and the right status. What was saved elsewhere is whole. As root.
"""

import contextlib
import os
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from scripts.campaigns.attack_classes.case import Case
from scripts.campaigns.attack_classes.runs import ROOT, end_all, launch
from scripts.campaigns.attack_classes.whole_saves import SAVES, complete_steps, loaded_step

COUNT = 12
DISK = "70m"
"""A little more than the launcher asks for before it starts anything."""
LEFT = (0, 5_000, 150_000)
"""Bytes that whoever fills the disk leaves."""
STEPS = 12
_SECONDS = 120.0
WAYS = ("ends well", "fails", "saves there", "is shown")
_SCRIPT = f"""
import os, sys, time
from scripts.campaigns.attack_classes.full_disks import fill_disk
from scripts.campaigns.attack_classes.whole_saves import make_training, save
training = make_training()
for step in range(1, {STEPS} + 1):
    if step == int(os.environ["FILLED_AT"]) and os.environ["RANK"] == "0":
        fill_disk("disk", int(os.environ["LEFT"]))
    save(step, training)
    print("x" * 20_000)
    print("y" * 20_000, file=sys.stderr)
    time.sleep(0.05)
if os.environ["FAILS"] == os.environ["RANK"]:
    raise RuntimeError("as it is meant to")
"""


def fill_disk(folder: str, left: int) -> None:
    """Fill a disk, but for so many bytes."""
    path = os.path.join(folder, "filler")  # noqa: PTH118
    file = os.open(path, os.O_WRONLY | os.O_CREAT)
    with contextlib.suppress(OSError):
        while os.write(file, b"x" * 4096):
            pass
    os.ftruncate(file, max(0, os.fstat(file).st_size - left))
    os.close(file)


def cases(_chance: random.Random, count: int | None) -> Iterator[Case]:
    """Make the cases: each size, with a run that ends well, one that fails, one that saves there too; or none."""
    can = subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False)
    if can.returncode:
        print(f"full_disks is left out: no mounts of its own here: {can.stderr.decode().strip()}", file=sys.stderr)
        return
    for number in range(count or COUNT):
        left, way = LEFT[number % len(LEFT)], WAYS[number // len(LEFT) % len(WAYS)]
        step = (1, STEPS // 2, STEPS)[(number + number // len(LEFT)) % 3]
        title = f"{number}: but for {left} bytes at step {step}, and a run that {way}"
        yield Case(name=title, attack=lambda left=left, way=way, step=step: fill_up(left, way, step))


def _with_disk(place: Path, size: str) -> list[str]:
    """Return the command that executes another one, to which a place is a small disk, and to nobody else."""
    script = f'mount -t tmpfs -o size={size} none {place} && exec "$@"'
    return ["unshare", "--mount", "--", "sh", "-c", script, "sh"]


def _words(said: str) -> str:
    """Return the end of what was said without what the script has printed."""
    return re.sub(r"[xy]{50,}\n?", "", said)[-2500:]


def fill_up(left: int, way: str, step: int) -> None:
    """Run on a disk that is filled; raise when the end is unclear, has another status, or a save is not whole."""
    with tempfile.TemporaryDirectory() as base:
        folder = Path(base)
        disk = folder / "disk"
        disk.mkdir()
        words = ["--num-processes", "2", "--log-dir", "disk/runs"]
        words += ["--show-ranks", "all"] if way == "is shown" else []
        if way == "saves there":
            (folder / SAVES).symlink_to(disk / SAVES, target_is_directory=True)
        about = {"PYTHONPATH": str(ROOT), "FAILS": "1" if way == "fails" else "none"}
        about |= {"FILLED_AT": str(step), "LEFT": str(left)}
        run = launch(folder, _SCRIPT, *words, wrapper=_with_disk(disk, DISK), **about)
        (said,) = end_all([run], _SECONDS)
        assert "Traceback" not in said, _words(said)
        ends = re.findall(r"^(?:error|finished)\b.*", said, re.MULTILINE)
        assert len(ends) == 1, _words(said)
        assert run.returncode in (0, 1), (run.returncode, _words(said))
        if run.returncode:
            own = way == "fails" and "RuntimeError: as it is meant to" in said
            assert own or re.search("(?i)no space left|the disk is full| free", _words(said)), _words(said)
            assert "no worker caused it" not in said or "has no space left" in said, _words(said)
        else:
            assert way != "fails", _words(said)
        if way != "saves there" and (steps := complete_steps(folder / SAVES)):
            assert run.returncode or steps[-1] == STEPS, _words(said)
            assert loaded_step(folder) == steps[-1]
