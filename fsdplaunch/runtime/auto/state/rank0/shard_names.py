"""Names of the tensors that ranks have shards of: parameters by model, state by optimizer."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from fsdplaunch.runtime.auto.context import HookContext
from fsdplaunch.runtime.auto.state.rank0.flat_shards import FlatShard
from fsdplaunch.runtime.inspection.parameter_names import named_parameters
from fsdplaunch.runtime.torch_internals.dtensor import local_tensor, shape_and_offset
from fsdplaunch.runtime.torch_internals.fsdp.fsdp2 import copies_uneven_shards
from fsdplaunch.runtime.torch_internals.tensors import change_count, storage_identity

ShardName = str
"""JSON of where a shard is, the same on every rank."""


def named_shards(hook_context: HookContext) -> Iterator[tuple[ShardName, DTensor]]:
    """Yield every sharded parameter, of models and of optimizers, and every sharded tensor of their state.

    Optimizers may train shards that no model has: copies of the weights in higher precision.
    """
    of_models = set()
    for model, number in list(hook_context.numbers.items()):
        for name, param in named_parameters(model):
            if isinstance(param, DTensor):
                of_models.add(id(param))
                yield json.dumps(["model", number, name]), param
    for number, optimizer in hook_context.numbered_optimizers():
        params = [param for group in optimizer.param_groups for param in group["params"]]
        for index, param in enumerate(params):
            if isinstance(param, DTensor) and id(param) not in of_models:
                yield json.dumps(["trained", number, index]), param
            for key, value in optimizer.state.get(param, {}).items():
                if isinstance(value, DTensor):
                    yield json.dumps(["state", number, index, key]), value


def parameter_with_gradient(tensor: DTensor, hook_context: HookContext) -> str | None:
    """Return the name of the parameter of which a tensor is the gradient."""
    params = (each for model in list(hook_context.numbers) for each in named_parameters(model))
    gradients = ((name, param.grad) for name, param in params if isinstance(param.grad, DTensor))
    return next((name for name, gradient in gradients if identity(gradient) == identity(tensor)), None)


_OF_SCRIPTS = {"made": "a tensor made like a parameter", "computed": "a tensor computed from shards"}


def numbered(name: ShardName, number: int, count: int) -> ShardName:
    """Return a name for one of several tensors that were made alike, with how many of them there are."""
    return json.dumps([*json.loads(name), number, count])


def readable(name: ShardName) -> str:
    """Return a name as people say it."""
    kind, number, *rest = json.loads(name)
    if kind == "copy":
        return f"a copy of {readable(number)}"
    if kind in _OF_SCRIPTS:
        return _OF_SCRIPTS[kind]
    if kind == "model":
        return str(rest[0])
    if kind == "flat":
        return f"parameter {rest[1]} of unit {rest[0]}"
    if kind == "flat state":
        return f"{rest[0]} of parameter {rest[3]} of unit {rest[2]}"
    state = "" if kind == "trained" else f"{rest[1]} of "
    return f"{state}parameter {rest[0]} of optimizer {number}"


def identity(tensor: Any) -> tuple[Any, ...]:
    """Return what two tensors share if they are the same shard; a transposed one of a square is another."""
    local = local_tensor(tensor)
    return storage_identity(local), local.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def changes(tensor: Any) -> int:
    """Return how often a shard was changed in place: equal on all ranks that did the same with it."""
    return _counted(tensor) - _begun.get(identity(tensor), 0)


def count_changes_from_now(tensor: Any) -> None:
    """Forget how often a shard was changed until now, by what ranks do differently while a model is divided."""
    _begun[identity(tensor)] = _counted(tensor)


@contextmanager
def counting_one_change(tensor: Any) -> Iterator[None]:
    """Count what gives a shard other memory as one change, on all ranks: FSDP2 copies a smaller one, to pad it."""
    earlier = changes(tensor)
    _begun.pop(identity(tensor), None)
    yield
    _begun[identity(tensor)] = _counted(tensor) - earlier - 1
    moves.append(moves.pop() + 1)


moves = [0]
"""How often a shard was given other memory: its `identity` is another one then."""
_begun: dict[tuple[Any, ...], int] = {}
"""Changes that do not count, by what is changed: models, which stay until the script ends. Below 0 some do."""


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
    """Return whether a name is that of a copy, or of what was made or computed: it tells of changes itself."""
    return json.loads(name)[0] in ("copy", "made", "computed")


def is_flat(name: ShardName) -> bool:
    """Return whether a name is that of something in a flat parameter of FSDP1."""
    return str(json.loads(name)[0]).startswith("flat")


def counted_changes(name: ShardName, tensor: Any) -> int | None:
    """Return `changes`; 0 for a copy, whose name tells of them, None where this rank has nothing to count."""
    if isinstance(tensor, FlatShard):
        return tensor.changed
    return 0 if is_copy(name) else changes(tensor)


def is_over_all_ranks(tensor: DTensor) -> bool:
    """Return whether every rank of the run has a part of a tensor, or a replica of one."""
    return tensor.device_mesh.size() == dist.get_world_size()


def shard_ranks(tensor: DTensor | FlatShard, rank: int) -> list[int]:
    """Return the ranks whose shards together are the full tensor, of the replica that `rank` is in."""
    if isinstance(tensor, FlatShard):
        return list(tensor.ranks)
    mesh = tensor.device_mesh.mesh
    mine = (mesh == rank).nonzero()
    if not len(mine):
        return []
    for axis, placement in reversed(list(enumerate(tensor.placements))):
        if placement.is_replicate():
            mesh = mesh.select(axis, int(mine[0][axis]))
    return [int(each) for each in mesh.reshape(-1)]


def extent(tensor: DTensor | FlatShard) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shape of this rank's shard and where it begins: in the full tensor, or among its elements."""
    if isinstance(tensor, FlatShard):
        return (tensor.local.numel(),), (tensor.start,)
    return shape_and_offset(tensor)


def empty_full(tensor: DTensor | FlatShard) -> torch.Tensor:
    """Return memory for the full tensor, or for its elements one after the other, as `extent` counts them."""
    flat = isinstance(tensor, FlatShard)
    return torch.empty(tensor.shape.numel() if flat else tensor.shape, dtype=tensor.dtype)


def on_host(tensor: Any, event: torch.cuda.Event | None) -> torch.Tensor:
    """Return a shard in host memory, contiguous; on a GPU copied beside what the main thread has in its streams.

    Args:
        tensor: The sharded tensor.
        event: After which the shard has its values; None after all that this thread has in its stream.
    """
    local = (tensor.local if isinstance(tensor, FlatShard) else local_tensor(tensor)).detach()
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
