"""FULL_STATE_DICT while calls of the C library fail, each in turn: an error on all ranks, or success.

A shim counts the calls of one rank that touch the folder of checkpoints, of 62 functions, and has one fail:
once, or from then on, or as on a disk that fills, with half of what was written. After each save the newest
checkpoint is one whole save: the one that returned, or where it failed the one before or the new one; the one
before is there. After each load all ranks have the newest save, or all an error.

Pages of a mapped file that cannot be read (SIGBUS) are out of a shim's reach.
"""

import ctypes
import errno
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scripts.campaigns.attack_classes.case import Case
from scripts.campaigns.attack_classes.runs import ROOT, end_all, launch
from scripts.campaigns.attack_classes.shims import shim
from scripts.campaigns.attack_classes.whole_saves import SAVES, complete_steps, load_values, make_training, save

COUNT = 16
FAULTS = 100
"""How many each run meets."""
ERRORS = ("ENOSPC", "EIO", "EBUSY", "ESTALE")
ONCE, FROM_THEN_ON, SHORT_WRITES = range(3)
_SECONDS = 400.0
_MOST_SECONDS = 12.0
"""How long a save or a load may take with a fault: a manifest is read again for a second, and so is a token."""
_TIMEOUT_SECONDS = 30
"""Of the process group: who waits so long for another rank has hung."""
_SCRIPT = "from scripts.campaigns.attack_classes.io_faults import work\nwork()\n"


