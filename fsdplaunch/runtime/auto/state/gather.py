"""Gather full tensors one at a time, where they are wanted; all workers take part."""

import copy
import copyreg
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fsdplaunch.runtime.auto.context import HookContext
from fsdplaunch.runtime.auto.detect.ownership import Ownership
from fsdplaunch.runtime.auto.dtensor.row_loops import put_kept_rows
from fsdplaunch.runtime.auto.state.late_storages import SMALLEST, LateStorages
from fsdplaunch.runtime.auto.state.rank0.pulling import rank0_saves
from fsdplaunch.runtime.auto.state.saved_paths import named_by_rank
from fsdplaunch.runtime.auto.state.saving_threads import await_main_thread, refuse_several
from fsdplaunch.runtime.auto.state.unsharded_copy import unsharded_copy
from fsdplaunch.runtime.collectives.monitored_barrier import monitored_barrier
from fsdplaunch.runtime.collectives.rank_group import from_all, raise_on_all_ranks
from fsdplaunch.runtime.patch import replaced
from fsdplaunch.runtime.script_line import script_line
from fsdplaunch.runtime.torch_internals.tensors import storage_identity

_TOGETHER = "let all ranks make this call; rank 0 alone can, from the first step of the model's optimizer on"
_ALIKE = (
    "save on all ranks or on rank 0: decide by a number equal on all ranks, such as a loss on validation data or"
    " one averaged by torch.distributed.all_reduce"
)


