"""`save_checkpoint` and `load_checkpoint`: whole or not at all, in accelerate's layout, on any number of ranks."""

import os
import platform
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from fsdplaunch import __version__
from fsdplaunch.checkpoint.manifest import find_other, read_manifest, save_id
from fsdplaunch.checkpoint.untrusted_files import COPY_AGAIN
from fsdplaunch.config.environment import decode
from fsdplaunch.errors import CheckpointError
from fsdplaunch.runtime import messages
from fsdplaunch.runtime.collectives.rank_group import SharedError, from_all, from_rank_0, raise_on_all_ranks
from fsdplaunch.runtime.collectives.waits import monitored_barrier
from fsdplaunch.runtime.data_loaders import position_of, resume_at
from fsdplaunch.runtime.inspection import unwrapped
from fsdplaunch.runtime.patch import XLA_READ, XLA_TO_SAVE, call_if_imported
from fsdplaunch.runtime.plugin import ambient_plugin
from fsdplaunch.runtime.saving.background_save import background
from fsdplaunch.runtime.saving.checkpoint_dirs import find_checkpoint
from fsdplaunch.runtime.saving.model_and_optimizer import (
    StateToSave,
    load_model,
    load_optimizer,
    model_to_save,
    optimizer_to_save,
)
from fsdplaunch.runtime.saving.plain_files import (
    file_name,
    packed,
    packed_random_states,
    random_states,
    read_plain,
    read_random_states,
)
from fsdplaunch.runtime.saving.save_job import FileContent, SaveJob, check_shared
from fsdplaunch.runtime.sharding.registry import registered
from fsdplaunch.runtime.state_dict.gather import files_of_ranks

_FORMAT_VERSION = 1
_SCHEDULER, _LOADER, _EXTRA = "scheduler", "loader", "extra.bin"
_ATTEMPTS, _PAUSE_SECONDS = 10, 0.3


def save_checkpoint(
    dir: str | Path | None = None,  # noqa: A002  (the word of the configuration key)
    *,
    model: nn.Module | Sequence[nn.Module],
    optimizer: Optimizer | Sequence[Optimizer] = (),
    scheduler: Any = (),
    loader: Any = (),
    step: int | None = None,
    extra: Mapping[str, Any] | None = None,
) -> Path:
    """Save a training run; every rank calls this.

    Everything is written into a temporary folder beside the final one, the manifest last, and put in place in one
    move: a save that is killed leaves the earlier checkpoint as it was. The form is that of fsdp_state_dict_type.

    With `checkpoint.async` everything is copied to host memory and written while training goes on. What the given
    optimizers train is copied beside the next forward and backward passes, and a step that comes before the end of
    the copy waits for it; all else is copied at once. The next save, load and the end of the script wait for the
    files and raise if the save failed.

    Args:
        dir: The folder; `checkpoint.dir` of the configuration when left out.
        model: One model or several.
        optimizer: One optimizer, several, or none.
        scheduler: One scheduler, several, or none.
        loader: One prepared data loader, several, or none; how far each has been read is saved.
        step: With a number N the checkpoint is `dir/checkpoint-N`, without one it is `dir` itself. Of the numbered
            ones `checkpoint.keep_last` stay.
        extra: Plain values and tensors to get back from `load_checkpoint`; rank 0's are kept.

    Returns:
        The checkpoint's folder.

    Raises:
        CheckpointError: It cannot be written, or not all ranks called this; raised on every rank that did, and
            nothing has changed. Or the save before, written in the background, failed.
    """
    background.finish()
    monitored_barrier("save_checkpoint")
    root, config = _folder(dir), decode()
    if step is None and root.is_symlink():  # what it leads to is replaced, and not the link
        root = Path(os.path.realpath(root))
    target = root if step is None else root / f"checkpoint-{step}"
    models, trainers = [unwrapped(each) for each in _several(model)], _several(optimizer)
    with raise_on_all_ranks(f"save {target}"):
        save = SaveJob(
            target=target,
            states=tuple(_to_save(models, trainers)),
            files=_own_files(_several(scheduler), _several(loader), extra, step),
            manifest=_manifest(models, step),
            config=config,
            keep_last=None if step is None else config.checkpoint.keep_last,
        )
    with files_of_ranks():
        if config.checkpoint.async_:
            background.start(save, models, trainers)
        else:
            save.open()
            save.write()
    return target