def cases(chance: random.Random, count: int | None) -> Iterator[Case]:
    """Make the cases: each error, in saves and in loads, on rank 0 and on rank 1, under FSDP2 and FSDP1."""
    for number in range(count or COUNT):
        error, what = ERRORS[number % 4], ("save", "load")[number // 4 % 2]
        rank, version = (0, 0, 0, 1)[(number // 8 + number) % 4], (2, 2, 1)[number % 3]
        seed = chance.randrange(10**9)
        title = f"{number}: {FAULTS} times {error} in a {what} on rank {rank}, FSDP{version}"
        about = {"ERROR": error, "WHAT": what, "VICTIM": str(rank), "VERSION": str(version), "SEED": str(seed)}
        yield Case(name=title, attack=lambda about=about: fail_calls(about))


def fail_calls(about: dict[str, str]) -> None:
    """Run one error in one place; raise when ranks differ, anything is lost, mixed or late."""
    with tempfile.TemporaryDirectory() as base:
        folder = Path(base)
        words = ("--num-processes", "2", "--process-group-timeout-seconds", str(_TIMEOUT_SECONDS))
        words = (*words, "--checkpoint.keep_last", "2")
        shimmed = {"LD_PRELOAD": shim("io_faults"), "IO_FAULTS_UNDER": f"/{folder.name}/{SAVES}"}
        run = launch(folder, _SCRIPT, *words, PYTHONPATH=str(ROOT), **shimmed, **about)
        (said,) = end_all([run], _SECONDS)
        found = folder / "found.json"
        assert found.exists(), said[-3000:]
        told = json.loads(found.read_text())
        assert told["wrong"] == [], told["wrong"][:6]
        assert run.returncode == 0, said[-3000:]
        assert told["failed"] > FAULTS // 4, f"few of the faults were an error: {told}"


class Faults:
    """The shim in this process."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None)
        self._library.io_faults_arm.argtypes = [ctypes.c_long, ctypes.c_int, ctypes.c_int]
        self._library.io_faults_disarm.restype = ctypes.c_long
        self._library.io_faults_failed.restype = ctypes.c_char_p

    def arm(self, number: int, error: int, manner: int) -> None:
        """Have the call with this number fail; 0 counts only."""
        self._library.io_faults_arm(number, error, manner)

    def disarm(self) -> int:
        """Let calls succeed; return how many there were."""
        return int(self._library.io_faults_disarm())

    @property
    def failed(self) -> str:
        """Return the function that failed."""
        return str(self._library.io_faults_failed().decode())


class _Worker:
    """A rank that saves or loads again and again, with one of its calls failing."""

    def __init__(self) -> None:
        import torch.distributed as dist

        self.training = make_training(int(os.environ["VERSION"]), "FULL_STATE_DICT")
        self.faults, self.rank = Faults(), dist.get_rank()
        self.is_victim = os.environ["VICTIM"] == str(self.rank)
        self.loads = os.environ["WHAT"] == "load"
        self.error = getattr(errno, os.environ["ERROR"])
        self.folder = str(Path(SAVES).absolute())
        self.step, self.good = 0, 0
        self.told: dict[str, Any] = {"wrong": [], "failed": 0, "fine": 0, "functions": Counter[str]()}

    def attempt(self, place: int, manner: int) -> tuple[list[str], str]:
        """Save or load with one fault; return each rank's error, and what failed on the victim."""
        import torch.distributed as dist

        from fsdplaunch.errors import LaunchError

        problem, values, start = "", set[float](), time.monotonic()
        self.step += not self.loads
        if self.is_victim:
            self.faults.arm(place, self.error, manner)
        try:
            if self.loads:
                values = load_values(self.training, self.folder)
            else:
                save(self.step, self.training, self.folder)
        except (LaunchError, FileNotFoundError) as error:
            problem = f"{error}"
        except Exception as error:
            problem = f"NOT OURS {type(error).__name__}: {error}"
        count = self.faults.disarm()
        if (took := time.monotonic() - start) > _MOST_SECONDS:
            problem += f" (after {took:.0f} s)"
        if values and values != {float(self.good)}:
            problem += f"MIXED {values} and not {self.good}"
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, (problem, self.faults.failed if self.is_victim else "", count))
        failed = next((name for _, name, _ in everyone if name), "")
        self.count = max(count for _, _, count in everyone)
        return [said for said, _, _ in everyone], failed

    def check(self, title: str, problems: list[str]) -> None:
        """Note what is not as it should be after an attempt, and return to a whole state."""
        wrong = (
            [f"{title}: {problems}"]
            if any(words in said for said in problems for words in ("NOT OURS", "MIXED", " (after "))
            or len({bool(said) for said in problems}) > 1
            else []
        )
        before, has_failed = self.good, any(problems)
        if not self.loads:
            steps = complete_steps(Path(self.folder))
            if before and before not in steps:
                wrong.append(f"{title}: the one before, {before}, is lost: {steps}, {problems}")
        values = load_values(self.training, self.folder)
        expected = (
            {before, self.step} if has_failed and not self.loads else {self.good if self.loads else self.step}
        )
        if len(values) != 1 or not values <= set(map(float, expected)):
            wrong.append(f"{title}: {values} and not {expected}, {problems}")
        self.good = int(max(values))
        self.told["wrong"] += wrong
        self.told["failed" if has_failed else "fine"] += 1


def work() -> None:
    """Be a worker: learn how many calls there are, and have them fail; rank 0 writes what came of it."""
    worker = _Worker()
    sys.stderr = open(os.devnull, "w")  # noqa: PTH123, SIM115  (what failed is said, some hundred times)
    for step in (1, 2, 3):  # the third removes one, as all that come
        worker.step = step
        save(step, worker.training, worker.folder)
    worker.good = 3
    worker.attempt(0, ONCE)
    worker.good = worker.step
    count, chance = worker.count, random.Random(int(os.environ["SEED"]))
    for number in range(FAULTS):
        place = chance.randrange(1, count + 1)
        manner = chance.choice([ONCE, ONCE, FROM_THEN_ON, SHORT_WRITES])
        problems, failed = worker.attempt(place, manner)
        worker.told["functions"][failed] += 1
        worker.check(f"{number}: {failed}, call {place} of {count}, manner {manner}", problems)
    if worker.rank == 0:
        Path("found.json").write_text(json.dumps({**worker.told, "calls": count}))
