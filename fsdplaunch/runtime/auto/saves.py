"""Saves and loads are what one process would have written and reads: full tensors, written once. Rule 5.

Every worker runs the script's saving line. Sharded tensors are gathered one at a time on all ranks, or fetched by
a rank 0 that saves alone. Rank 0 keeps them in files and writes them; the others go on when the save is complete.
A sharded model leaves the run as what it was before: pickled, saved by its `save_pretrained`, or exported.
"""

import copy
import io
import os
import pickle
import threading
import traceback
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fsdplaunch.errors import CheckpointError
from fsdplaunch.files import atomic_file
from fsdplaunch.runtime.auto import HookContext
from fsdplaunch.runtime.auto.model.forward_backward import original_name
from fsdplaunch.runtime.auto.working_tree import path_of, tree
from fsdplaunch.runtime.collectives import waits
from fsdplaunch.runtime.collectives.rank_group import from_all
from fsdplaunch.runtime.inspection import clean_name
from fsdplaunch.runtime.inspection.units import has_shards, is_over_all_ranks, reshard
from fsdplaunch.runtime.messages import calling_library, script_line
from fsdplaunch.runtime.patch import own_attribute
from fsdplaunch.runtime.state_dict.deepcopy import unsharded_copy
from fsdplaunch.runtime.state_dict.gather import (
    ShardGatherer,
    are_files_of_ranks,
    cut_to_shard,
    files_of_ranks,
    gathered,
    in_turn,
)
from fsdplaunch.runtime.torch_internals.modules import makes_graph
from fsdplaunch.runtime.torch_internals.tensors import tree_map


class _Open(threading.local):
    """What gathers for the pickling that is going on in this thread."""

    gatherer: ShardGatherer | None = None


_open = _Open()


def reduce_shard(original: Any, hook_context: HookContext, tensor: DTensor, protocol: Any) -> Any:
    """Stand for `DTensor.__reduce_ex__`: what pickles for the script has full tensors, `pickle.dump(state, f)`."""
    if _open.gatherer is not None:
        return _open.gatherer.full(tensor).__reduce_ex__(protocol)
    if not hook_context.ownership.ours or are_files_of_ranks() or makes_graph():
        return original(tensor, protocol)
    gathering = ShardGatherer("pickle", keep=True)
    full = gathering.full(tensor)
    with gathering.finish("pickle a sharded tensor"):
        return full.__reduce_ex__(protocol)


def copy_module(_original: Any, _context: HookContext, module: nn.Module) -> Any:
    """Stand for `Module.__copy__`: a copy is not a pickle, and shares the parameters of the module."""
    kind: Any = type(module)
    make, arguments, *rest = kind.__reduce_ex__(module, 4)
    made = make(*arguments)
    if rest:
        made.__setstate__(rest[0])
    return made


def reduce_module(module: nn.Module, _protocol: int) -> Any:
    """Pickle a sharded module as what it was before. Collective, or on rank 0 alone."""
    # Inside of torch.save parameters stay what they are, to be gathered when their turn in the pickle comes.
    full: Any = (lambda param: param) if _open.gatherer else ShardGatherer("pickle", keep=True).full_or_own
    # Protocol 1 names the class in a way that need not be the pickled object's own.
    return unsharded_copy(module, full).__reduce_ex__(1)


def scriptable(module: nn.Module) -> nn.Module:
    """Return what `torch.jit.script` compiles of a sharded module. Collective, or on rank 0 alone."""
    return _full_copy(module, "torch.jit.script")


def _full_copy(model: Any, call: str) -> nn.Module:
    gathering = ShardGatherer(call, keep=True)
    gathering.meet()
    with gathering.finish("gather the model"):
        reshard(model)
        return unsharded_copy(model, gathering.full_or_own)