def load_checkpoint(
    dir: str | Path | None = None,  # noqa: A002  (the word of the configuration key)
    *,
    model: nn.Module | Sequence[nn.Module],
    optimizer: Optimizer | Sequence[Optimizer] = (),
    scheduler: Any = (),
    loader: Any = (),
) -> Mapping[str, Any]:
    """Bring a training run back to where it was saved; every rank calls this, on any number of ranks.

    Args:
        dir: A checkpoint, or a folder of them, of which the newest complete one is taken; `checkpoint.dir` of the
            configuration when left out. Checkpoints that accelerate wrote load as well.
        model: As given to `save_checkpoint`, prepared.
        optimizer: As given to `save_checkpoint`, or none to leave it.
        scheduler: As given to `save_checkpoint`, or none to leave it.
        loader: As given to `save_checkpoint`, prepared, or none. The next pass over it begins after what had been
            read; ranks may be more or fewer, with a batch size that makes up for it.

    Returns:
        `step` and `extra` as they were saved (None and {} if they were not), and `path`.

    Raises:
        FileNotFoundError: There is no complete checkpoint.
        CheckpointError: The checkpoint is of another model, or damaged; raised on every rank.
    """
    background.finish()
    monitored_barrier("load_checkpoint")
    root = _folder(dir)
    models = [unwrapped(each) for each in _several(model)]
    for _ in range(_ATTEMPTS):
        folder, manifest = _find(root)
        try:
            with raise_on_all_ranks(f"load {folder}"):
                _read_models(folder, models, _several(optimizer))
            with raise_on_all_ranks(f"load {folder}"):
                for index, each in enumerate(_several(scheduler)):
                    each.load_state_dict(_read_small(folder, _SCHEDULER, index))
                for index, each in enumerate(_several(loader)):
                    resume_at(each, _read_small(folder, _LOADER, index))
                _read_generators(folder, manifest)
                extra = read_plain(folder / _EXTRA) if (folder / _EXTRA).exists() else {}
        except SharedError:
            if not _is_replaced(folder, manifest):
                raise
        else:
            if not _is_replaced(folder, manifest):
                return {"step": (manifest or {}).get("step"), "extra": extra, "path": folder}
    msg = f"{folder} was replaced by other saves while it was read"
    raise CheckpointError(msg, hint="load when nothing writes to it, or save with step=N")


