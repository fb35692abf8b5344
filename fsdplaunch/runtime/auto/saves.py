"""Saves and loads are what one process would have written and reads: full tensors, written once. Rule 5.

Every worker runs the script's saving line. Sharded tensors are gathered one at a time on all ranks, or fetched by
a rank 0 that saves alone. Rank 0 keeps them in files and writes them; the others go on when the save is complete.
A sharded model leaves the run as what it was before: pickled, saved by its `save_pretrained`, or exported.
"""

import copy
import copyreg
import functools
import io
import os
import pickle
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fsdplaunch.errors import CheckpointError
from fsdplaunch.files import atomic_file
from fsdplaunch.runtime import messages
from fsdplaunch.runtime.auto import working_tree
from fsdplaunch.runtime.auto.context import HookContext
from fsdplaunch.runtime.auto.model.forward_backward import original_name
from fsdplaunch.runtime.auto.working_tree import WorkingTree, path_of, rank_0_having_the_tree
from fsdplaunch.runtime.collectives import waits
from fsdplaunch.runtime.collectives.rank_group import from_all
from fsdplaunch.runtime.inspection.parameters import clean_name
from fsdplaunch.runtime.inspection.units import has_shards, is_over_all_ranks, reshard
from fsdplaunch.runtime.messages import is_user_file, script_line
from fsdplaunch.runtime.patch import own_attribute, replaced, replaced_once_imported
from fsdplaunch.runtime.state_dict.deepcopy import unsharded_copy
from fsdplaunch.runtime.state_dict.gather import ShardGatherer, cut_to_shard, failed, gathered, in_turn
from fsdplaunch.runtime.torch_internals.tensors import tree_map

_KEEP_SHARDS = ("torch.", "fsdplaunch.", "copy", "multiprocessing.")
"""Whose pickles hold shards: copies, and what goes to other processes."""
_EXPORTS = ((torch.jit, "trace"), (torch.onnx, "export"), (torch.export, "export"))


class _Open(threading.local):
    """What gathers for the pickling that is going on in this thread."""

    gatherer: ShardGatherer | None = None


_open = _Open()


@contextmanager
def pickling(gathering: ShardGatherer) -> Iterator[None]:
    """Pickle sharded tensors as full ones, and sharded models as what they were before."""
    before, _open.gatherer = _open.gatherer, gathering
    try:
        yield
    finally:
        _open.gatherer = before


@contextmanager
def pickling_full_tensors(hook_context: HookContext) -> Iterator[None]:
    """Rule 5: whatever pickles for the script writes full tensors, as `pickle.dump(model.state_dict(), f)`."""

    def make(original: Any) -> Any:
        def reduce_ex(tensor: DTensor, protocol: Any) -> Any:
            if _open.gatherer is not None:
                return _open.gatherer.full(tensor).__reduce_ex__(protocol)
            pickler = str(sys._getframe(1).f_globals.get("__name__", ""))  # C's own has no frame
            if not hook_context.ownership.ours or pickler.startswith(_KEEP_SHARDS):
                return original(tensor, protocol)
            gathering = ShardGatherer("pickle", keep=True)
            full = gathering.full(tensor)
            with gathering.finish("pickle a sharded tensor"):
                return full.__reduce_ex__(protocol)

        return reduce_ex

    with replaced(DTensor, "__reduce_ex__", make):
        yield


def let_model_leave(model: nn.Module) -> None:
    """Let a sharded model and its modules be pickled, scripted and saved as what they were before.

    Args:
        model: Sharded. What it does then is collective: the script's line runs on all ranks, or on rank 0 alone.
    """
    for module in model.modules():
        held = weakref.ref(module)
        module.__dict__["__reduce_ex__"] = _reducer(held)
        module.__dict__["__prepare_scriptable__"] = _preparer(held)
    if hasattr(model, "save_pretrained"):
        model.__dict__["save_pretrained"] = _saving_full(weakref.ref(model))


def _reducer(held: "weakref.ref[nn.Module]") -> Callable[[int], Any]:
    def reduce_ex(_protocol: int) -> Any:
        module: Any = held()
        if sys._getframe(1).f_code is copy.copy.__code__:  # it has the parameters that the module has
            return copyreg.__newobj__, (type(module),), dict(vars(module))  # type: ignore[attr-defined]
        # Inside of torch.save parameters stay what they are, to be gathered when their turn in the pickle comes.
        full: Any = _itself if _open.gatherer else ShardGatherer("pickle", keep=True).full_or_own
        # Protocol 1 names the class in a way that need not be the pickled object's own.
        return unsharded_copy(module, full).__reduce_ex__(1)

    return reduce_ex


def _itself(param: nn.Parameter) -> Any:
    return param


