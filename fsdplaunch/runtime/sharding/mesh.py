"""How the ranks are laid out: one row of shards, or several rows that are replicas of each other.

Where ranks split layers, too, each place of these rows is a group of ranks that compute on the same data. And the
device on which this worker computes.
"""

import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from fsdplaunch.config.resolve import REST, AxisSizes, split_world
from fsdplaunch.errors import ShardingError
from fsdplaunch.runtime.rank import DataRanks, rank_variable
from fsdplaunch.runtime.sharding.settings import HYBRID, Settings

REPLICATE, SHARD, CONTEXT, TENSOR = "dp_replicate", "dp_shard", "cp", "tp"
"""Names of the mesh's axes."""


def _axis_sizes(settings: Settings) -> AxisSizes:
    """Return the sizes of the axes.

    Explicit sizes win, -1 takes what the other leaves. Without sizes the hybrid strategies shard inside each
    node, NO_SHARD replicates everything, and the others shard over all ranks.
    """
    world = dist.get_world_size()
    per_node = int(rank_variable("LOCAL_WORLD_SIZE") or world)
    tensor, context = settings.tensor_size, settings.context_size
    alike = max(tensor, 1) * max(context, 1)
    replicate, shard = settings.replicate_size, settings.shard_size or REST
    if settings.strategy == "NO_SHARD":
        replicate, shard = REST, 1
    if settings.strategy in HYBRID and replicate == 1 and shard in (REST, world // alike):
        replicate, shard = world // max(per_node, 1), max(per_node // alike, 1)
    sizes = split_world(world, AxisSizes(replicas=replicate, shards=shard, context=context, tensor=tensor))
    if sizes.world != world or min(sizes) < 1:
        layers = f" x {sizes.context} that split sequences" if context != 1 else ""
        layers += f" x {sizes.tensor} that split layers" if tensor != 1 else ""
        msg = (
            f"a mesh of {sizes.replicas} replicas x {sizes.shards} shards{layers} needs {sizes.world} workers, "
            f"there are {world}"
        )
        raise ShardingError(msg, hint="set one of dp_replicate_size and dp_shard_size to -1 to take the rest")
    # One replica is fine: it is sharded over all ranks, as torch does it on one node.
    if settings.strategy in HYBRID and sizes.replicas > 1 and sizes.shards == 1:
        msg = f"{settings.strategy} over {sizes.replicas} x 1 workers has only one rank per replica"
        hint = "set fsdp_sharding_strategy to NO_SHARD, or both mesh sizes in parallelism_config"
        raise ShardingError(msg, hint=hint)  # FSDP1 would not reduce over replicas, in silence
    return sizes


def data_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the axes that `fully_shard` spreads parameters over; ranks along them read different data."""
    names = mesh.mesh_dim_names or ()
    if TENSOR not in names:
        return mesh
    kept = tuple(name for name in names if name != TENSOR)
    return mesh[kept if len(kept) > 1 else kept[0]]


def tensor_mesh(mesh: DeviceMesh) -> DeviceMesh | None:
    """Return the axis of the ranks that split layers and read the same data; None where there is none."""
    return mesh[TENSOR] if TENSOR in (mesh.mesh_dim_names or ()) else None


def splits_layer(param: Any) -> bool:
    """Return whether ranks that compute on the same data have parts of a parameter each."""
    names = param.device_mesh.mesh_dim_names or () if isinstance(param, DTensor) else ()
    return TENSOR in names and not param.placements[names.index(TENSOR)].is_replicate()


def split_groups(tensor: Any) -> list[dist.ProcessGroup]:
    """Return the groups of ranks that a tensor is split over, one for each axis of its mesh."""
    if not isinstance(tensor, DTensor):
        return []
    split = [dim for dim, placement in enumerate(tensor.placements) if not placement.is_replicate()]
    return [tensor.device_mesh.get_group(dim) for dim in split]


def data_ranks(mesh: DeviceMesh, context: DeviceMesh | None = None) -> DataRanks:
    """Return this rank's number among the readers of data: every rank of the mesh, row by row.

    Those that split layers or sequences together read the same.
    """
    mesh = data_mesh(mesh)
    place = mesh.get_coordinate() or [0]
    number = 0
    for size, coordinate in zip(mesh.shape, place, strict=False):
        number = number * size + coordinate
    alike = 1 if context is None else context.size()
    return DataRanks(rank=number // alike, size=mesh.size() // alike)


def is_fake(mesh: DeviceMesh) -> bool:
    """Return whether the ranks are those of torch's fake backend: nothing they send means anything."""
    return dist.get_backend(mesh.get_group(0)) == "fake"


def groups_from_first(mesh: DeviceMesh) -> list[dist.ProcessGroup | None]:
    """Return groups that, broadcast over one after the other, bring the mesh's first rank's tensor to all.

    None among fake ranks: this one knows all there is to know.
    """
    if is_fake(mesh):
        return []
    if mesh.size() == dist.get_world_size():
        return [None]
    return [mesh.get_group(axis) for axis in reversed(range(mesh.ndim))]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardTarget:
    """Where a model goes: this worker's device, and the layout of all ranks."""

    mesh: DeviceMesh
    device: torch.device
    layout_only: bool = False  # nothing gets storage or values: the model is to be looked at, not run
    context: DeviceMesh | None = None  # the ranks that split each sequence, this one among them


def shard_target(
    settings: Settings,
    *,
    mesh: DeviceMesh | None,
    process_group: dist.ProcessGroup | None,
    device: torch.device | str | None,
) -> ShardTarget:
    """Decide device and mesh, joining the process group first if the script was started by torchrun alone."""
    if not dist.is_initialized():
        if "RANK" not in os.environ:
            msg = "there are no workers to shard over: this process was started alone"
            raise ShardingError(msg, hint="start the script with `fsdplaunch launch`")
        from fsdplaunch.config.environment import decode
        from fsdplaunch.runtime.device import choose_device, join_group

        config = decode()
        join_group(config, choose_device(config))
    layout_only = device is not None and torch.device(device).type == "meta"
    target = own_device(mesh) if device is None or layout_only else torch.device(device)
    if mesh is None and process_group is not None:
        mesh = DeviceMesh.from_group(process_group, target.type, mesh_dim_names=(SHARD,))
    context = None
    if mesh is None:
        sizes = _axis_sizes(settings)
        if sizes.context > 1:
            shape = (sizes.replicas * sizes.shards, sizes.context, sizes.tensor)
            context = init_device_mesh(target.type, shape, mesh_dim_names=("dp", CONTEXT, TENSOR))[CONTEXT]
        # Ranks that split sequences are neighbors on the axis of the shards: parameters are spread over them, too.
        axes = {REPLICATE: sizes.replicas, SHARD: sizes.shards * sizes.context, TENSOR: sizes.tensor}
        kept = {name: size for name, size in axes.items() if size > 1 or name == SHARD}
        mesh = init_device_mesh(target.type, tuple(kept.values()), mesh_dim_names=tuple(kept))
    return ShardTarget(mesh=mesh, device=target, layout_only=layout_only, context=context)


def own_device(mesh: DeviceMesh | None) -> torch.device:
    """Return the device of this worker that fits a mesh, or the process group where there is none."""
    has_cuda = torch.cuda.is_available() and "nccl" in str(dist.get_backend_config())
    on_cpu = not has_cuda if mesh is None else mesh.device_type == "cpu"
    return torch.device("cpu") if on_cpu else torch.device("cuda", torch.cuda.current_device())