class ShardGatherer:
    """Gathers sharded tensors on all workers; the full ones are kept where they are wanted.

    Attributes:
        keep: Whether they are on this one.
        together: Whether all ranks make the call; otherwise rank 0 alone does, and fetches what others hold.
        call: The script's, which all workers must make.
        count: How many were gathered.
        by_rank: Whether each rank writes a file of its own.
        late: What gathers them when they are needed; None where they are wanted at once.
    """

    def __init__(self, call: str, *, keep: bool, at: str | None = None) -> None:
        put_kept_rows()
        self.keep = keep
        self.call = f"{call} at {at or script_line()}"
        self.count = 0
        self.together = True
        self.by_rank = False
        self.late: LateStorages | None = None
        self._met = False
        self._full: dict[Any, tuple[torch.Tensor, torch.Tensor]] = {}

    def meet(self) -> None:
        """Wait until all workers are in this call, once.

        Raises:
            CheckpointError: The others do not save.
        """
        if not self._met:
            self._met = True
            self.together = _meet(self.call)
            if self.together:
                refuse_several(self.call)

    def keep_by_rank(self, path: str | None, ownership: Ownership) -> None:
        """Keep the full tensors on each rank where all of them save, each to a file with its number in the name.

        Collective where the script has ranks.

        Args:
            path: This rank's.
            ownership: Says whether the script has ranks: files of different names are each rank's own then.
        """
        if path is None or not ownership.ranked or not dist.is_initialized():
            return
        self.meet()
        if self.together and named_by_rank(from_all(path)):
            self.keep = self.by_rank = True

    def full(self, tensor: DTensor) -> torch.Tensor:
        """Return the full tensor in host memory, or what stands for it, or an empty one where it is not wanted.

        Collective.

        Raises:
            CheckpointError: The others do not save.
        """
        self.meet()
        self.count += 1
        detached: Any = tensor.detach()
        local = detached.to_local()
        key = (storage_identity(local), local.storage_offset(), tuple(tensor.shape), tensor.dtype)
        if key not in self._full:  # tied tensors stay tied
            late = self.late if tensor.nbytes >= SMALLEST else None
            full = self.gather(tensor) if late is None else self._promised(tensor, late)
            # The shard is kept as well: its storage's address must not be given to another while this one counts.
            self._full[key] = local, full
        full = self._full[key][1]
        return nn.Parameter(full, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else full

    def _promised(self, tensor: DTensor, late: LateStorages) -> torch.Tensor:
        """Return what stands for the full tensor until it is written."""
        if self.keep:
            return late.tensor(tensor.shape, tensor.dtype, lambda: self.gather(tensor))
        late.take_part(lambda: self.gather(tensor))
        return torch.empty(0, dtype=tensor.dtype)

    def gather(self, tensor: DTensor) -> torch.Tensor:
        """Return the full tensor as `full` does, without keeping it; after `meet`. Collective."""
        detached: Any = tensor.detach()
        full: torch.Tensor = detached.full_tensor() if self.together else self._fetch(tensor)
        if not self.keep:
            return full.new_empty(0)
        if full.untyped_storage().nbytes() != full.nbytes:  # a slice of uneven shards with their padding
            full = full.clone()
        return full.cpu()

    def _fetch(self, tensor: DTensor) -> torch.Tensor:
        detached: Any = tensor.detach()
        if all(placement.is_replicate() for placement in tensor.placements):
            return detached.to_local()  # type: ignore[no-any-return]
        saves = rank0_saves()
        if saves is None:
            raise AssertionError
        return saves.full(tensor, self.call)

    def finish(self, doing: str) -> Any:
        """Return a context that ends the saving: what fails in it is raised on all ranks that take part.

        Args:
            doing: What it does, to complete "cannot ...".
        """
        return raise_on_all_ranks(doing) if self.together else _ending_alone()

    def leave(self) -> None:
        """End what writes nothing itself: where rank 0 is alone, the others may forget what they looked up."""
        if not self.together:
            with _ending_alone():
                pass

    def full_or_own(self, param: Any) -> Any:
        """Return the full tensor of a sharded parameter, and any other parameter itself."""
        return self.full(param) if isinstance(param, DTensor) else param

    @contextmanager
    def pickling(self) -> Iterator[None]:
        """Pickle sharded tensors as full ones, and sharded models as what they were before."""
        before, _open.gatherer = _open.gatherer, self
        try:
            yield
        finally:
            _open.gatherer = before


@contextmanager
def pickling_full_tensors(hook_context: HookContext) -> Iterator[None]:
    """Let whatever pickles for the script write full tensors: `pickle.dump(model.state_dict(), f)`, joblib's dump.

    Copies and what goes to other processes keep their shards.
    """

    def make(original: Any) -> Any:
        def reduce_ex(tensor: DTensor, protocol: Any) -> Any:
            if _open.gatherer is not None:
                return _open.gatherer.full(tensor).__reduce_ex__(protocol)
            if not hook_context.ownership.ours or _caller().startswith(_KEEP_SHARDS):
                return original(tensor, protocol)
            gathering = ShardGatherer("pickle", keep=True)
            full = gathering.full(tensor)
            with gathering.finish("pickle a sharded tensor"):
                return full.__reduce_ex__(protocol)

        return reduce_ex

    with replaced(DTensor, "__reduce_ex__", make):
        yield


_KEEP_SHARDS = ("torch.", "fsdplaunch.", "copy", "multiprocessing.")


def _caller() -> str:
    """Return the module of the code that pickles, which stands two frames up: C's own pickler has none."""
    return str(sys._getframe(2).f_globals.get("__name__", ""))


class _Open(threading.local):
    """What gathers for the pickling that is going on in this thread: others may save meanwhile."""

    gatherer: ShardGatherer | None = None


_open = _Open()


def allow_pickling(model: nn.Module) -> None:
    """Let a sharded model and the modules inside of it be pickled as what they were before, with full parameters.

    Args:
        model: Sharded. Pickling is collective: the script's line runs on all workers.
    """
    for module in model.modules():
        module.__dict__["__reduce_ex__"] = _reducer(weakref.ref(module))


def _reducer(module: "weakref.ref[nn.Module]") -> Callable[[int], Any]:
    def reduce_ex(_protocol: int) -> Any:
        if sys._getframe(1).f_code is copy.copy.__code__:  # it has the parameters that the module has
            return copyreg.__newobj__, (type(module()),), dict(vars(module()))  # type: ignore[attr-defined]
        full: Any = _itself if _open.gatherer else ShardGatherer("pickle", keep=True).full_or_own
        model: Any = module()
        # Protocol 1 names the class in a way that need not be the pickled object's own.
        return unsharded_copy(model, full, tensors_of(model)).__reduce_ex__(1)

    return reduce_ex


def _meet(call: str) -> bool:
    await_main_thread(call)
    saves = rank0_saves()
    if saves is not None:
        return saves.meet(call, _ALIKE)
    monitored_barrier(call, _TOGETHER)
    return True


@contextmanager
def _ending_alone() -> Iterator[None]:
    saves = rank0_saves()
    try:
        yield
    finally:
        if saves is not None:
            saves.done()


def _itself(param: nn.Parameter) -> Any:
    return param


def tensors_of(model: nn.Module) -> dict[int, Any]:
    """Return a memo for copying a model without its buffers."""
    return {id(buffer): buffer for buffer in model.buffers()}


def gathered(tensors: Mapping[str, Any], gathering: ShardGatherer) -> dict[str, Any]:
    """Return the same mapping with full tensors."""
    return {
        name: gathering.full(value) if isinstance(value, DTensor) else value for name, value in tensors.items()
    }
