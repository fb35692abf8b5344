"""What ranks have shards of, under names that all of them know, and how one is read beside the main thread."""

import json
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fsdplaunch.runtime.auto.context import HookContext
from fsdplaunch.runtime.inspection.parameter_names import clean_name, joined, named_parameters
from fsdplaunch.runtime.inspection.units import is_unit
from fsdplaunch.runtime.torch_internals.dtensor import local_tensor
from fsdplaunch.runtime.torch_internals.fsdp.gathered_parameters import shards_by_place
from fsdplaunch.runtime.torch_internals.modules import own_parameters
from fsdplaunch.runtime.torch_internals.tensors import storage_identity

ShardName = str
"""JSON: the model's number and the parameter's name, or the optimizer's, the parameter's index and the key."""

_SETTLING_SECONDS = 2.0


def sharded_parameters(model: Any) -> Iterator[tuple[str, DTensor]]:
    """Yield a model's sharded parameters with their names, gathered now or not."""
    shards: dict[tuple[int, str], Any] = {}
    for unit in filter(is_unit, model.modules()):
        shards |= shards_by_place(unit)
    for path, module in model.named_modules():
        for attribute, param in list(own_parameters(module)):
            shard = shards.get((id(module), attribute), param)
            if isinstance(shard, DTensor):
                yield clean_name(joined(path, attribute)), shard


def named_shards(hook_context: HookContext) -> Iterator[tuple[ShardName, DTensor]]:
    """Yield every sharded parameter, of models and of optimizers, and every sharded tensor of their state.

    Optimizers may train shards that no model has: copies of the weights in higher precision.
    """
    for model, number in list(hook_context.numbers.items()):
        for name, param in sharded_parameters(model):
            yield json.dumps(["model", number, name]), param
    for number, optimizer in hook_context.numbered_optimizers():
        params = [param for group in optimizer.param_groups for param in group["params"]]
        for index, param in enumerate(params):
            if isinstance(param, DTensor):
                yield json.dumps(["trained", number, index]), param
            for key, value in list(optimizer.state.get(param, {}).items()):
                if isinstance(value, DTensor):
                    yield json.dumps(["state", number, index, key]), value


def gradient_name(tensor: DTensor, hook_context: HookContext) -> str | None:
    """Return the name of the parameter of which a tensor is the gradient."""
    for model in list(hook_context.numbers):
        for name, param in named_parameters(model):
            if isinstance(param.grad, DTensor) and identity(param.grad) == identity(tensor):
                return name
    return None


def identity(tensor: Any) -> tuple[Any, ...]:
    """Return what two tensors share if they are the same shard; a transposed one of a square is another."""
    local = local_tensor(tensor)
    return storage_identity(local), local.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def shard_ranks(tensor: DTensor, rank: int) -> list[int]:
    """Return the ranks whose shards together are the full tensor, of the replica that `rank` is in."""
    mesh = tensor.device_mesh.mesh
    mine = (mesh == rank).nonzero()
    if not len(mine):
        return []
    for axis, placement in reversed(list(enumerate(tensor.placements))):
        if placement.is_replicate():
            mesh = mesh.select(axis, int(mine[0][axis]))
    return [int(each) for each in mesh.reshape(-1)]


def part_of(full: torch.Tensor, shape: Any, offset: Any) -> torch.Tensor:
    """Return the part of a full tensor that is one rank's shard."""
    for axis, (length, start) in enumerate(zip(shape, offset, strict=True)):
        full = full.narrow(axis, start if length else 0, length)
    return full


def on_host(tensor: Any, after: torch.cuda.Event | None, *, beside: bool) -> torch.Tensor:
    """Return a shard in host memory, contiguous.

    On a GPU the copy must not wait for what the main thread has in its stream: that may be a collective which
    waits for rank 0, which waits for this copy. Nothing behind such a collective has run, so the shard has the
    values of rank 0's step whatever the host has queued since.

    Args:
        tensor: The sharded tensor.
        after: When the shard has its values; None where the host has not gone on.
        beside: Whether this is another thread than the main one, whose stream may be held up.
    """
    local = local_tensor(tensor).detach()
    if not local.is_cuda:
        return local.contiguous()
    if not beside:
        return local.contiguous().cpu()
    with torch.cuda.device(local.device):
        if after is None:
            _await_stream(local.device)
        else:
            after.synchronize()
        with torch.cuda.stream(torch.cuda.Stream(local.device)):
            return local.contiguous().cpu()


def _await_stream(device: torch.device) -> None:
    """Wait until a device has done what is queued, or for a while: then a collective in it waits for rank 0."""
    queued, deadline = torch.cuda.Event(), time.monotonic() + _SETTLING_SECONDS
    queued.record(torch.cuda.default_stream(device))
    while not queued.query() and time.monotonic() < deadline:
        time.sleep(0.005)
