"""Let FSDP2's units compute with the parameters that their modules have, without gathering; all versions."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from fsdplaunch.runtime.torch_internals.tensors import tree_map


def suspend_unit(unit: Any) -> Callable[[], None]:
    """Let a unit's hooks gather nothing and give nothing back, until what is returned is called.

    As in a backward, in which torch's hooks of a forward that is made again leave parameters as they are.
    2.7 to 2.12: a state has one group or None; from 2.13 on a list, which it gathers in a backward as well.
    """
    state = unit._get_fsdp_state()
    name = "_fsdp_param_groups" if hasattr(state, "_fsdp_param_groups") else "_fsdp_param_group"
    groups, before = getattr(state, name), state._training_state
    setattr(state, name, [] if isinstance(groups, list) else None)
    state._training_state = type(before).PRE_BACKWARD

    def resume() -> None:
        setattr(state, name, groups)
        state._training_state = before

    return resume


def cast_inputs(unit: nn.Module, given: Any) -> Any:
    """Return what a unit's forward is given, in the dtype that its mixed precision has it in; all versions."""
    policy = unit._get_fsdp_state()._mp_policy  # type: ignore[operator]
    return _cast(policy.param_dtype if policy.cast_forward_inputs else None, given)


def cast_output(unit: nn.Module, output: Any) -> Any:
    """Return what a unit returns, in the dtype that its mixed precision has it in; all versions."""
    return _cast(unit._get_fsdp_state()._mp_policy.output_dtype, output)  # type: ignore[operator]


def _cast(dtype: torch.dtype | None, value: Any) -> Any:
    return value if dtype is None else tree_map(partial(_as, dtype), value)


def _as(dtype: torch.dtype, value: Any) -> Any:
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
