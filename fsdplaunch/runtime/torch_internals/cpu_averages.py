"""Averages over ranks on the CPU, which FSDP2 and DTensor of torch 2.7 and 2.8 get wrong."""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING, Any

import torch

from fsdplaunch.probe.torch_version import parse

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@functools.cache
def mend_averages_on_cpu() -> None:
    """Let FSDP2 and DTensor of torch 2.7 and 2.8 compute on the CPU what they do on a GPU; others are left alone.

    2.7 and 2.8: gloo takes the average for a sum in reduce_scatter, without a word; 2.7 refuses it in all_reduce.
    """
    version = parse(torch.__version__)
    if version == (2, 7):
        _let_replicas_reduce()
    if version in ((2, 7), (2, 8)):
        _divide_gradients_before()
        _average_by_sums("_reduce_value")
        _average_by_sums("_reduce_shard_value")


def _divide_gradients_before() -> None:
    """Let FSDP2 divide gradients itself on the CPU, as it does where a sum of fp16 could overflow."""
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives

    factors: Any = _fsdp_collectives._get_gradient_divide_factors

    def divide(
        scatter_group: Any, reduce_group: Any, dtype: torch.dtype, device_type: str = "", *more: Any
    ) -> Any:
        dtype = torch.float16 if device_type == "cpu" else dtype
        return factors(scatter_group, reduce_group, dtype, device_type, *more)

    setattr(_fsdp_collectives, "_get_gradient_divide_factors", divide)  # noqa: B010


def _let_replicas_reduce() -> None:
    """Satisfy FSDP2's check that replicas were reduced, which looks for an event that a CPU has not."""
    module: Any = importlib.import_module("torch.distributed.fsdp._fully_shard._fsdp_param_group")
    reduce: Any = module.foreach_reduce

    def reduce_with_event(*args: Any, **kwargs: Any) -> Any:
        *before, reduced, event, partial = reduce(*args, **kwargs)
        return (*before, reduced, object() if reduced is not None and event is None else event, partial)

    module.foreach_reduce = reduce_with_event


def _average_by_sums(method: str) -> None:
    """Let a placement whose parts are to be averaged add up and divide on the CPU."""
    from torch.distributed.tensor import Partial

    reduce: Any = getattr(Partial, method)

    def average(self: Partial, tensor: torch.Tensor, mesh: DeviceMesh, axis: int, *rest: Any) -> Any:
        if self.reduce_op != "avg" or tensor.device.type != "cpu":
            return reduce(self, tensor, mesh, axis, *rest)
        return reduce(Partial("sum"), tensor, mesh, axis, *rest) / mesh.size(axis)

    setattr(Partial, method, average)
