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
from fsdplaunch.runtime.inspection.parameters import ModelTensor, Spec, Specs, model_tensors
from fsdplaunch.runtime.sharding.ignored import is_special
from fsdplaunch.runtime.sharding.mesh import groups_from_first

_MARK = 0xA5


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
        self.model = model
        self.device = device
        self.master = master
        self.frozen_too = frozen_too
        self.init_fn = init_fn or _own_init(model)
        self.ranks = RankGroup(groups_from_first(mesh), device)
        self.entries = model_tensors(model)
        self.held: dict[nn.Module, list[ModelTensor]] = {}
        for entry in self.entries:
            for module, _ in entry.places:
                self.held.setdefault(module, []).append(entry)
        self.ignored = {below for module in ignored for below in module.modules()}
        self.origin = origin
        self.split = split
        self.sources = self._agree()
        self.send = send or self._someone_lacks()

    def _agree(self) -> Specs:
        """Return rank 0's names, shapes, dtypes and whether each has storage; raise for another model than its."""
        mine = {entry.name: entry.spec for entry in self.entries}
        theirs: Specs
        theirs, origin = self.ranks.from_first((mine, self.origin))
        difference = self.ranks.from_any(_difference(mine, theirs))
        other = f"the model gets {origin} on rank 0 and {self.origin} on rank {dist.get_rank()}"
        difference = difference or self.ranks.from_any(None if origin == self.origin else other)
        if difference is not None:
            raise ShardingError(difference, hint="build the same model, and load the same weights, on every rank")
        return theirs

    def _someone_lacks(self) -> bool:
        """Return whether a rank has no storage for a tensor that rank 0 has values of: those must be sent."""
        lacking = [e.name for e in self.entries if self.sources[e.name][2] and not e.spec[2]]
        return self.ranks.from_any(lacking[0] if lacking else None) is not None

    def materialize(self, module: nn.Module) -> None:
        """Materialize every tensor that `module` or a module below it holds and that is not materialized yet."""
        inside = (entry for m in module.modules() for entry in self.held.get(m, ()) if not entry.materialized)
        self.materialize_entries(list({id(entry): entry for entry in inside}.values()))

    def materialize_scalars(self) -> None:
        """Materialize parameters without dimensions, before those that are not sharded are looked up."""
        scalars = (e for e in self.entries if not e.spec[0] and isinstance(e.tensor, nn.Parameter))
        self.materialize_entries([entry for entry in scalars if not entry.materialized])

    def materialize_entries(self, due: list[ModelTensor]) -> None:
        """Materialize tensors that are not materialized yet."""
        if self.device.type != "meta":  # there the layout alone is wanted, and nothing has values
            self._fill(due)
        for entry in due:
            self._to_master(entry)
            if self.split is not None:
                self.split(entry)
            entry.materialized = True

    def _fill(self, due: list[ModelTensor]) -> None:
        empty = [entry for entry in due if not self.sources[entry.name][2]]
        for entry in due:
            self._give_storage(entry)
        self._initialize(empty)
        if self.send:
            self.ranks.send(*(entry.tensor.data for entry in due if not entry.tensor.is_meta))

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
        if tensor.device == self.device or type(tensor) not in (nn.Parameter, torch.Tensor):
            tensor.data = tensor.data.to(self.device, dtype).contiguous()
            return
        if tensor.is_meta:
            new = torch.empty(shape, dtype=dtype, device=self.device)
        else:
            new = tensor.data.to(self.device, dtype).contiguous()
        entry.exchange(new)

    def _initialize(self, empty: list[ModelTensor]) -> None:
        for entry in empty:
            _mark(entry.tensor)
        for module in dict.fromkeys(module for entry in empty for module, _ in entry.places):
            init = self._init_of(module)
            if init is not None:
                with torch.no_grad():
                    init(module)
        for entry in empty:
            if _is_marked(entry.tensor) or not any(self._init_of(module) for module, _ in entry.places):
                self.leave_empty(entry)

    def _init_of(self, module: nn.Module) -> Callable[[nn.Module], Any] | None:
        return self.init_fn or getattr(type(module), "reset_parameters", None)

    def leave_empty(self, entry: ModelTensor) -> None:
        """Raise for a tensor that nothing has given values."""
        holder, attribute = entry.places[0]
        where = f"{entry.name} has no values on any rank, and "
        if self._init_of(holder) is None:
            msg = f"{where}{type(holder).__name__} cannot make them"
            hint = "give the module a reset_parameters method"
        else:
            msg = f"{where}initializing {type(holder).__name__} makes none"
            hint = _initializing_hint(holder, attribute)
        raise ShardingError(msg, hint=f"{hint}, or pass param_init_fn to the plugin")

    def _to_master(self, entry: ModelTensor) -> None:
        tensor = entry.tensor
        ours = any(module in self.ignored for module, _ in entry.places)  # left as they are
        due = isinstance(tensor, nn.Parameter) and (tensor.requires_grad or self.frozen_too)
        if self.master is not None and due and not ours and tensor.is_floating_point() and not is_special(tensor):
            tensor.data = tensor.data.to(self.master)


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of a contiguous tensor's storage that every backend can send, whatever the dtype is."""
    return tensor.view(-1).view(torch.uint8)


def _mark(tensor: torch.Tensor) -> None:
    """Fill a tensor with bytes that no initialization leaves behind, so that one that writes nothing is seen."""
    if type(tensor) in (nn.Parameter, torch.Tensor):
        _as_bytes(tensor.data).fill_(_MARK)


def _is_marked(tensor: torch.Tensor) -> bool:
    if type(tensor) not in (nn.Parameter, torch.Tensor) or not tensor.numel() or not tensor.is_contiguous():
        return False
    raw = _as_bytes(tensor.data)
    return bool((raw[:64] == _MARK).all()) and bool((raw == _MARK).all())


def _difference(mine: Specs, theirs: Specs) -> str | None:
    for name in [*theirs, *mine]:
        here, there = mine.get(name), theirs.get(name)
        if here is None or there is None or here[0] != there[0]:
            return f"{name} is {_shape_of(there)} on rank 0 and {_shape_of(here)} on rank {dist.get_rank()}"
    return None


def _initializing_hint(holder: nn.Module, attribute: str) -> str:
    """Return what to do so that initializing a module makes one of its tensors."""
    if type(holder).__module__.startswith("transformers."):
        return f"install transformers 5 or newer, which makes {attribute} again"
    return f"set {attribute} in its reset_parameters method"


def _own_init(model: nn.Module) -> Callable[[nn.Module], Any] | None:
    """Return a model's `_init_weights(module)`, as transformers has it; None without one of this form."""
    init = getattr(model, "_init_weights", None)
    if init is None or len(inspect.signature(init).parameters) != 1:
        return None
    return init  # type: ignore[no-any-return]


def _shape_of(found: Spec | None) -> str:
    return "missing" if found is None else "x".join(map(str, found[0])) or "a scalar"
