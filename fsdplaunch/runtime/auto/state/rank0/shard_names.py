"""Names of the tensors that ranks have shards of: parameters by model, state by optimizer."""

import json
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from fsdplaunch.runtime.auto.context import HookContext
from fsdplaunch.runtime.inspection.parameter_names import named_parameters
from fsdplaunch.runtime.torch_internals.dtensor import local_tensor
from fsdplaunch.runtime.torch_internals.fsdp2 import copies_uneven_shards
from fsdplaunch.runtime.torch_internals.tensors import change_count, storage_identity

ShardName = str
"""JSON of where a shard is, the same on every rank."""


def named_shards(hook_context: HookContext) -> Iterator[tuple[ShardName, DTensor]]:
    """Yield every sharded parameter and every sharded tensor of an optimizer's state."""
    for model, number in list(hook_context.numbers.items()):
        for name, param in named_parameters(model):
            if isinstance(param, DTensor):
                yield json.dumps(["model", number, name]), param
    for number, optimizer in hook_context.numbered_optimizers():
        params = [param for group in optimizer.param_groups for param in group["params"]]
        for index, param in enumerate(params):
            for key, value in optimizer.state.get(param, {}).items():
                if isinstance(value, DTensor):
                    yield json.dumps(["state", number, index, key]), value


def readable(name: ShardName) -> str:
    """Return a name as people say it."""
    kind, number, *rest = json.loads(name)
    if kind == "copy":
        return f"a copy of {readable(number)}"
    if kind == "model":
        return str(rest[0])
    return f"{rest[1]} of parameter {rest[0]} of optimizer {number}"


def identity(tensor: Any) -> tuple[Any, ...]:
    """Return what two tensors share if they are the same shard."""
    local = local_tensor(tensor)
    return storage_identity(local), local.storage_offset(), tuple(tensor.shape), tensor.dtype


def changes(tensor: Any) -> int:
    """Return how often a shard was changed in place: equal on all ranks that did the same with it."""
    return _counted(tensor) - _begun.get(identity(tensor), 0)


def count_changes_from_now(tensor: Any) -> None:
    """Forget how often a shard was changed until now, by what ranks do differently while a model is divided."""
    _begun[identity(tensor)] = _counted(tensor)


_begun: dict[tuple[Any, ...], int] = {}
"""Changes that count no more, by what is changed: models, which stay until the script ends."""


def _counted(tensor: Any) -> int:
    count = change_count(tensor)  # torch counts where the operation is given it
    if copies_uneven_shards() and _is_uneven(tensor):
        return count
    return count + change_count(local_tensor(tensor))


def _is_uneven(tensor: DTensor) -> bool:
    """Return whether ranks have shards of different sizes; the same on all of them."""
    mesh = tensor.device_mesh
    numbers: dict[int, int] = {}
    for axis, placement in enumerate(tensor.placements):
        dim: int | None = getattr(placement, "dim", None)  # a shard's, strided or not
        if dim is not None:
            numbers[dim] = numbers.get(dim, 1) * mesh.size(axis)
    return any(tensor.shape[dim] % number for dim, number in numbers.items())


def is_copy(name: ShardName) -> bool:
    """Return whether a name is that of a copy."""
    return bool(json.loads(name)[0] == "copy")


def counted_changes(name: ShardName, tensor: Any) -> int:
    """Return `changes`; 0 for a copy, whose name tells of them."""
    return 0 if is_copy(name) else changes(tensor)


def is_over_all_ranks(tensor: DTensor) -> bool:
    """Return whether every rank of the run has a part of a tensor, or a replica of one."""
    return tensor.device_mesh.size() == dist.get_world_size()


def shard_ranks(tensor: DTensor, rank: int) -> list[int]:
    """Return the ranks whose shards together are the full tensor, `rank` among them: one of the replicas."""
    mesh = tensor.device_mesh.mesh
    mine = (mesh == rank).nonzero()
    if not len(mine):
        return []
    for axis, placement in reversed(list(enumerate(tensor.placements))):
        if placement.is_replicate():
            mesh = mesh.select(axis, int(mine[0][axis]))
    return [int(each) for each in mesh.reshape(-1)]


def on_host(tensor: Any, event: torch.cuda.Event | None) -> torch.Tensor:
    """Return a shard in host memory, contiguous; on a GPU copied beside what the main thread has in its streams.

    Args:
        tensor: The sharded tensor.
        event: After which the shard has its values; None after all that this thread has in its stream.
    """
    local = local_tensor(tensor).detach()
    if not local.is_cuda:
        return local.contiguous()
    stream = torch.cuda.Stream(local.device)
    if event is None:
        stream.wait_stream(torch.cuda.current_stream(local.device))
    with torch.cuda.stream(stream):
        if event is not None:
            stream.wait_event(event)
        host = torch.empty(local.shape, dtype=local.dtype, pin_memory=True)
        host.copy_(local, non_blocking=True)
    stream.synchronize()
    return host
