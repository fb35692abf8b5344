"""Let `load_state_dict` take what one process has written: full tensors, cut to this worker's shards.

Needed because torch copies a full tensor into a shard only if both are sharded alike. Before a model is sharded
nothing is in the way.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fsdplaunch.runtime import rank0_service
from fsdplaunch.runtime.auto.context import HookContext
from fsdplaunch.runtime.auto.model.calls import original_name
from fsdplaunch.runtime.inspection.parameter_names import clean_name
from fsdplaunch.runtime.inspection.units import reshard
from fsdplaunch.runtime.patch import replaced
from fsdplaunch.runtime.state_dict.split_like import cut_to_shard


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
    service = rank0_service.current()
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
