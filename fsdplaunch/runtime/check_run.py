"""After some optimizer steps, save and load a checkpoint, record how it went, and end the script.

Runs in workers that `fsdplaunch check` started.
"""

import json
import shutil
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from fsdplaunch.errors import CheckpointError
from fsdplaunch.run_dir import REHEARSAL
from fsdplaunch.runtime.inspection import named_parameters
from fsdplaunch.runtime.inspection.units import local_tensor
from fsdplaunch.runtime.rank import own_folder, rank
from fsdplaunch.runtime.saving.background_save import finish_saves
from fsdplaunch.runtime.saving.save_load import load_checkpoint, save_checkpoint
from fsdplaunch.runtime.sharding.registry import models_of


class EnoughStepsError(SystemExit):
    """Ends the script as if it had called `sys.exit()`: its `finally` blocks and exit handlers run."""


def stop_after(steps: int, conclude: Callable[[Any], dict[str, Any]]) -> Callable[[Any], None]:
    """End the script after the optimizer that steps most has made so many steps; `conclude` returns the record.

    Those that stepped with it the time before do so, too: a script may have one for each parameter, in any order.
    Returns what to call with anything else that makes steps, after each.
    """
    from torch.optim.optimizer import register_optimizer_step_post_hook

    made: dict[int, int] = {}
    rounds: list[set[int]] = [set(), set()]
    began = time.monotonic()

    def count(optimizer: Any, *_: Any) -> None:
        made[id(optimizer)] = made.get(id(optimizer), 0) + 1
        if id(optimizer) in rounds[-1]:
            rounds[:] = [rounds[-1], set()]
        rounds[-1].add(id(optimizer))
        most = max(made.values())
        if most > steps or (most == steps and rounds[0] <= rounds[1]):
            record = {"steps": steps, "seconds": round(time.monotonic() - began, 2), **conclude(optimizer)}
            folder = own_folder()
            if folder is not None:
                (folder / REHEARSAL).write_text(json.dumps(record), encoding="utf-8")
            raise EnoughStepsError(0)

    register_optimizer_step_post_hook(count)
    return count


def save_and_load(optimizer: Optimizer) -> dict[str, Any]:
    """Save a checkpoint, wipe what is trained, load it and compare."""
    trained = {id(param) for group in optimizer.param_groups for param in group["params"]}
    models = [model for model in models_of(nn.Module) if any(id(param) in trained for param in model.parameters())]
    folder = own_folder()
    if not models or folder is None:
        return {"checkpoint": None}
    target = folder.parent.parent / "rehearsal-checkpoint"
    before = {name: value.clone() for name, value in _values(models, optimizer)}
    saved = save_checkpoint(target, model=models, optimizer=optimizer)
    finish_saves()
    size = sum(path.stat().st_size for path in saved.rglob("*") if path.is_file())
    with torch.no_grad():
        for _, value in _values(models, optimizer):
            value.zero_()
    load_checkpoint(saved, model=models, optimizer=optimizer)
    after = dict(_values(models, optimizer))
    for name, value in before.items():
        found = after.get(name)
        if found is None or found.shape != value.shape or not torch.equal(found, value):
            how = "is missing" if found is None else "has changed"
            msg = f"{name} {how} after a checkpoint was saved and loaded"
            raise CheckpointError(
                msg, hint="this is a defect of fsdplaunch or of the model's own state_dict hooks"
            )
    dist.barrier()
    if rank() == 0:
        shutil.rmtree(target, ignore_errors=True)
    return {"checkpoint": size}


def _values(models: list[nn.Module], optimizer: Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    for number, model in enumerate(models):
        for name, param in named_parameters(model):
            yield f"{name} of model {number}" if len(models) > 1 else name, local_tensor(param)
            for key, value in optimizer.state.get(param, {}).items():
                if isinstance(value, torch.Tensor):
                    yield f"{key} of {name} of model {number}", local_tensor(value)
