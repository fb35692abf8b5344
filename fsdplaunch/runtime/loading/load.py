"""Pretrained weights into a model that is sharded already, or that has no memory until it is."""

import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from fsdplaunch.errors import CheckpointError, UsageError
from fsdplaunch.runtime.collectives.rank_group import RankGroup
from fsdplaunch.runtime.inspection import ModelTensor, model_tensors
from fsdplaunch.runtime.inspection.units import refuse_of_xla, reshard
from fsdplaunch.runtime.loading.broadcast import broadcast_all
from fsdplaunch.runtime.loading.load_plan import LoadPlan, RequestedTensor, execute_plan, make_plan, report_loaded
from fsdplaunch.runtime.loading.pretrained import pretrained_for
from fsdplaunch.runtime.loading.read_shards import clear_padding, local_shards
from fsdplaunch.runtime.patch import WAIT_FOR_COPIES, call_if_imported
from fsdplaunch.runtime.sharding.ignored import is_special
from fsdplaunch.runtime.sharding.materialize import Materializer
from fsdplaunch.runtime.sharding.mesh import groups_from_first
from fsdplaunch.runtime.sharding.registry import registered
from fsdplaunch.runtime.sharding.settings import Settings
from fsdplaunch.runtime.sharding.wrap import class_name
from fsdplaunch.runtime.torch_internals.modules import IncompatibleKeys, is_persistent


def _has_empty_storage(tensor: Any) -> bool:
    """Return whether a tensor has elements and no memory for them."""
    has_elements = isinstance(tensor, torch.Tensor) and not tensor.is_meta and tensor.numel() > 0
    return has_elements and tensor.untyped_storage().nbytes() == 0


class EmptyFlattening(TorchFunctionMode):
    """While this is active, joining such tensors writes nothing, and neither does copying a part of the result.

    These two functions, `torch.cat` and `Tensor.clone`, are all that FullyShardedDataParallel's constructor does
    with the values of its parameters. The joined tensor is never written, so that on a CPU it takes no memory, and
    the wrapper frees it itself; the copy, which is this rank's shard, is to be filled later.
    """

    def __init__(self) -> None:
        super().__init__()
        self.joined: set[int] = set()

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.cat and any(map(_has_empty_storage, args[0])):
            like, numel = args[0][0], sum(tensor.numel() for tensor in args[0])
            joined = torch.empty(numel, dtype=like.dtype, device=like.device)
            self.joined.add(joined.data_ptr())
            return joined
        if func is torch.Tensor.clone and args[0].untyped_storage().data_ptr() in self.joined:
            return torch.empty(args[0].shape, dtype=args[0].dtype, device=args[0].device)
        return func(*args, **(kwargs or {}))


