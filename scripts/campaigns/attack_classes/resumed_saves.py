"""Runs killed while they save, and resumed on other numbers of ranks: what is loaded is one whole save.

A chain of runs on 2, 3, 4 and again 2 ranks. Each loads what the one before has left, finds every number where it
was put, goes on to save, and is killed at a random moment: one worker, or all processes at once. No save that had
returned before the kill is lost.
"""

import contextlib
import json
import os
import random
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scripts.campaigns.attack_classes.case import Case
from scripts.campaigns.attack_classes.runs import ROOT, Run, end_all, launch, wait_for
from scripts.campaigns.attack_classes.stores import descendants
from scripts.campaigns.attack_classes.whole_saves import SAVES, make_training

COUNT = 12
RANKS = (2, 3, 4, 2)
FORMS = {
    "FSDP2, sharded": (2, "SHARDED_STATE_DICT", ()),
    "FSDP2, full": (2, "FULL_STATE_DICT", ()),
    "FSDP2, sharded, in the background": (2, "SHARDED_STATE_DICT", ("--checkpoint.async", "true")),
    "FSDP1, sharded": (1, "SHARDED_STATE_DICT", ()),
}
WIDTH = 17
"""Divided by no number of ranks: shards of all of them differ in size."""
_SCRIPT = "from scripts.campaigns.attack_classes.resumed_saves import work\nwork()\n"
_KEPT = ("--checkpoint.keep_last", "3")
_BEFORE_KILL_SECONDS = 1.5
_END_SECONDS = 60.0


def cases(chance: random.Random, count: int | None) -> Iterator[Case]:
    """Make the cases: each form in turn."""
    for number in range(count or COUNT):
        form, seed = list(FORMS)[number % len(FORMS)], chance.random()
        title = f"{number}: {form}, on {RANKS} ranks"
        yield Case(name=title, attack=lambda form=form, seed=seed: kill_and_resume(form, random.Random(seed)))


def kill_and_resume(form: str, chance: random.Random) -> None:
    """Run a chain; raise when one of its runs loads anything but the newest whole save."""
    version, kind, words = FORMS[form]
    with tempfile.TemporaryDirectory() as base:
        folder, returned = Path(base), 0
        for place, ranks in enumerate(RANKS):
            form_words = (*words, *_KEPT)
            about = {"KIND": kind, "VERSION": str(version), "ROUND": str(place), "PYTHONPATH": str(ROOT)}
            run = launch(folder, _SCRIPT, "--num-processes", str(ranks), *form_words, **about)
            loaded = folder / f"loaded{place}"
            wait_for(loaded.exists, [run])
            found = json.loads(loaded.read_text())
            assert found["wrong"] == [], f"{ranks} ranks loaded {found}"
            assert found["step"] >= returned, f"{ranks} ranks loaded {found}, and {returned} had been saved"
            if place == len(RANKS) - 1:
                _end(run, [run.pid])
                return
            told = folder / f"returned{place}"
            wait_for(lambda told=told: told.exists() and told.read_text().count("\n") > 1, [run])
            time.sleep(chance.uniform(0, _BEFORE_KILL_SECONDS))
            family = descendants(run.pid)
            _end(run, family if chance.random() < 0.5 else [chance.choice(family[1:])])
            # Of saves in the background, the last that returned need not be complete yet: the one before it is.
            returned = int(told.read_text().split()[-2 if "--checkpoint.async" in words else -1])


def _end(run: "Run[str]", victims: list[int]) -> None:
    for pid in victims:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    if run.poll() is None and len(victims) == 1 and victims[0] != run.pid:
        end = time.monotonic() + _END_SECONDS
        while run.poll() is None and time.monotonic() < end:
            time.sleep(0.05)
    end_all([run], _END_SECONDS)


def work() -> None:
    """Be a worker: load what there is, compare it, and save step after step."""
    import fsdplaunch

    rank, place = os.environ["RANK"], os.environ["ROUND"]
    version = int(os.environ["VERSION"])
    model, optimizer, scheduler = training = make_training(version, os.environ["KIND"], WIDTH)
    step, wrong = 0, []
    if Path(SAVES).exists():
        parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
        state = fsdplaunch.load_checkpoint(SAVES, **parts)
        step = int(state["step"])
        wrong = differences(training, step, state)
    if rank == "0":
        _write(Path(f"loaded{place}"), json.dumps({"step": step, "wrong": wrong}))
    while True:
        step += 1
        put(training, step)
        parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
        fsdplaunch.save_checkpoint(SAVES, **parts, extra={"n": step}, step=step)
        if rank == "0":
            with Path(f"returned{place}").open("a") as file:
                file.write(f"{step}\n")


def _write(path: Path, text: str) -> None:
    part = path.with_name(f".{path.name}")
    part.write_text(text)
    part.replace(path)


def put(training: tuple[Any, Any, Any], step: int) -> None:
    """Give every number of a save a value of its own."""
    import torch

    model, optimizer, scheduler = training
    scheduler.last_epoch = step
    with torch.no_grad():
        for number, (tensor, _) in enumerate(_tensors(model, optimizer)):
            tensor.copy_(_expected(tensor, step, number))


def _tensors(model: Any, optimizer: Any) -> Iterator[tuple[Any, str]]:
    for name, param in model.named_parameters():
        yield param, name
        for key, value in sorted(optimizer.state.get(param, {}).items()):
            yield value, f"{key} of {name}"


def _expected(tensor: Any, step: int, number: int) -> Any:
    """Return the value of a tensor in a save; one number for the parts of flat parameters, which have no shape."""
    import torch
    from torch.distributed.tensor import DTensor, distribute_tensor

    if not isinstance(tensor, DTensor):
        return torch.full_like(tensor, 1000 * step + number)
    full = torch.arange(tensor.numel(), dtype=tensor.dtype).view(tensor.shape) + 1000 * step + number
    return distribute_tensor(full, tensor.device_mesh, tensor.placements, src_data_rank=None)


def differences(training: tuple[Any, Any, Any], step: int, state: Any) -> list[str]:
    """Return what is not as `put` had it, on any rank."""
    import torch
    import torch.distributed as dist

    from fsdplaunch.runtime.torch_internals.distributed import local_tensor

    model, optimizer, scheduler = training
    wrong = [] if scheduler.last_epoch == step and state["extra"].get("n") == step else ["scheduler or extra"]
    for number, (tensor, name) in enumerate(_tensors(model, optimizer)):
        one, other = tensor, _expected(tensor, step, number)
        if hasattr(one, "device_mesh"):
            one, other = local_tensor(one), local_tensor(other)
        if not torch.equal(one.detach(), other):
            wrong.append(f"{name}: {one.flatten()[:3].tolist()} and not {other.flatten()[:3].tolist()}")
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, wrong)
    return [f"rank {rank}: {each}" for rank, those in enumerate(everyone) for each in those]
