"""Torch's options for each kind of state dict."""

from typing import Any

import torch
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)

from fsdplaunch.runtime.compat.fsdp1 import take_out_offload_to_cpu

_CLASSES: dict[StateDictType, tuple[Any, Any]] = {
    StateDictType.FULL_STATE_DICT: (FullStateDictConfig, FullOptimStateDictConfig),
    StateDictType.SHARDED_STATE_DICT: (ShardedStateDictConfig, ShardedOptimStateDictConfig),
    StateDictType.LOCAL_STATE_DICT: (LocalStateDictConfig, LocalOptimStateDictConfig),
}
"""Torch's classes of options: the model's, the optimizer's."""


def state_config(kind: StateDictType, present: Any = None) -> Any:
    """Return options for the model's state dict; those present if they are of the right class."""
    return _config(kind, _CLASSES[kind][0], present)


def optimizer_config(kind: StateDictType, present: Any = None) -> Any:
    """Return options for the optimizer's state dict; those present if they are of the right class."""
    return _config(kind, _CLASSES[kind][1], present)


def _config(kind: StateDictType, wanted: Any, present: Any) -> Any:
    if isinstance(present, wanted):
        return present
    if not torch.cuda.is_available():
        take_out_offload_to_cpu()
    if kind is StateDictType.FULL_STATE_DICT:
        return wanted(offload_to_cpu=True, rank0_only=True)
    return wanted(offload_to_cpu=True) if kind is StateDictType.SHARDED_STATE_DICT else wanted()
