"""Merges that delete their source, and loads, beside a run that replaces the checkpoint all the time.

Two ranks save into one folder without steps, with all values equal to the save's number. What a merge deletes is
what it has merged, and what is loaded, on two other ranks, is one save.
"""

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from scripts.campaigns.attack_classes.case import Case
from scripts.campaigns.attack_classes.runs import ROOT, end_all, environ, launch, wait_for
from scripts.campaigns.attack_classes.whole_saves import load_values, make_training, save

COUNT = 8
MERGES, LOADS = 50, 100
"""How many beside one run."""
_SECONDS = 300.0
_SAVE = "from scripts.campaigns.attack_classes.beside_saves import save_for_ever\nsave_for_ever()\n"
_LOAD = "from scripts.campaigns.attack_classes.beside_saves import load_often\nload_often()\n"
_TWO = ("--num-processes", "2")


def cases(_chance: random.Random, count: int | None) -> Iterator[Case]:
    """Make the cases: merges and loads in turn."""
    for number in range(count or COUNT):
        if number % 2:
            yield Case(name=f"{number}: {LOADS} loads", attack=load_beside)
        else:
            yield Case(name=f"{number}: {MERGES} merges that delete their source", attack=merge_beside)


def save_for_ever() -> None:
    """Be a worker that saves again and again until it is told to end; rank 0 writes which save has returned."""
    training, number = make_training(), 0
    while not Path("enough").exists():
        number += 1
        save(number, training, "ck", numbered=False)
        if os.environ["RANK"] == "0":
            part = Path("part")
            part.write_text(str(number))
            part.replace("returned")
        time.sleep(0.02)


def merge_beside() -> None:
    """Merge with the source's deletion; raise when a save is deleted that was not merged, or a merge is mixed."""
    from safetensors.numpy import load_file

    with tempfile.TemporaryDirectory() as base:
        folder, merged, deleted = Path(base), 0, 0
        run = launch(folder, _SAVE, *_TWO, PYTHONPATH=str(ROOT))
        for number in range(MERGES):
            wait_for((folder / "ck" / "fsdplaunch.json").exists, [run])
            out = folder / f"out{number}"
            words = ["merge-weights", "ck", str(out), "--remove-checkpoint-dir"]
            done = subprocess.run(
                [sys.executable, "-P", "-m", "fsdplaunch", *words],
                cwd=folder,
                env=environ(),
                capture_output=True,
                text=True,
                check=False,
            )
            returned = int((folder / "returned").read_text())
            is_there = (folder / "ck" / "fsdplaunch.json").exists()
            if not (out / "model.safetensors").exists():
                continue  # it was replaced while it was merged, which is an error of the merge
            values = {
                float(one) for each in load_file(out / "model.safetensors").values() for one in set(each.flat)
            }
            assert len(values) == 1, f"merge {number} has values of several saves: {values}"
            merged, deleted = merged + 1, deleted + (not is_there)
            assert is_there or returned <= max(values), (
                f"save {returned} was deleted, {values} merged: {done.stderr}"
            )
        (folder / "enough").touch()
        end_all([run], 60)
        assert merged > MERGES // 2, f"only {merged} of {MERGES} were merged"


def load_often() -> None:
    """Be a worker that loads again and again; rank 0 writes what was loaded."""
    from fsdplaunch.errors import LaunchError

    training, found = make_training(), []
    for _ in range(LOADS):
        try:
            found.append(sorted(load_values(training, os.environ["FOLDER"])))
        except (LaunchError, FileNotFoundError) as problem:
            found.append([str(problem)])
    if os.environ["RANK"] == "0":
        Path("found.json").write_text(json.dumps(found))


def load_beside() -> None:
    """Load on two ranks; raise when anything is of two saves, or more than a few loads are given up."""
    with tempfile.TemporaryDirectory() as base:
        folder, other = Path(base), Path(base, "loads")
        other.mkdir()
        saves = launch(folder, _SAVE, *_TWO, PYTHONPATH=str(ROOT))
        wait_for((folder / "returned").exists, [saves])
        before = int((folder / "returned").read_text())
        loads = launch(other, _LOAD, *_TWO, PYTHONPATH=str(ROOT), FOLDER=str(folder / "ck"))
        (said,) = end_all([loads], _SECONDS)
        made = int((folder / "returned").read_text()) - before
        (folder / "enough").touch()
        end_all([saves], 60)
        assert (other / "found.json").exists(), said[-2000:]
        found = json.loads((other / "found.json").read_text())
        given_up = [values[0] for values in found if "was replaced by other saves" in str(values[0])]
        wrong = [values for values in found if len(values) != 1 or isinstance(values[0], str)]
        assert len(wrong) == len(given_up), f"{len(wrong)} of {LOADS}: {wrong[:4]}"
        assert len(given_up) <= LOADS // 20, f"{len(given_up)} of {LOADS} were given up"
        assert made > LOADS // 10, f"only {made} saves were made beside the loads"