def _preparer(held: "weakref.ref[nn.Module]") -> Callable[[], nn.Module]:
    def prepare_scriptable() -> nn.Module:
        return _full_copy(held(), "torch.jit.script")

    return prepare_scriptable


def _full_copy(model: Any, call: str) -> nn.Module:
    """Return a plain copy of a sharded module. Collective, or on rank 0 alone."""
    gathering = ShardGatherer(call, keep=True)
    gathering.meet()
    with gathering.finish("gather the model"):
        reshard(model)
        return unsharded_copy(model, gathering.full_or_own)


def _saving_full(held: "weakref.ref[nn.Module]") -> Callable[..., None]:
    def save_pretrained(*args: Any, **kwargs: Any) -> None:
        tree = working_tree.tree()
        gathering = ShardGatherer("save_pretrained", keep=tree.rank == 0, spool=True)
        args, kwargs = tree_map(gathering.full_or_own, (args, kwargs))  # a state may be given
        model: Any = held()
        plain: Any = unsharded_copy(model, gathering.full_or_own)
        with gathering.finish("write what save_pretrained was given"):
            if tree.rank == 0:
                plain.save_pretrained(*args, **kwargs)
        if gathering.together:
            tree.share(path_of(args[0] if args else kwargs.get("save_directory")))

    return save_pretrained


@contextmanager
def exporting_full_models(hook_context: HookContext) -> Iterator[None]:
    """Rule 5: what makes a program of a model (a trace, ONNX) is given a copy with full parameters."""

    def make(owner: Any, name: str, export: Any) -> Any:
        @functools.wraps(export)
        def export_full(model: Any, *args: Any, **kwargs: Any) -> Any:
            if hook_context.ownership.ours and isinstance(model, nn.Module):
                reshard(model)
                if has_shards(model):
                    model = _full_copy(model, f"{owner.__name__}.{name}")
            return export(model, *args, **kwargs)

        return export_full

    with ExitStack() as stack:
        for owner, name in _EXPORTS:
            stack.enter_context(replaced(owner, name, functools.partial(make, owner, name)))
        yield