class DeferredWeights(Materializer):
    """Materializes a model's tensors for sharding as the module's text says, and fills them afterwards.

    What Materializer takes, and where the weights are, whether names must fit, and how the model will be sharded.
    Files that do not fit or cannot be read are a CheckpointError on every rank.
    """

    def __init__(
        self, model: nn.Module, *, where: Path, strict: bool, settings: Settings, **arguments: Any
    ) -> None:
        self.split_empty: Callable[[ModelTensor], None] | None = arguments.pop("split", None)
        super().__init__(model, origin=f"weights from {where}, strict={strict}", **arguments)
        self.settings = settings
        self.name = class_name(model)
        wanted = [
            RequestedTensor(
                names=tuple(entry.names),
                shape=self.sources[entry.name][0],
                dtype=self._dtype(entry),
                saved=any(is_persistent(module, attribute) for module, attribute in entry.places),
            )
            for entry in self.entries
        ]
        self.plan = make_plan(self.ranks, model, wanted, where, strict=strict)
        self.aside: dict[str, torch.Tensor] = {}
        self.made: dict[str, torch.dtype] = {}
        self.emptied: list[ModelTensor] = []

    def _dtype(self, entry: ModelTensor) -> torch.dtype:
        """Return the dtype the tensor is going to be kept in."""
        dtype = self.sources[entry.name][1]
        due = self._is_split(entry) and (entry.tensor.requires_grad or self.frozen_too)
        due = due and not is_special(entry.tensor)
        return self.master if self.master is not None and due and dtype.is_floating_point else dtype

    def _is_split(self, entry: ModelTensor) -> bool:
        ignored = any(module in self.ignored for module, _ in entry.places)
        is_kept = not entry.spec[0] or (is_special(entry.tensor) and not entry.tensor.is_floating_point())
        return isinstance(entry.tensor, nn.Parameter) and not is_kept and not ignored

    def materialize_entries(self, due: list[ModelTensor]) -> None:
        """Materialize tensors that are not there yet; those that are read later have no values."""
        for entry in due:
            if self.plan.stored(entry.names) is None:
                continue
            shape, dtype, tensor = self.sources[entry.name][0], self._dtype(entry), entry.tensor
            if self._is_split(entry):
                self._empty(entry)
            elif tensor.device != self.device or tensor.dtype != dtype or not tensor.is_contiguous():
                entry.exchange(torch.empty(shape, dtype=dtype, device=self.device))
            entry.materialized = True
        super().materialize_entries([entry for entry in due if not entry.materialized])
        for entry in due:
            if self._is_split(entry) and self.plan.stored(entry.names) is None:
                if self.ranks.is_first:
                    self.aside[entry.name] = entry.tensor.detach()
                self.made[entry.name] = self._dtype(entry)
                self._empty(entry)
        if self.settings.version == 1:
            self._stand_in(entry for entry in due if entry.tensor.is_meta)

    def _empty(self, entry: ModelTensor) -> None:
        shape = self.sources[entry.name][0]
        entry.exchange(torch.empty(shape, dtype=self._dtype(entry), device="meta"))
        if self.split_empty is not None:
            self.split_empty(entry)
        self.emptied.append(entry)

    def _stand_in(self, entries: Iterable[ModelTensor]) -> None:
        """Put tensors on a real device, as FSDP1 wants them, with storages that hold nothing."""
        for entry in entries:
            stand_in = torch.empty(entry.tensor.shape, dtype=entry.tensor.dtype, device=self.device)
            stand_in.untyped_storage().resize_(0)
            entry.exchange(stand_in)

    def wrapping(self) -> AbstractContextManager[Any]:
        """Return what must be active while FSDP1's constructor runs."""
        return EmptyFlattening() if self.settings.version == 1 else nullcontext()

    def fill(self, sharded: nn.Module) -> None:
        """Give the sharded model memory and values, and say so; every rank calls this."""
        device = torch.device("cpu") if self.settings.offload else self.device
        for entry in self.emptied if self.settings.version != 1 else ():
            give_memory(entry, device)
        clear_padding(sharded)
        held = local_shards(sharded)
        execute_plan(self.ranks, self.plan, held)
        # Split the parameters that no file holds.
        due = [(shard, name, self.made[name]) for shard in held for name in shard.names if name in self.made]
        with torch.no_grad():
            broadcast_all(self.ranks, self.aside, due)
        self.aside.clear()
        report_loaded(self.plan, name=self.name, made=list(self.made))


def give_memory(entry: ModelTensor, device: torch.device) -> None:
    """Exchange a tensor on the meta device for one with this rank's shard of the memory, in all its places."""
    if entry.tensor.is_meta:
        entry.exchange(torch.empty_like(entry.tensor.detach(), device=device))


class LaterValues(Materializer):
    """Materializes what a rank has values of, or a module can initialise, and leaves the rest without storage."""

    def __init__(self, model: nn.Module, *, settings: Settings, **arguments: Any) -> None:
        del settings  # what other materializers of values that come later need
        super().__init__(model, **arguments)

    def leave_empty(self, entry: ModelTensor) -> None:
        """Put a tensor that nothing has given values back on the meta device."""
        shape, dtype, _ = self.sources[entry.name]
        entry.exchange(torch.empty(shape, dtype=dtype, device="meta"))


