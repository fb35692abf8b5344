"""What workers of attacked runs save, and how one sees that what is left is one whole save.

All values of a save are its step: weights, optimizer state, scheduler, `extra`. Whoever loads it on any number of
ranks, or merges it, finds one number.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

from scripts.campaigns.attack_classes.runs import ROOT, end_all, launch

SAVES = "saves"
"""The folder of numbered checkpoints, beside the script."""
_LOAD = "from scripts.campaigns.attack_classes.whole_saves import load\nload()\n"
_LOAD_SECONDS = 120.0


def make_training(version: int = 2, kind: str = "SHARDED_STATE_DICT", width: int = 16) -> tuple[Any, Any, Any]:
    """Return a sharded model of three layers, its optimizer, which has a state, and a scheduler."""
    import torch
    from torch import nn

    import fsdplaunch

    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(3)))
    wrap = {"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 1}
    plugin = fsdplaunch.FullyShardedDataParallelPlugin(fsdp_version=version, state_dict_type=kind, **wrap)
    model, optimizer = fsdplaunch.prepare(plain, torch.optim.AdamW(plain.parameters(), lr=1.0), plugin=plugin)
    model(torch.ones(2, width)).sum().backward()
    optimizer.step()
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 10**6)


def fill(model: Any, optimizer: Any, scheduler: Any, value: int) -> None:
    """Give everything that a save has one value."""
    import torch

    scheduler.last_epoch = value
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(value)
            for each in optimizer.state.get(param, {}).values():
                each.fill_(value)


def save(step: int, training: tuple[Any, Any, Any], folder: str = SAVES, *, numbered: bool = True) -> None:
    """Save a step, in a folder of its own or in the place of the one before; every rank calls it."""
    import fsdplaunch

    fill(*training, step)
    model, optimizer, scheduler = training
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    fsdplaunch.save_checkpoint(folder, **parts, extra={"n": step}, step=step if numbered else None)


def values_of(model: Any, optimizer: Any, scheduler: Any, state: Any) -> set[float]:
    """Return every value of what was loaded: one, if it is one save's."""
    from fsdplaunch.runtime.torch_internals.distributed import local_tensor

    found = {float(scheduler.last_epoch), float(state["extra"].get("n", -1))}
    found |= set() if state["step"] is None else {float(state["step"])}
    for param in model.parameters():
        for each in (param, *optimizer.state.get(param, {}).values()):
            local = local_tensor(each) if hasattr(each, "device_mesh") else each
            found |= {float(one) for one in local.detach().unique()}
    return found


def load_values(training: tuple[Any, Any, Any], folder: str = SAVES) -> set[float]:
    """Load the newest checkpoint; return its values on all ranks."""
    import torch.distributed as dist

    import fsdplaunch

    fill(*training, 0)
    model, optimizer, scheduler = training
    state = fsdplaunch.load_checkpoint(folder, model=model, optimizer=optimizer, scheduler=scheduler)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, values_of(*training, state))
    return set().union(*everyone)


def load() -> None:
    """Be a worker that loads what is there; rank 0 writes the values down."""
    version, kind, width, place, answer = json.loads(os.environ["TO_LOAD"])
    values = load_values(make_training(version, kind, width), place)
    if os.environ["RANK"] == "0":
        Path(answer).write_text(json.dumps(sorted(values)))


def loaded_step(
    folder: Path, *, ranks: int = 2, version: int = 2, kind: str = "SHARDED_STATE_DICT", width: int = 16
) -> int:
    """Load the newest checkpoint beside a script on so many ranks, in a run of its own; return its step.

    Raises:
        AssertionError: It cannot be loaded, or has values of two saves.
    """
    place = folder / "loading"
    place.mkdir()
    answer = place / "values.json"
    told = json.dumps([version, kind, width, str(folder / SAVES), str(answer)])
    run = launch(place, _LOAD, "--num-processes", str(ranks), PYTHONPATH=str(ROOT), TO_LOAD=told)
    (said,) = end_all([run], _LOAD_SECONDS)
    assert run.returncode == 0, f"the load ended with {run.returncode}: {said[-2000:]}"
    values = json.loads(answer.read_text())
    shutil.rmtree(place)
    assert len(values) == 1, f"what is loaded has values of several saves: {values}"
    return int(values[0])


def merged_values(checkpoint: Path, out: Path) -> set[float]:
    """Return the values of the weights that a merge makes of a checkpoint."""
    from safetensors.numpy import load_file

    from fsdplaunch.checkpoint.merge.merge import merge

    shutil.rmtree(out, ignore_errors=True)
    merge(checkpoint, out)
    return {float(one) for each in load_file(out / "model.safetensors").values() for one in set(each.flat)}


def complete_steps(saves: Path) -> list[int]:
    """Return the steps of the checkpoints that pass for complete, in order."""
    from fsdplaunch.checkpoint.manifest import is_complete

    return sorted(int(path.name.rpartition("-")[2]) for path in saves.glob("checkpoint-*") if is_complete(path))
