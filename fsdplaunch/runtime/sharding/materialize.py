"""Give every rank the same full tensors, one unit at a time, right before the unit is sharded.

A model built with another seed on each rank, or with weights on rank 0 only, would otherwise be sharded into a mix
of several models without any error.
"""

import inspect
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdplaunch.errors import ShardingError
from fsdplaunch.runtime.collectives.rank_group import RankGroup
from fsdplaunch.runtime.inspection import ModelTensor, Spec, Specs, model_tensors
from fsdplaunch.runtime.inspection.units import as_bytes
from fsdplaunch.runtime.sharding.ignored import is_special
from fsdplaunch.runtime.sharding.mesh import groups_from_first

_MARK = 0xA5
_PLAIN = (nn.Parameter, torch.Tensor)


class Materializer:
    """Materializes a model's tensors: storage on the device, rank 0's values, the master dtype.

    Where ranks split layers, `split` exchanges each of these tensors for this rank's part.

    Tensors that have no storage on rank 0 have no values to send. They are allocated and initialized by
    `param_init_fn`, the model's own `_init_weights`, or their module's `reset_parameters`.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        mesh: DeviceMesh,
        device: torch.device,
        master: torch.dtype | None,
        frozen_too: bool = False,
        ignored: Iterable[nn.Module] = (),
        init_fn: Callable[[nn.Module], Any] | None = None,
        send: bool = True,
        origin: str = "values of its own",
        split: Callable[[ModelTensor], None] | None = None,
    ) -> None:
        self.device = device
        self.master = master
        self.frozen_too = frozen_too
        own_init = getattr(model, "_init_weights", None)  # transformers' gives one module its values
        takes_module = own_init is not None and len(inspect.signature(own_init).parameters) == 1
        self.init_fn = init_fn or (own_init if takes_module else None)
        self.ranks = RankGroup(groups_from_first(mesh), device)
        self.entries = model_tensors(model)
        self.held: dict[nn.Module, list[ModelTensor]] = {}
        for entry in self.entries:
            for module, _ in entry.places:
                self.held.setdefault(module, []).append(entry)
        self.ignored = {below for module in ignored for below in module.modules()}
        self.split = split
        mine = {entry.name: entry.spec for entry in self.entries}
        theirs: Specs
        theirs, first = self.ranks.from_first((mine, origin))
        here = f"on rank {dist.get_rank()}"
        difference = None if first == origin else f"the model gets {first} on rank 0 and {origin} {here}"
        for name in reversed([*theirs, *mine]):  # the first of them is told
            if name not in mine or name not in theirs or mine[name][0] != theirs[name][0]:
                shapes = _shape_of(theirs.get(name)), _shape_of(mine.get(name))
                difference = f"{name} is {shapes[0]} on rank 0 and {shapes[1]} {here}"
        difference = self.ranks.from_any(difference)
        if difference is not None:
            raise ShardingError(difference, hint="build the same model, and load the same weights, on every rank")
        self.sources = theirs
        lacking = (e.name for e in self.entries if self.sources[e.name][2] and not e.spec[2])
        self.send = send or self.ranks.from_any(next(lacking, None)) is not None

    def materialize(self, module: nn.Module) -> None:
        """Materialize every tensor that `module` or a module below it holds and that is not materialized yet."""
        inside = (entry for m in module.modules() for entry in self.held.get(m, ()) if not entry.materialized)
        self.materialize_entries(list({id(entry): entry for entry in inside}.values()))

    def materialize_entries(self, due: list[ModelTensor]) -> None:
        """Materialize tensors that are not materialized yet."""
        if self.device.type != "meta":  # there the layout alone is wanted, and nothing has values
            for entry in due:
                self._give_storage(entry)
            self._initialize([entry for entry in due if not self.sources[entry.name][2]])
            if self.send:
                self.ranks.send(*(entry.tensor.data for entry in due if not entry.tensor.is_meta))
        for entry in due:
            tensor = entry.tensor
            casts = isinstance(tensor, nn.Parameter) and (tensor.requires_grad or self.frozen_too)
            casts = casts and tensor.is_floating_point() and not is_special(tensor)
            if self.master is not None and casts and not any(module in self.ignored for module, _ in entry.places):
                tensor.data = tensor.data.to(self.master)
            if self.split is not None:
                self.split(entry)
            entry.materialized = True

    def wrapping(self) -> AbstractContextManager[Any]:
        """Return what must be active while FSDP1's constructor runs: nothing."""
        return nullcontext()

    def fill(self, sharded: nn.Module) -> None:
        """Give the sharded model the values it does not have yet: it has all."""

    def _give_storage(self, entry: ModelTensor) -> None:
        """Make the tensor one on the device, in rank 0's dtype.

        A tensor from elsewhere is exchanged for a new one, not moved: an optimizer that was built on it would keep
        the moved one alive, and with it the full model on the device.
        """
        shape, dtype, _ = self.sources[entry.name]
        tensor = entry.tensor
        if tensor.device == self.device or type(tensor) not in _PLAIN:
            tensor.data = tensor.data.to(self.device, dtype).contiguous()
        elif tensor.is_meta:
            entry.exchange(torch.empty(shape, dtype=dtype, device=self.device))
        else:
            entry.exchange(tensor.data.to(self.device, dtype).contiguous())

    def _initialize(self, empty: list[ModelTensor]) -> None:
        """Have modules give tensors values, over bytes that none leaves, so that one without any is seen."""
        for entry in empty:
            if type(entry.tensor) in _PLAIN:
                as_bytes(entry.tensor.data).fill_(_MARK)
        for module in dict.fromkeys(module for entry in empty for module, _ in entry.places):
            init = self._init_of(module)
            if init is not None:
                with torch.no_grad():
                    init(module)
        for entry in empty:
            tensor = entry.tensor
            readable = type(tensor) in _PLAIN and tensor.numel() and tensor.is_contiguous()
            raw = as_bytes(tensor.data) if readable else torch.zeros(1)
            marked = bool((raw[:64] == _MARK).all()) and bool((raw == _MARK).all())
            if marked or not any(self._init_of(module) for module, _ in entry.places):
                self.leave_empty(entry)

    def _init_of(self, module: nn.Module) -> Callable[[nn.Module], Any] | None:
        return self.init_fn or getattr(type(module), "reset_parameters", None)

    def leave_empty(self, entry: ModelTensor) -> None:
        """Raise for a tensor that nothing has given values."""
        holder, attribute = entry.places[0]
        kind, where = type(holder).__name__, f"{entry.name} has no values on any rank, and "
        msg, hint = f"{where}initializing {kind} sets none", f"set {attribute} in its reset_parameters method"
        if self._init_of(holder) is None:
            msg, hint = f"{where}{kind} cannot initialize it", "give the module a reset_parameters method"
        elif type(holder).__module__.startswith("transformers."):
            hint = f"install transformers 5 or newer, which initializes {attribute}"
        raise ShardingError(msg, hint=f"{hint}, or pass param_init_fn to the plugin")


def _shape_of(found: Spec | None) -> str:
    return "missing" if found is None else "x".join(map(str, found[0])) or "a scalar"
