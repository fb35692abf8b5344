"""Twenty launches in one folder at once: each has a folder, ports and an end of its own.

Every one trains, with all its workers and no other's. `runs` lists them all, before their ends and after, and
`latest` is one of them. Where all of them save into one folder, one does, and the others say which one holds it.
"""

import json
import os
import random
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from scripts.campaigns.attack_classes.case import Case
from scripts.campaigns.attack_classes.runs import ROOT, Run, end_all, environ, launch, wait_for
from scripts.campaigns.attack_classes.whole_saves import SAVES, complete_steps, loaded_step

COUNT = 4
LAUNCHES = 20
_SECONDS = 400.0
_PLAIN = """
import os, time
import torch
import torch.distributed as dist
if not dist.is_initialized():
    dist.init_process_group("gloo")
told = [None] * dist.get_world_size()
dist.all_gather_object(told, (os.environ["NUMBER"], os.getpid()))
if dist.get_rank() == 0:
    with open("told", "a") as file:
        file.write(f"{os.environ['NUMBER']} {[number for number, _ in told]}\\n")
"""
_SHARDED = """
import torch
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
"""
_SAVING = """
import os, time
from scripts.campaigns.attack_classes.whole_saves import make_training, save
training = make_training()
for step in range(1, 6):
    save(1000 * int(os.environ["NUMBER"]) + step, training)
    time.sleep(0.2)
"""
_TRAINING = _PLAIN + _SHARDED
_NO_SHARDS = ("--distributed-type", "MULTI_CPU")


def cases(_chance: random.Random, count: int | None) -> Iterator[Case]:
    """Make the cases: each kind of job in turn."""
    ways: list[tuple[str, Callable[[], None]]] = [
        ("MULTI_CPU, one worker or two", lambda: launch_many(_PLAIN, _NO_SHARDS)),
        ("FSDP, one worker or two", lambda: launch_many(_TRAINING, ("--fsdp-auto-wrap-policy", "NO_WRAP"))),
        ("with restarts", lambda: launch_many(_PLAIN, (*_NO_SHARDS, "--max-restarts", "1"))),
        ("all save into one folder", save_into_one_folder),
    ]
    for number in range(count or COUNT):
        name, attack = ways[number % len(ways)]
        yield Case(name=f"{number}: {LAUNCHES} launches, {name}", attack=attack)


def begin_all(
    folder: Path, script: str, workers: Callable[[int], int], words: tuple[str, ...]
) -> list["Run[str]"]:
    """Start all launchers, within less time than one of them needs to start."""
    return [
        launch(
            folder,
            script,
            *("--num-processes", str(workers(number)), *words),
            **{"NUMBER": str(number), "PYTHONPATH": str(ROOT)},
        )
        for number in range(LAUNCHES)
    ]


def listed(folder: Path) -> list[dict[str, object]]:
    """Return what `runs` says."""
    words = [sys.executable, "-P", "-m", "fsdplaunch", "runs", "--json", "--limit", "100"]
    said = subprocess.run(words, cwd=folder, env=environ(), capture_output=True, text=True, check=True, timeout=60)
    return list(json.loads(said.stdout))


def launch_many(script: str, words: tuple[str, ...]) -> None:
    """Launch the jobs; raise when one does not end well, or is mixed up with another."""
    with tempfile.TemporaryDirectory() as base:
        folder = Path(base)

        def workers(number: int) -> int:
            return 1 + number % 2

        runs = begin_all(folder, script, workers, words)
        wait_for((folder / "told").exists, [], seconds=_SECONDS)
        during = listed(folder)  # while they go on
        said = end_all(runs, _SECONDS)
        for run, text in zip(runs, said, strict=True):
            assert run.returncode == 0, f"ended with {run.returncode}: {text[-2000:]}"
        told = sorted((folder / "told").read_text().splitlines())
        assert told == sorted(f"{n} {[str(n)] * workers(n)}" for n in range(LAUNCHES)), told
        _check_listed(folder, said, Counter({"done": LAUNCHES}))
        assert {one["run_id"] for one in during} <= {one["run_id"] for one in listed(folder)}


def _check_listed(folder: Path, said: list[str], states: Counter[str]) -> None:
    ids = [re.findall(r"  run (\S+)  ", text)[0] for text in said]
    assert len(set(ids)) == LAUNCHES, ids
    found = listed(folder)
    assert {one["run_id"] for one in found} == set(ids), (found, ids)
    assert Counter(str(one["state"]) for one in found) == states, found
    assert os.readlink(folder / "runs" / "latest").rpartition("/")[2] in ids  # noqa: PTH115  (as it stands there)


def save_into_one_folder() -> None:
    """Have all of them save into one folder; raise when one neither saves nor says who does, or mixes."""
    with tempfile.TemporaryDirectory() as base:
        folder = Path(base)
        runs = begin_all(folder, _SAVING, lambda _: 2, ())
        said = end_all(runs, _SECONDS)
        ended = Counter(run.returncode for run in runs)
        for run, text in zip(runs, said, strict=True):
            assert run.returncode == 0 or "is being written by" in text, text[-2000:]
        assert ended[0] >= 1, ended
        steps = complete_steps(folder / SAVES)
        winners = [number for number, run in enumerate(runs) if run.returncode == 0]
        assert set(steps) >= {1000 * number + step for number in winners for step in range(1, 6)}, (steps, winners)
        assert loaded_step(folder) in steps
