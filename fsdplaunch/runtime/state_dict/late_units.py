"""Give FSDP1's full state before its values are here: its units are gathered one by one, when they are written.

Needed because torch gathers unit by unit and keeps a copy of each on rank 0, which would be all of the model.
"""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from fsdplaunch.runtime.auto.state.late_storages import SMALLEST
from fsdplaunch.runtime.auto.state.late_tensors import LateTensors
from fsdplaunch.runtime.inspection.parameter_names import clean_name, joined
from fsdplaunch.runtime.torch_internals.fsdp.fsdp1 import FlatParameter, flat_parameter

Hook = Callable[[nn.Module, dict[str, Any], str, Any], None]


@contextmanager
def late_units(model: nn.Module, late: LateTensors, *, keep: bool) -> Iterator[None]:
    """Have `model.state_dict()` exchange what each unit has gathered for tensors that are gathered again later.

    Collective; the hooks run after FSDP1's own.

    Args:
        model: Sharded by FSDP1.
        late: The tensors of the save that is going on.
        keep: Whether this rank writes.
    """
    last = _LastUnit(keep=keep)
    with ExitStack() as stack:
        for unit in FullyShardedDataParallel.fsdp_modules(model):
            flat = flat_parameter(unit)
            if flat is not None:
                stack.callback(unit.register_state_dict_post_hook(_exchange(unit, flat, late, last)).remove)
        yield


def _exchange(unit: Any, flat: FlatParameter, late: LateTensors, last: "_LastUnit") -> Hook:
    def exchange(_module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
        keys = {clean_name(key): key for key in state if key.startswith(prefix)}
        made: dict[tuple[int, str], Any] = {}
        for number, (info, name, shape) in enumerate(zip(flat.infos, flat.names, flat.shapes, strict=True)):
            if shape.numel() * flat.shard.element_size() < SMALLEST:
                continue

            def fill(number: int = number) -> torch.Tensor:
                return last.values(unit, flat, number)

            if last.keep:
                tensor = late.tensor(shape, flat.shard.dtype, fill)
                state[keys[clean_name(prefix + name)]] = made[id(info.module), info.param_name] = tensor
            else:
                late.take_part(fill)
        for shared in flat.shared:  # tied parameters stay tied
            key = keys.get(clean_name(prefix + joined(shared.module_name, shared.param_name)))
            first: Any = made.get((id(shared.prim_module), shared.prim_param_name))
            if key is not None and first is not None:
                state[key] = first.detach()
        _give_back_memory()

    return exchange


class _LastUnit:
    """The parameters of the unit that was gathered last: those of one unit are written one after the other.

    Attributes:
        keep: Whether this rank writes; the others gather with it and keep nothing.
    """

    def __init__(self, *, keep: bool) -> None:
        self.keep = keep
        self._unit: Any = None
        self._full: list[torch.Tensor] = []

    def values(self, unit: Any, flat: FlatParameter, number: int) -> torch.Tensor:
        """Return one full parameter of a unit in host memory. Collective, in the same order on all ranks."""
        if self._unit is not unit:
            self._unit, self._full = unit, []
            _give_back_memory()
            with FullyShardedDataParallel.summon_full_params(
                unit, recurse=False, writeback=False, rank0_only=True
            ):
                if self.keep:
                    self._full = [_on_host(getattr(info.module, info.param_name)) for info in flat.infos]
        return self._full[number] if self.keep else torch.empty(0)


def _on_host(param: torch.Tensor) -> torch.Tensor:
    return param.detach().to("cpu", copy=True).contiguous()


def _give_back_memory() -> None:
    """Return to the system what was freed: glibc keeps it, and often does not use it for the next unit."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