@contextmanager
def loading_full_tensors(hook_context: HookContext) -> Iterator[None]:
    """Rule 5: cut full tensors that are loaded into sharded models and optimizers."""

    def load_model(original: Any) -> Any:
        def load_state_dict(self: nn.Module, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
            targets = _sharded(self) if hook_context.ownership.ours else {}
            if targets:
                _meet(f"{original_name(self)}.load_state_dict")
                state_dict, assign = _cut_model(state_dict, targets), False
            return original(self, state_dict, strict=strict, assign=assign)

        return load_state_dict

    def load_optimizer(original: Any) -> Any:
        def load_state_dict(self: Optimizer, state_dict: dict[str, Any]) -> None:
            params = [param for group in self.param_groups for param in group["params"]]
            if hook_context.ownership.ours and any(isinstance(param, DTensor) for param in params):
                _meet(f"{type(self).__name__}.load_state_dict")
                state_dict = _cut_optimizer(state_dict, params)
            original(self, state_dict)

        return load_state_dict

    with (
        replaced(nn.Module, "load_state_dict", load_model),
        replaced(Optimizer, "load_state_dict", load_optimizer),
    ):
        yield


def _meet(call: str) -> None:
    """Wait until rank 0 makes a call that changes shards, too: until then it may still be saving them.

    Rank 0 waits for none that does not come: it may exchange weights for a save, and back.

    Raises:
        CheckpointError: Only other ranks make it.
    """
    service = waits.current()
    if service is not None:
        service.meets(call, "make it on all ranks, decided by a number that all of them have alike")


def _sharded(module: nn.Module) -> dict[str, Any]:
    """Return the sharded parameters, by each of their names, after giving back what is gathered."""
    reshard(module)
    named = module.named_parameters(remove_duplicate=False)
    return {clean_name(name): param for name, param in named if isinstance(param, DTensor)}


def _cut_model(state: Any, targets: dict[str, Any]) -> Any:
    cut = copy.copy(state)
    for name, value in state.items():
        target = targets.get(clean_name(name))
        if target is not None and _is_full(value, target):
            cut[name] = cut_to_shard(value, target)
    return cut


def _cut_optimizer(state: dict[str, Any], params: list[Any]) -> dict[str, Any]:
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    by_number = dict(zip(numbers, params, strict=False))  # the optimizer itself refuses what does not fit
    cut: dict[Any, Any] = {}
    for number, values in state["state"].items():
        param = by_number.get(number)
        cut[number] = values
        if param is not None and isinstance(values, dict):
            cut[number] = {key: cut_to_shard(v, param) if _is_full(v, param) else v for key, v in values.items()}
    return {**state, "state": cut}


def _is_full(value: Any, target: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and not isinstance(value, DTensor)
        and isinstance(target, DTensor)
        and value.shape == target.shape
    )


_DEPTH = 5
"""How deep shards are looked for in nested mappings and lists."""


@contextmanager
def saving_as_one_process(hook_context: HookContext) -> Iterator[None]:
    """Rule 5, whole: files, saves, pickles, exports and what reads them back."""
    failed.clear()
    tree = WorkingTree(hook_context.ownership, hook_context.rank)
    saves = _Saves(hook_context, tree)
    with ExitStack() as stack:
        stack.enter_context(rank_0_having_the_tree(tree))
        stack.enter_context(replaced(torch, "save", saves.torch_save))
        for name, make in (
            ("save", saves.safe_bytes),
            ("save_file", saves.safe_file),
            ("save_model", saves.safe_model),
        ):
            stack.enter_context(replaced_once_imported("safetensors.torch", name, make))
        stack.enter_context(pickling_full_tensors(hook_context))
        stack.enter_context(loading_full_tensors(hook_context))
        stack.enter_context(exporting_full_models(hook_context))
        yield


class _Saves:
    """The saving functions of one rank."""

    def __init__(self, hook_context: HookContext, tree: WorkingTree) -> None:
        self.ownership = hook_context.ownership
        self.printed = hook_context.printed
        self.rank, self.size = hook_context.rank, hook_context.size
        self.tree = tree
        self.form = hook_context.config.fsdp_config.fsdp_state_dict_type

    def torch_save(self, save: Any) -> Any:
        """Return what stands for `torch.save`."""

        def save_once(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
            def write(to: Any) -> None:
                save(obj, to, *args, **kwargs)

            caller = sys._getframe(1)
            if str(caller.f_globals.get("__name__", "")).startswith(("torch.", "fsdplaunch.")):
                write(f)  # they write each rank's shards
                return
            with self._turn(obj):
                gathering = self._gatherer(obj, f) if self.ownership.ours else self._gatherer_of_one_file(obj, f)
                if gathering is not None:
                    self._save_full(write, obj, f, gathering)
                    return
            self._warn_of_shards(obj, by_script=is_user_file(caller.f_code.co_filename))
            if self.tree.is_rank_0s():
                self._write_own(write, f)
            elif self.ownership.ours is None:
                _write_complete(write, f)
            else:
                write(f)

        return save_once

    def _turn(self, obj: Any) -> AbstractContextManager[None]:
        return in_turn("torch.save") if self.ownership.ours and _has_shards(obj, of_models=True) else nullcontext()

    def _name_call_for_shards(self) -> None:
        """Name once, where the file asks for states of shards, the call that writes them."""
        if self.form == "SHARDED_STATE_DICT" and "saving" not in self.printed:
            self.printed.add("saving")
            messages.say(
                "torch.save gathers full tensors on rank 0; fsdplaunch.save_checkpoint writes every rank's shards"
            )

    def _gatherer(self, obj: Any, f: Any) -> ShardGatherer:
        """Return what gathers what this package has sharded, for the ranks that write."""
        everywhere = isinstance(f, io.BytesIO)  # the script goes on with the bytes
        gathering = ShardGatherer("torch.save", keep=everywhere or self.rank == 0, spool=not everywhere)
        if not everywhere and _has_shards(obj, of_models=True):
            self._keep_by_rank(path_of(f), gathering)
        return gathering

    def _keep_by_rank(self, path: str | None, gathering: ShardGatherer) -> None:
        """Have each rank of a script for DDP write its own file, where all save under different names."""
        if self.ownership.ranked and self.size > 1 and path is not None:
            gathering.meet()
            if gathering.together and len(set(from_all(path))) == self.size:
                gathering.keep = gathering.by_rank = True

    def _gatherer_of_one_file(self, obj: Any, f: Any) -> ShardGatherer | None:
        """Return what gathers what others have sharded, where one file of it is saved; None elsewhere.

        Rank 0 alone saves it, or all ranks save to one path, where the file of shards of the last one would stay.
        Where each has a path of its own, or saves from a thread, they may mean to write their own shards.

        Raises:
            CheckpointError: Only some ranks save, or rank 0 does before the others can hand over their shards.
        """
        in_thread = threading.current_thread() is not threading.main_thread()
        if in_thread or self.ownership.ours is None or not dist.is_initialized() or not _has_shards(obj):
            return None
        gathering = ShardGatherer("torch.save", keep=True, spool=True)
        gathering.meet()
        if gathering.together:
            path = path_of(f)
            paths = set(from_all(path and os.path.realpath(path)))
            if len(paths) > 1 or None in paths:
                return None
            gathering.keep = self.rank == 0
        return gathering

    def _save_full(self, write: Callable[[Any], None], obj: Any, f: Any, gathering: ShardGatherer) -> None:
        """Write where the full tensors are; take part in gathering them everywhere, also when writing fails."""
        failure = None
        with pickling(gathering):
            if gathering.keep:
                try:
                    _write_complete(write, f)
                except CheckpointError:
                    raise  # the others are not here, or know of it
                except Exception as error:  # the others wait in the gathering; they learn of it after
                    failure = error
                    traceback.clear_frames(error.__traceback__)  # they hold copies of modules, and so their shards
            if not gathering.keep or (failure is not None and gathering.together):
                _Walk().dump(obj)
        if gathering.count:
            self._name_call_for_shards()
            with gathering.finish("write what torch.save was given"):
                if failure is not None:
                    raise failure
            self._share(path_of(f), gathering)
        elif failure is not None:
            raise failure
        elif not gathering.keep:
            self._write_own(write, f)

    def _write_own(self, write: Callable[[Any], None], f: Any) -> None:
        """Write what holds no shards on another rank than 0: to a file that the working tree keeps for it."""
        if isinstance(f, str | os.PathLike) and self.tree.is_rank_0s():
            self.tree.adopt(f)
            with open(f, "wb") as file:  # noqa: PTH123  (the tree's; torch would open it by itself)
                write(file)
        else:
            write(f)

    def _share(self, path: str | None, gathering: ShardGatherer) -> None:
        if gathering.together and not gathering.by_rank and self.ownership.ours:
            self.tree.share(path)

    def _warn_of_shards(self, obj: Any, *, by_script: bool) -> None:
        """Print once that a line writes shards, of a script that has sharded its model itself."""
        if self.ownership.ours or self.size == 1 or not by_script or "shards" in self.printed:
            return
        if _has_shards(obj):
            self.printed.add("shards")
            messages.say(
                f"{script_line()}: torch.save writes each rank's own shards here: those of rank 0 alone are not a"
                " model\n"
                "  try  get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)) of"
                " torch.distributed.checkpoint.state_dict on all ranks, or fsdplaunch.save_checkpoint"
            )

    def safe_bytes(self, save: Any) -> Any:
        """Return what stands for safetensors' `save`, which returns bytes."""

        def save_full(tensors: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
            if not _are_sharded(tensors):
                return save(tensors, *args, **kwargs)
            gathering = ShardGatherer("safetensors' save", keep=True)
            full = _detached(gathered(tensors, gathering))
            with gathering.finish("make what safetensors' save returns"):
                return save(full, *args, **kwargs)

        return save_full

    def safe_file(self, save: Any) -> Any:
        """Return what stands for `save_file`: whoever has sharded, safetensors itself cannot write shards."""

        def save_once(tensors: Mapping[str, Any], filename: Any, *args: Any, **kwargs: Any) -> None:
            def write(full: Mapping[str, Any], to: Any) -> None:
                save(_detached(full), to, *args, **kwargs)

            if _are_sharded(tensors):
                self._safe_full("save_file", tensors, filename, write)
            elif not self.tree.leaves_to_rank_0(filename):
                _write_complete(lambda to: write(tensors, to), filename)

        return save_once

    def safe_model(self, save: Any) -> Any:
        """Return what stands for `save_model`."""

        def save_once(model: nn.Module, filename: Any, *args: Any, **kwargs: Any) -> None:
            def write(full: Mapping[str, Any], to: Any) -> None:
                with own_attribute(model, "state_dict", lambda *_, **__: dict(full)):
                    save(model, to, *args, **kwargs)

            state = model.state_dict() if has_shards(model) else {}
            if _are_sharded(state):
                self._safe_full("save_model", state, filename, write)
            else:
                save(model, filename, *args, **kwargs)

        return save_once

    def _safe_full(
        self, call: str, tensors: Mapping[str, Any], filename: Any, write: Callable[[Mapping[str, Any], Any], None]
    ) -> None:
        with in_turn(call):
            gathering = ShardGatherer(call, keep=self.rank == 0, spool=True)
            self._keep_by_rank(path_of(filename), gathering)
            full = gathered(tensors, gathering)
            with gathering.finish(f"write {filename}"):
                if gathering.keep:
                    _write_complete(lambda to: write(full, to), filename)
            self._share(path_of(filename), gathering)


class _Walk(pickle.Pickler):
    """Goes through an object in torch.save's order and writes nothing: to take part in gathering."""

    def __init__(self) -> None:
        super().__init__(_Nowhere(), protocol=2)

    def persistent_id(self, obj: Any) -> Any:
        """Pass over storages, as torch.save does."""
        return "storage" if isinstance(obj, torch.storage.TypedStorage | torch.UntypedStorage) else None


class _Nowhere(io.RawIOBase):
    def write(self, data: Any) -> int:
        return len(data)


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


def _are_sharded(tensors: Mapping[str, Any]) -> bool:
    return any(isinstance(value, DTensor) for value in tensors.values())


def _detached(full: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.detach() if isinstance(value, torch.Tensor) else value for name, value in full.items()}
