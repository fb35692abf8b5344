"""`save_checkpoint` and `load_checkpoint`: whole or not at all, in accelerate's layout, on any number of ranks."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from fsdplaunch.config.environment import decode
from fsdplaunch.errors import CheckpointError
from fsdplaunch.runtime import report
from fsdplaunch.runtime.agreement import from_rank_0, together
from fsdplaunch.runtime.folders import begin, find_checkpoint, publish
from fsdplaunch.runtime.manifest import describe_run, read_manifest, write_manifest
from fsdplaunch.runtime.names import unwrapped
from fsdplaunch.runtime.plain_files import read_plain, write_plain
from fsdplaunch.runtime.plugin import ambient_plugin
from fsdplaunch.runtime.prepared import prepared_of
from fsdplaunch.runtime.random_states import file_name, read_random_states, write_random_states
from fsdplaunch.runtime.state_dicts import load_model, load_optimizer, save_model, save_optimizer

_EXTRA = "extra.bin"


def save_checkpoint(
    dir: str | Path | None = None,  # noqa: A002  (the word of the configuration key)
    *,
    model: nn.Module | Sequence[nn.Module],
    optimizer: Optimizer | Sequence[Optimizer] = (),
    scheduler: Any = (),
    step: int | None = None,
    extra: Mapping[str, Any] | None = None,
) -> Path:
    """Save a training run; every rank calls this.

    Everything is written into a temporary folder beside the final one, the manifest last, and put in place in one
    move: a save that is killed leaves the earlier checkpoint as it was. The form is that of fsdp_state_dict_type.

    Args:
        dir: The folder; `checkpoint.dir` of the configuration when left out.
        model: One model or several.
        optimizer: One optimizer, several, or none.
        scheduler: One scheduler, several, or none.
        step: With a number N the checkpoint is `dir/checkpoint-N`, without one it is `dir` itself.
        extra: Plain values and tensors to get back from `load_checkpoint`; rank 0's are kept.

    Returns:
        The checkpoint's folder.

    Raises:
        CheckpointError: It cannot be written; raised on every rank, and nothing has changed.
    """
    root = _folder(dir)
    target = root if step is None else root / f"checkpoint-{step}"
    models = [unwrapped(each) for each in _several(model)]
    with together(f"save {target}"):
        partial = begin(target) if dist.get_rank() == 0 else target.parent / f".{target.name}.partial"
    with together(f"save {target}"):
        _check_visible(partial)
    with together(f"save {target}"):
        _write_models(partial, models, _several(optimizer))
    with together(f"save {target}"):
        write_random_states(partial / file_name(dist.get_rank()), step)
        if dist.get_rank() == 0:
            _write_rest(partial, _several(scheduler), extra)
    with together(f"save {target}"):
        if dist.get_rank() == 0:
            write_manifest(partial, describe_run(models, step))
            publish(partial, target)
    return target


def load_checkpoint(
    dir: str | Path | None = None,  # noqa: A002  (the word of the configuration key)
    *,
    model: nn.Module | Sequence[nn.Module],
    optimizer: Optimizer | Sequence[Optimizer] = (),
    scheduler: Any = (),
) -> Mapping[str, Any]:
    """Bring a training run back to where it was saved; every rank calls this, on any number of ranks.

    Args:
        dir: A checkpoint, or a folder of them, of which the newest complete one is taken; `checkpoint.dir` of the
            configuration when left out. Checkpoints that accelerate wrote load as well.
        model: As given to `save_checkpoint`, prepared.
        optimizer: As given to `save_checkpoint`, or none to leave it.
        scheduler: As given to `save_checkpoint`, or none to leave it.

    Returns:
        `step` and `extra` as they were saved (None and {} if they were not), and `path`.

    Raises:
        FileNotFoundError: There is no complete checkpoint.
        CheckpointError: The checkpoint is of another model, or damaged; raised on every rank.
    """
    root = _folder(dir)
    folder = from_rank_0(find_checkpoint(root) if dist.get_rank() == 0 else None)
    if folder is None:
        msg = f"no complete checkpoint in {root}"
        raise FileNotFoundError(msg)
    models = [unwrapped(each) for each in _several(model)]
    with together(f"load {folder}"):
        _check_visible(folder)
    with together(f"load {folder}"):
        _read_models(folder, models, _several(optimizer))
    with together(f"load {folder}"):
        for index, each in enumerate(_several(scheduler)):
            each.load_state_dict(read_plain(folder / _indexed("scheduler", index)))
        _restore_random_states(folder)
        extra = read_plain(folder / _EXTRA) if (folder / _EXTRA).exists() else {}
    manifest = read_manifest(folder) or {}
    return {"step": manifest.get("step"), "extra": extra, "path": folder}


def _folder(given: str | Path | None) -> Path:
    folder = Path(given if given is not None else decode().checkpoint.dir)
    return folder if folder.name else folder.absolute()  # "." has no name to put another folder beside


def _several(given: Any) -> list[Any]:
    if given is None:
        return []
    return list(given) if isinstance(given, list | tuple) else [given]


def _indexed(name: str, index: int) -> str:
    return f"{name}.bin" if index == 0 else f"{name}_{index}.bin"


def _check_visible(folder: Path) -> None:
    if not folder.is_dir():
        msg = f"{folder} is not visible here"
        raise CheckpointError(msg, hint="use a folder on a file system that all machines share")


def _form(model: nn.Module) -> str:
    """How this model is to be written: as its plugin says now, which may differ from when it was prepared."""
    prepared = prepared_of(model)
    plugin = ambient_plugin() if prepared is None else prepared.plugin
    return str(plugin.settings().state_dict_type)


def _write_models(folder: Path, models: list[nn.Module], optimizers: list[Optimizer]) -> None:
    for index, model in enumerate(models):
        save_model(model, _form(model), folder, index)
    for index, optimizer in enumerate(optimizers):
        save_optimizer(_trained_by(optimizer, models), optimizer, _form(models[0]), folder, index)


def _read_models(folder: Path, models: list[nn.Module], optimizers: list[Optimizer]) -> None:
    for index, model in enumerate(models):
        load_model(model, folder, index)
    for index, optimizer in enumerate(optimizers):
        load_optimizer(_trained_by(optimizer, models), optimizer, folder, index)


def _trained_by(optimizer: Optimizer, models: list[nn.Module]) -> nn.Module:
    """The model an optimizer trains; several together under their numbers, if it trains several."""
    params = {id(param) for group in optimizer.param_groups for param in group["params"]}
    trained = [model for model in models if any(id(param) in params for param in model.parameters())]
    if not trained:
        msg = "an optimizer trains none of the models given"
        raise CheckpointError(msg, hint="give the model it trains along with it")
    return trained[0] if len(trained) == 1 else nn.ModuleList(trained)


def _write_rest(folder: Path, schedulers: list[Any], extra: Mapping[str, Any] | None) -> None:
    for index, scheduler in enumerate(schedulers):
        write_plain(scheduler.state_dict(), folder / _indexed("scheduler", index), "the scheduler's state")
    if extra:
        write_plain(dict(extra), folder / _EXTRA, "extra")


def _restore_random_states(folder: Path) -> None:
    """Put this rank's generators back, if the run has as many ranks as wrote the checkpoint."""
    path = folder / file_name(dist.get_rank())
    if path.exists() and not (folder / file_name(dist.get_world_size())).exists():
        read_random_states(path)
    else:
        report.say("random number generators start anew: the checkpoint is of another number of ranks")