def load_weights(
    model: nn.Module, weights: str | os.PathLike[str] | None = None, *, strict: bool | None = None
) -> IncompatibleKeys:
    """Read pretrained weights into a sharded model, every rank its own shards only; every rank calls this.

    The model may be sharded by anyone: by `prepare`, by `fully_shard` over a mesh of any number of axes, by
    FullyShardedDataParallel. Parameters still on the meta device get memory for their shards. `prepare` with
    weights does all of this at once, and keeps the model from ever having more.

    Args:
        model: Sharded.
        weights: A model folder or a weight file; `checkpoint.weights` of the configuration when left out.
        strict: Whether tensors missing in the files or left over in them are errors; `checkpoint.weights_strict`
            when left out.

    Returns:
        The names that were missing and those left over, as torch's `load_state_dict` does.

    Raises:
        CheckpointError: The files cannot be read, or are of another model; raised on every rank.
        UsageError: Neither the call nor the configuration names weights.
    """
    refuse_of_xla(model, "load_weights")
    source = pretrained_for([model], weights=weights, strict=strict)
    if source is None:
        msg = "load_weights was given no weights, and checkpoint.weights is not set"
        raise UsageError(msg, hint="give it a model folder")
    plan = _load(model, source.where, strict=source.strict)
    report_loaded(plan, name=class_name(model), made=plan.match.missing)
    return IncompatibleKeys(plan.match.missing, plan.match.unexpected)


def load_full(
    model: nn.Module, state: Mapping[str, Any], *, strict: bool, on_host: bool = False
) -> IncompatibleKeys:
    """Split a state dict that only the first rank needs to hold over a sharded model; every rank calls this.

    Tensors are sent in pieces, so that no other rank ever holds a full one. `on_host` gives parameters on the meta
    device memory of the host, for offloading. Returns the names that were missing and those left over, which are
    errors on every rank under `strict`.
    """
    plan = _load(model, state, strict=strict, on_host=on_host)
    return IncompatibleKeys(plan.match.missing, [*plan.match.unexpected, *plan.match.passed])


def _load(model: nn.Module, where: Path | Mapping[str, Any], *, strict: bool, on_host: bool = False) -> LoadPlan:
    call_if_imported(WAIT_FOR_COPIES)  # a save under way copies what is about to be changed
    ranks = _ranks(model)
    reshard(model)
    held = local_shards(model)
    wanted = [
        RequestedTensor(names=shard.names, shape=shard.shape, dtype=shard.local.dtype, saved=shard.saved)
        for shard in held
    ]
    plan = make_plan(ranks, model, wanted, where, strict=strict)
    with ranks.raise_on_all(f"load weights from {plan.files.where}"):
        for shard in held:
            if shard.local.is_meta and plan.stored(shard.names) is None:  # nothing can make its values any more
                msg = f"{shard.names[0]} is on the meta device, and no file holds it"
                raise CheckpointError(msg, hint="load with fsdplaunch.prepare(model, weights=...), which makes it")
    for entry in model_tensors(model):
        give_memory(entry, torch.device("cpu") if on_host else ranks.device)
    execute_plan(ranks, plan, local_shards(model))
    return plan


def _ranks(model: nn.Module) -> RankGroup:
    prepared, params = registered(model), list(model.parameters())
    mesh = next((param.device_mesh for param in params if isinstance(param, DTensor)), None)
    mesh = mesh if prepared is None else prepared.mesh
    if mesh is not None:
        on_cpu = mesh.device_type == "cpu"
        device = torch.device("cpu") if on_cpu else torch.device(mesh.device_type, torch.cuda.current_device())
        return RankGroup(groups_from_first(mesh), device)
    device = params[0].device if params and not params[0].is_meta else torch.device("cpu")
    return RankGroup([None] if dist.is_initialized() else [], device)