def _manifest(models: list[nn.Module], step: int | None) -> dict[str, Any]:
    """Return what a manifest says beside files and configuration: who wrote it, on which ranks, how."""
    described = []
    for model in models:
        entry: dict[str, Any] = {
            "class": type(model).__name__.removeprefix("FSDP"),
            "dtypes": sorted({str(param.dtype).removeprefix("torch.") for param in model.parameters()}),
        }
        if (prepared := registered(model)) is not None:
            mesh = prepared.mesh
            entry |= {
                "fsdp_version": prepared.settings.version,
                "sharding_strategy": prepared.settings.strategy,
                "mesh": dict(zip(mesh.mesh_dim_names or ("ranks",), mesh.shape, strict=False)),
                "tied": [list(names) for names in prepared.tied],
            }
        described.append(entry)
    return {
        "format": "fsdplaunch checkpoint",
        "format_version": _FORMAT_VERSION,
        "step": step,
        "world_size": dist.get_world_size(),
        "versions": {"fsdplaunch": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "models": described,
    }


def _find(root: Path) -> tuple[Path, Mapping[str, Any] | None]:
    """Return the checkpoint to load and its manifest, if it has one; the same save on all ranks."""
    attempts = 0
    while True:
        chosen: tuple[Path | None, Any] = (None, None)
        with raise_on_all_ranks(f"find a checkpoint in {root}"):
            if dist.get_rank() == 0:
                found, skipped = find_checkpoint(root)
                for each in skipped:
                    messages.say(f"skipped {each}")
                if found is not None and skipped:
                    messages.say(f"loading {found}, the newest complete checkpoint")
                chosen = found, None if found is None else save_id(read_manifest(found))
        found, identity = from_rank_0(chosen)
        if found is None:
            msg = f"no complete checkpoint in {root}"
            raise FileNotFoundError(msg)
        manifest, is_there = None, False
        with raise_on_all_ranks(f"read {found}"):
            manifest = read_manifest(found)
            is_there = found.is_dir()
        seen = from_all((socket.gethostname(), is_there and save_id(manifest) == identity))
        if all(sees for _, sees in seen):
            if "crc32" not in (manifest or {}):
                messages.say(f"{found} does not say which files belong to one save: they are not checked")
            return found, manifest
        attempts += 1
        if attempts == _ATTEMPTS:
            check_shared(found, seen)
        time.sleep(_PAUSE_SECONDS)  # another save has come, or a file server is late


def _is_replaced(folder: Path, manifest: Mapping[str, Any] | None) -> bool:
    """Return on all ranks whether any sees another save in the place of this one, or none any more."""
    now = None
    with raise_on_all_ranks(f"read {folder} again"):
        now = read_manifest(folder)
    return any(from_all(save_id(now) != save_id(manifest)))


def _read_generators(folder: Path, manifest: Mapping[str, Any] | None) -> None:
    """Put this rank's random number generators back as they were, if it had any."""
    own, last = file_name(dist.get_rank()), file_name(dist.get_world_size() - 1)
    if (folder / own).exists():
        if other := find_other(folder, manifest or {}, own):
            msg = f"{folder}: {other}"
            raise CheckpointError(msg, hint=COPY_AGAIN)
        read_random_states(folder / own)
    if (folder / file_name(0)).exists() and not (folder / last).exists():
        messages.say("the checkpoint is from fewer ranks: the other ranks' random states are not restored")


def _folder(given: str | Path | None) -> Path:
    folder = Path(given if given is not None else decode().checkpoint.dir)
    return folder if folder.name else folder.absolute()  # "." has no name to put another folder beside


def _several(given: Any) -> list[Any]:
    if given is None:
        return []
    return list(given) if isinstance(given, list | tuple) else [given]


def _indexed(name: str, index: int) -> str:
    return f"{name}.bin" if index == 0 else f"{name}_{index}.bin"


def _form(model: nn.Module) -> str:
    """Return how this model is to be written: as its plugin has it now, maybe not as when it was prepared."""
    prepared = registered(model)
    plugin = ambient_plugin() if prepared is None else prepared.plugin
    return str(plugin.settings().state_dict_type)


def _to_save(models: list[nn.Module], optimizers: list[Optimizer]) -> Iterator[StateToSave]:
    on_xla = call_if_imported(XLA_TO_SAVE, models, optimizers, _form(models[0]))
    if on_xla is not None:
        yield from on_xla
        return
    for index, model in enumerate(models):
        yield model_to_save(model, _form(model), index)
    for index, optimizer in enumerate(optimizers):
        yield optimizer_to_save(_trained_by(optimizer, models), optimizer, _form(models[0]), index)


def _read_models(folder: Path, models: list[nn.Module], optimizers: list[Optimizer]) -> None:
    if call_if_imported(XLA_READ, folder, models, optimizers):
        return
    for index, model in enumerate(models):
        load_model(model, folder, index)
    for index, optimizer in enumerate(optimizers):
        load_optimizer(_trained_by(optimizer, models), optimizer, folder, index)


def _read_small(folder: Path, what: str, index: int) -> Any:
    path = folder / _indexed(what, index)
    if not path.exists():
        msg = f"{folder} holds no {what} {index}"
        raise CheckpointError(msg, hint=f"leave the {what} out, or load a checkpoint that has one")
    return read_plain(path)


def _trained_by(optimizer: Optimizer, models: list[nn.Module]) -> nn.Module:
    """Return the model an optimizer trains; several together under their numbers, if it trains several."""
    params = {id(param) for group in optimizer.param_groups for param in group["params"]}
    trained = [model for model in models if any(id(param) in params for param in model.parameters())]
    if not trained:
        msg = "an optimizer trains none of the models given"
        raise CheckpointError(msg, hint="give the model it trains along with it")
    return trained[0] if len(trained) == 1 else nn.ModuleList(trained)


def _own_files(
    schedulers: list[Any], loaders: list[Any], extra: Mapping[str, Any] | None, step: int | None
) -> dict[str, FileContent]:
    """Return this rank's small files: each rank's generators, and on rank 0 what is the same on all."""
    positions = [position_of(loader) for loader in loaders]  # every rank says how far it is
    files: dict[str, FileContent] = {
        file_name(dist.get_rank()): partial(packed_random_states, random_states(step))
    }
    if dist.get_rank() != 0:
        return files
    for index, scheduler in enumerate(schedulers):
        files[_indexed(_SCHEDULER, index)] = packed(scheduler.state_dict(), "the scheduler's state")
    for index, position in enumerate(positions):
        files[_indexed(_LOADER, index)] = packed(position, "the loader's position")
    if extra:
        files[_EXTRA] = packed(dict(extra), "extra")
    return files
