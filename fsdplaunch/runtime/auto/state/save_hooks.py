"""Let `torch.save` and safetensors write what one process would have written, once.

Needed because every worker runs the script's saving line: sharded tensors are gathered one at a time on all
workers, only rank 0 keeps and writes them, and the others go on when the file is complete.
"""

import contextlib
import io
import os
import shutil
import sys
import tempfile
import threading
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fsdplaunch.atomic_file import atomic_file
from fsdplaunch.errors import CheckpointError
from fsdplaunch.runtime import messages
from fsdplaunch.runtime.auto.context import HookContext
from fsdplaunch.runtime.auto.state.files.opened_files import write_in_turn
from fsdplaunch.runtime.auto.state.gather import ShardGatherer, pickling_full_tensors
from fsdplaunch.runtime.auto.state.late_storages import LateStorages
from fsdplaunch.runtime.auto.state.late_tensors import writing_standing
from fsdplaunch.runtime.auto.state.pickle_walk import PickleWalk
from fsdplaunch.runtime.auto.state.rank0.shard_names import is_over_all_ranks
from fsdplaunch.runtime.auto.state.safe_files import saving_safetensors
from fsdplaunch.runtime.auto.state.saved_paths import note_saved, path_of
from fsdplaunch.runtime.auto.state.saving_threads import beside_training, failed, in_turn
from fsdplaunch.runtime.collectives.rank_group import from_all
from fsdplaunch.runtime.inspection.units import has_shards
from fsdplaunch.runtime.patch import replaced
from fsdplaunch.runtime.rank import rank
from fsdplaunch.runtime.script_line import is_user_file, script_line

_SPOOLED_BYTES = 64 << 20
"""What is held in memory before it goes to a temporary file."""


@contextmanager
def saving_full_tensors(hook_context: HookContext) -> Iterator[None]:
    """Let the script's own saving calls write once, and full tensors."""
    failed.clear()
    with (
        replaced(torch, "save", lambda save: _torch_save(save, hook_context)),
        saving_safetensors(hook_context),
        pickling_full_tensors(hook_context),
    ):
        yield


