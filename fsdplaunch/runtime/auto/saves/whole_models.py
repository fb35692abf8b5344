"""A sharded model leaves the run as what it was before: pickled, saved by its `save_pretrained`, or exported."""

import copy
import copyreg
import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdplaunch.runtime.auto.context import HookContext
from fsdplaunch.runtime.auto.saves import working_tree
from fsdplaunch.runtime.auto.saves.working_tree import path_of
from fsdplaunch.runtime.inspection.units import has_shards, reshard
from fsdplaunch.runtime.patch import replaced
from fsdplaunch.runtime.state_dict.gather import ShardGatherer
from fsdplaunch.runtime.state_dict.unsharded_copy import unsharded_copy
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