def save_pretrained(model: nn.Module, *args: Any, **kwargs: Any) -> None:
    """Have rank 0 save a sharded model as what it was before. Collective, or on rank 0 alone."""
    files = tree()
    gathering = ShardGatherer("save_pretrained", keep=files.rank == 0, spool=True)
    args, kwargs = tree_map(gathering.full_or_own, (args, kwargs))  # a state may be given
    plain: Any = unsharded_copy(model, gathering.full_or_own)
    with gathering.finish("write what save_pretrained was given"):
        if files.rank == 0:
            plain.save_pretrained(*args, **kwargs)
    if gathering.together:
        files.share(path_of(args[0] if args else kwargs.get("save_directory")))


def export(original: Any, hook_context: HookContext, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Stand for what makes a program of a model (a trace, ONNX): it is given a copy with full parameters."""
    if hook_context.ownership.ours and isinstance(model, nn.Module):
        reshard(model)
        if has_shards(model):
            model = _full_copy(model, f"{original.__module__}.{original.__name__}")
    return original(model, *args, **kwargs)


def load_model(
    original: Any,
    hook_context: HookContext,
    model: nn.Module,
    state_dict: Any,
    strict: bool = True,
    assign: bool = False,
) -> Any:
    """Stand for `Module.load_state_dict`: full tensors are cut to this rank's shards."""
    targets: dict[str, Any] = {}
    if hook_context.ownership.ours:
        reshard(model)
        named = model.named_parameters(remove_duplicate=False)
        targets = {clean_name(name): param for name, param in named if isinstance(param, DTensor)}
    if targets:
        _meet(f"{original_name(model)}.load_state_dict")
        state_dict, given, assign = copy.copy(state_dict), state_dict, False
        for name, value in given.items():
            state_dict[name] = _cut(value, targets.get(clean_name(name)))
    return original(model, state_dict, strict=strict, assign=assign)


def load_optimizer(
    original: Any, hook_context: HookContext, optimizer: Optimizer, state_dict: dict[str, Any]
) -> None:
    """Stand for `Optimizer.load_state_dict`, likewise."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if hook_context.ownership.ours and any(isinstance(param, DTensor) for param in params):
        _meet(f"{type(optimizer).__name__}.load_state_dict")
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        by_number = dict(zip(numbers, params, strict=False))  # the optimizer itself refuses what does not fit
        state = dict(state_dict["state"])
        for number, values in state.items():
            if isinstance(values, dict):
                state[number] = {key: _cut(value, by_number.get(number)) for key, value in values.items()}
        state_dict = {**state_dict, "state": state}
    original(optimizer, state_dict)


def _meet(call: str) -> None:
    """Wait until rank 0 makes a call that changes shards, too: until then it may still be saving them.

    Rank 0 waits for none that does not come: it may exchange weights for a save, and back.
    """
    service = waits.current()
    if service is not None:
        service.meets(call, "make it on all ranks; decide by a number that is equal on all of them")


def _cut(value: Any, target: Any) -> Any:
    """Return this rank's shard of a full tensor for a shard, and anything else itself."""
    is_full = isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
    fits = is_full and isinstance(target, DTensor) and value.shape == target.shape
    return cut_to_shard(value, target) if fits else value


_STORAGES = (torch.storage.TypedStorage, torch.UntypedStorage)
_DEPTH = 5  # how deep shards are looked for in nested mappings and lists


def torch_save(save: Any, hook_context: HookContext, obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
    """Stand for `torch.save`."""

    def write(to: Any) -> None:
        save(obj, to, *args, **kwargs)

    ours = hook_context.ownership.ours
    if are_files_of_ranks() or isinstance(obj, _STORAGES):  # torch pickles each storage so
        write(f)
        return
    shares = bool(ours) and _has_shards(obj, of_models=True)
    with in_turn("torch.save") if shares else nullcontext():
        gathering = _gatherer_of_one_file(hook_context, obj, f)
        if ours:
            everywhere = isinstance(f, io.BytesIO)  # the script goes on with the bytes
            gathering = ShardGatherer(
                "torch.save", keep=everywhere or hook_context.rank == 0, spool=not everywhere
            )
            if shares and not everywhere:
                _keep_by_rank(hook_context, path_of(f), gathering)
        if gathering is not None:
            _save_full(hook_context, write, obj, f, gathering)
            if gathering.count and hook_context.config.fsdp_config.fsdp_state_dict_type == "SHARDED_STATE_DICT":
                hook_context.say_once(
                    "torch.save gathers full tensors on rank 0; fsdplaunch.save_checkpoint writes every rank's"
                    " shards"
                )
            return
    _warn_of_shards(hook_context, obj)
    if tree().is_rank_0s():
        _write_own(write, f)
    elif ours is None:
        _write_complete(write, f)
    else:
        write(f)


def _keep_by_rank(hook_context: HookContext, path: str | None, gathering: ShardGatherer) -> None:
    if hook_context.ownership.ranked and hook_context.size > 1 and path is not None:
        gathering.meet()
        if gathering.together and len(set(from_all(path))) == hook_context.size:
            gathering.keep = gathering.by_rank = True


def _gatherer_of_one_file(hook_context: HookContext, obj: Any, f: Any) -> ShardGatherer | None:
    """Return what gathers what others have sharded, where one file of it is saved; None elsewhere.

    Rank 0 alone saves it, or all ranks save to one path, where the file of shards of the last one would stay.
    Where each has a path of its own, or saves from a thread, they may mean to write their own shards.
    """
    in_thread = threading.current_thread() is not threading.main_thread()
    if in_thread or hook_context.ownership.ours is not False or not dist.is_initialized() or not _has_shards(obj):
        return None
    gathering = ShardGatherer("torch.save", keep=True, spool=True)
    gathering.meet()
    if gathering.together:
        path = path_of(f)
        paths = set(from_all(path and os.path.realpath(path)))
        if len(paths) > 1 or None in paths:
            return None
        gathering.keep = hook_context.rank == 0
    return gathering


def _save_full(
    hook_context: HookContext, write: Callable[[Any], None], obj: Any, f: Any, gathering: ShardGatherer
) -> None:
    """Write where the full tensors are; take part in gathering them everywhere, also when writing fails."""
    failure = None
    before, _open.gatherer = _open.gatherer, gathering
    try:
        if gathering.keep:
            try:
                _write_complete(write, f)
            except CheckpointError:
                raise  # the others are not here, or know of it
            except Exception as error:  # the others wait in the gathering; they learn of it after
                failure = error
                traceback.clear_frames(error.__traceback__)  # they hold copies of modules, and so their shards
        if not gathering.keep or (failure is not None and gathering.together):
            with open(os.devnull, "wb") as nowhere:  # noqa: PTH123
                _Walk(nowhere, protocol=2).dump(obj)
    finally:
        _open.gatherer = before
    if gathering.count:
        with gathering.finish("write what torch.save was given"):
            if failure is not None:
                raise failure
        _share(hook_context, path_of(f), gathering)
    elif failure is not None:
        raise failure
    elif not gathering.keep:
        _write_own(write, f)


def _write_own(write: Callable[[Any], None], f: Any) -> None:
    if isinstance(f, str | os.PathLike) and tree().is_rank_0s():
        tree().adopt(f)
        with open(f, "wb") as file:  # noqa: PTH123  (the tree's; torch would open it by itself)
            write(file)
    else:
        write(f)


def _share(hook_context: HookContext, path: str | None, gathering: ShardGatherer) -> None:
    if gathering.together and not gathering.by_rank and hook_context.ownership.ours:
        tree().share(path)


def _warn_of_shards(hook_context: HookContext, obj: Any) -> None:
    alone, by_library = hook_context.ownership.ours or hook_context.size == 1, calling_library() is not None
    if alone or by_library or not _has_shards(obj):
        return
    hook_context.say_once(
        f"{script_line()}: torch.save writes each rank's own shards here: those of rank 0 alone are not a model\n"
        "  try  get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)) of"
        " torch.distributed.checkpoint.state_dict on all ranks, or fsdplaunch.save_checkpoint",
        key="shards",
    )


def safe_bytes(save: Any, _: HookContext, tensors: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
    """Stand for safetensors' `save`, which returns bytes."""
    if not _are_sharded(tensors):
        return save(tensors, *args, **kwargs)
    gathering = ShardGatherer("safetensors' save", keep=True)
    full = _detached(gathered(tensors, gathering))
    with gathering.finish("make what safetensors' save returns"):
        return save(full, *args, **kwargs)


def safe_file(
    save: Any, hook_context: HookContext, tensors: Mapping[str, Any], filename: Any, *args: Any, **kwargs: Any
) -> None:
    """Stand for `save_file`: whoever has sharded, safetensors itself cannot write shards."""

    def write(full: Mapping[str, Any], to: Any) -> None:
        save(_detached(full), to, *args, **kwargs)

    if _are_sharded(tensors):
        _safe_full(hook_context, "save_file", tensors, filename, write)
    elif not tree().leaves_to_rank_0(filename):
        _write_complete(lambda to: write(tensors, to), filename)


def safe_model(
    save: Any, hook_context: HookContext, model: nn.Module, filename: Any, *args: Any, **kwargs: Any
) -> None:
    """Stand for `save_model`."""

    def write(full: Mapping[str, Any], to: Any) -> None:
        with own_attribute(model, "state_dict", lambda *_, **__: dict(full)):
            save(model, to, *args, **kwargs)

    state: Mapping[str, Any] = {}
    if has_shards(model):
        with files_of_ranks():  # shards, to be gathered once they are seen to be all ranks' or rank 0's alone
            state = model.state_dict()
    if _are_sharded(state):
        _safe_full(hook_context, "save_model", state, filename, write)
    else:
        save(model, filename, *args, **kwargs)


def _safe_full(
    hook_context: HookContext,
    call: str,
    tensors: Mapping[str, Any],
    filename: Any,
    write: Callable[[Mapping[str, Any], Any], None],
) -> None:
    with in_turn(call):
        gathering = ShardGatherer(call, keep=hook_context.rank == 0, spool=True)
        _keep_by_rank(hook_context, path_of(filename), gathering)
        full = gathered(tensors, gathering)
        with gathering.finish(f"write {filename}"):
            if gathering.keep:
                _write_complete(lambda to: write(full, to), filename)
        _share(hook_context, path_of(filename), gathering)


class _Walk(pickle.Pickler):
    """Goes through an object in torch.save's order, to take part in gathering."""

    def persistent_id(self, obj: Any) -> Any:
        """Pass over storages, as torch.save does."""
        return "storage" if isinstance(obj, _STORAGES) else None


def _write_complete(write: Callable[[Any], None], f: Any) -> None:
    """Write to a path under another name until the file is complete: nobody finds half a file."""
    if not isinstance(f, str | os.PathLike):
        write(f)
        with suppress(AttributeError, OSError, ValueError):  # what reads the file by its name finds all of it
            f.flush()
        return
    with atomic_file(Path(os.fspath(f))) as part:
        write(part)


def _has_shards(obj: Any, depth: int = _DEPTH, *, of_models: bool = False) -> bool:
    """Return whether there is a tensor of which every rank has a part, in nested mappings and lists."""
    if depth and isinstance(obj, Mapping | list | tuple):
        values = obj.values() if isinstance(obj, Mapping) else obj
        return any(_has_shards(value, depth - 1, of_models=of_models) for value in values)
    if of_models and isinstance(obj, nn.Module):
        return has_shards(obj)
    return isinstance(obj, DTensor) and is_over_all_ranks(obj)


def _are_sharded(tensors: Mapping[str, Any]) -> bool:
    return any(isinstance(value, DTensor) for value in tensors.values())


def _detached(full: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.detach() if isinstance(value, torch.Tensor) else value for name, value in full.items()}