def _torch_save(save: Any, hook_context: HookContext) -> Any:
    def save_once(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        by_torch = not _called_for_the_script()
        with nullcontext() if by_torch else _turn(obj, hook_context):
            once = None if by_torch or hook_context.ownership.ours else _saving_once(obj, f)
            if by_torch or (once is None and not hook_context.ownership.ours):
                _tell_of_shards(obj, hook_context)
                with writing_standing():
                    save(obj, f, *args, **kwargs)
            else:
                _save_full(save, obj, f, args, kwargs, once or _gatherer(obj, f, hook_context), hook_context)

    return save_once


def _turn(obj: Any, hook_context: HookContext) -> Any:
    """Return what lets one of the script's threads after the other save shards, where these are gathered."""
    in_main = threading.current_thread() is threading.main_thread()
    if in_main or not _has_shards(obj, of_models=True) or (not hook_context.ownership.ours and beside_training()):
        return nullcontext()
    return in_turn("torch.save")


def _save_full(
    save: Any, obj: Any, f: Any, args: Any, kwargs: Any, gathering: ShardGatherer, hook_context: HookContext
) -> None:
    """Write full tensors by the rank that keeps them; what holds no shards by the ranks that would without us."""
    everywhere = isinstance(f, io.BytesIO)  # the script goes on with the bytes
    if kwargs.get("_use_new_zipfile_serialization", True):
        gathering.late = LateStorages()
    failure = _write_or_walk(_writer(save, obj, f, args, kwargs), obj, gathering)
    if gathering.count:
        _hint(hook_context)
        _finish(gathering, failure, path_of(f), hook_context)
    elif failure is not None:
        raise failure
    elif not gathering.keep and hook_context.ownership.ranked:
        save(obj, f, *args, **kwargs)  # a file of this rank's own
    elif hook_context.size > 1 and not everywhere and not _is_path(f):
        write_in_turn(lambda: save(obj, f, *args, **kwargs), f, rank=hook_context.rank)
    elif not gathering.keep and _is_path(f):
        _write_if_missing(save, obj, Path(os.fspath(f)), args, kwargs)


def _gatherer(obj: Any, f: Any, hook_context: HookContext) -> ShardGatherer:
    """Return what gathers for rank 0, or for each rank where each goes on with bytes or has a file of its own."""
    everywhere = isinstance(f, io.BytesIO)
    gathering = ShardGatherer("torch.save", keep=everywhere or hook_context.rank == 0)
    if not everywhere and _has_shards(obj, of_models=True):
        gathering.keep_by_rank(path_of(f), hook_context.ownership)
    return gathering


def _saving_once(obj: Any, f: Any) -> ShardGatherer | None:
    """Return what gathers what others have sharded, where one file of it is saved; None elsewhere.

    Rank 0 alone saves it, or all ranks save to the same path, where the file of shards of the last one would stay.
    Where each has a path of its own, or saves from a thread, they may mean to write their own shards.

    Raises:
        CheckpointError: Only some ranks save, or rank 0 does before the others can hand over their shards.
    """
    if not dist.is_initialized() or not _has_shards(obj) or beside_training():
        return None
    gathering = ShardGatherer("torch.save", keep=True)
    gathering.meet()
    if gathering.together:
        gathering.keep = rank() == 0
    return gathering if not gathering.together or _have_one_path(path_of(f)) else None


def _have_one_path(path: str | None) -> bool:
    """Return whether all ranks save to the same file. Collective."""
    paths = set(from_all(path and os.path.realpath(path)))
    return len(paths) == 1 and None not in paths


def _write_or_walk(write: Any, obj: Any, gathering: ShardGatherer) -> Exception | None:
    """Write where the full tensors are; take part in gathering them everywhere, also when writing fails."""
    failure = None
    late = gathering.late or LateStorages()
    with gathering.pickling():
        if gathering.keep:
            try:
                with late.writing(), writing_standing():
                    write()
            except CheckpointError:
                raise  # the others are not here, or know of it
            except Exception as error:  # the others wait in the gathering; they learn of it after
                failure = error
                traceback.clear_frames(error.__traceback__)  # they hold copies of modules, and so their shards
        if gathering.together and (failure is not None or not gathering.keep):
            PickleWalk().dump(obj)
            late.drain()
    return failure


def _finish(
    gathering: ShardGatherer, failure: Exception | None, path: str | None, hook_context: HookContext
) -> None:
    """Raise on all ranks what has failed on one, or remember what all have saved."""
    with gathering.finish("write what torch.save was given"):
        if failure is not None:
            raise failure
    if gathering.together and not gathering.by_rank:
        note_saved(hook_context.saved, path)


def _writer(save: Any, obj: Any, f: Any, args: Any, kwargs: Any) -> Any:
    """Write to a path under another name until the file is complete; to anything else when all is pickled."""
    if isinstance(f, io.BytesIO):
        return lambda: save(obj, f, *args, **kwargs)
    if not _is_path(f):
        return lambda: _write_complete(lambda part: save(obj, part, *args, **kwargs), f)
    path = Path(os.fspath(f))

    def write_and_rename() -> None:
        with atomic_file(path) as part:
            save(obj, part, *args, **kwargs)

    return write_and_rename


def _write_complete(write: Callable[[Any], None], f: Any) -> None:
    """Write to a temporary file, then all of it to the script's: an error leaves that one as it was."""
    with tempfile.SpooledTemporaryFile(max_size=_SPOOLED_BYTES) as part:
        write(part)
        part.seek(0)
        shutil.copyfileobj(part, f)


def _write_if_missing(save: Any, obj: Any, path: Path, args: Any, kwargs: Any) -> None:
    """Write something without shards unless it is there: rank 0's stays, no rank waits or reads half a file."""
    if path.exists() and path.stat().st_size:
        return
    part = _part(path)
    try:
        save(obj, part, *args, **kwargs)
        if path.exists() and not path.stat().st_size:  # of tempfile.mkstemp
            part.replace(path)
            return
        with contextlib.suppress(FileExistsError):
            os.link(part, path)
    finally:
        part.unlink(missing_ok=True)


def _part(path: Path) -> Path:
    return path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")


def _is_path(f: Any) -> bool:
    return isinstance(f, str | os.PathLike)


def _called_for_the_script() -> bool:
    """Return whether the call two frames up is not torch's own or this package's own, which write shards."""
    return not str(sys._getframe(2).f_globals.get("__name__", "")).startswith(("torch.", "fsdplaunch."))


def _tell_of_shards(obj: Any, hook_context: HookContext) -> None:
    """Say once that a line of a script that has sharded its model itself writes shards: nothing gathers them."""
    if (
        not hook_context.ownership.ours
        and hook_context.size > 1
        and "shards" not in hook_context.printed
        and is_user_file(sys._getframe(2).f_code.co_filename)
        and _has_shards(obj)
    ):
        hook_context.printed.add("shards")
        messages.say(
            f"{script_line()}: torch.save writes each rank's own shards here: those of rank 0 alone are no model\n"
            "  try  get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)) of"
            " torch.distributed.checkpoint.state_dict on all ranks, or fsdplaunch.save_checkpoint"
        )


def _has_shards(obj: Any, depth: int = 5, *, of_models: bool = False) -> bool:
    """Return whether there is a tensor of which every rank has a part, in nested mappings and lists.

    Args:
        obj: What is saved.
        depth: How deep they are looked into.
        of_models: Look at modules, too.
    """
    if depth and isinstance(obj, Mapping | list | tuple):
        values = obj.values() if isinstance(obj, Mapping) else obj
        return any(_has_shards(value, depth - 1, of_models=of_models) for value in values)
    if of_models and isinstance(obj, nn.Module):
        return has_shards(obj)
    return isinstance(obj, DTensor) and is_over_all_ranks(obj)


def _hint(hook_context: HookContext) -> None:
    """Name once, where files of shards are configured, the call that writes them."""
    if (
        hook_context.config.fsdp_config.fsdp_state_dict_type != "FULL_STATE_DICT"
        and "saving" not in hook_context.printed
    ):
        hook_context.printed.add("saving")
        messages.say(
            "torch.save gathers full tensors on rank 0; fsdplaunch.save_checkpoint writes every rank's shards"
        )
