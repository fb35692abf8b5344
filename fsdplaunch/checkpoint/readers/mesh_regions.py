"""Which rectangle of a tensor a rank holds, by its place in a mesh."""

from math import prod

from fsdplaunch.checkpoint.invalid_file import COPY_AGAIN
from fsdplaunch.checkpoint.regions import Region
from fsdplaunch.checkpoint.safe_pickle.rank_file_classes import MeshShard
from fsdplaunch.errors import CheckpointError


def shard_region(shard: MeshShard, mesh: tuple[int, ...]) -> Region:
    """Return the rectangle of a rank, as torch cuts: into parts of equal size, the last ones smaller or empty.

    Args:
        shard: The shard, with the rank's place in the mesh.
        mesh: The mesh's shape.
    """
    offsets, sizes = [0] * len(shard.shape), list(shard.shape)
    for axis in _order_of_cuts(shard, mesh):
        placement, count, at = shard.placements[axis], mesh[axis], shard.coordinates[axis]
        dim = placement.dim
        if dim is None:
            continue
        if not -len(sizes) <= dim < len(sizes):
            msg = f"a tensor of {len(sizes)} dimensions is cut along dimension {dim}"
            raise CheckpointError(msg, hint=COPY_AGAIN)
        step = -(-sizes[dim] // count)
        start = min(step * at, sizes[dim])
        offsets[dim] += start
        sizes[dim] = min(step, sizes[dim] - start)
    return Region(tuple(offsets), tuple(sizes))


def _order_of_cuts(shard: MeshShard, mesh: tuple[int, ...]) -> list[int]:
    """Return the mesh's axes in the order in which they cut a tensor: those that cut what others cut come last.

    FSDP cuts parameters along an axis before that of tensor parallelism, which had cut them already; torch calls
    such a placement strided, by as many as the later axes cut.
    """
    plain = [axis for axis, placement in enumerate(shard.placements) if placement.cuts == 1]
    strided = [axis for axis, placement in enumerate(shard.placements) if placement.cuts != 1]
    for axis in strided:
        dim = shard.placements[axis].dim
        later = (mesh[other] for other in plain if other > axis and shard.placements[other].dim == dim)
        if len(strided) > 1 or prod(later) != shard.placements[axis].cuts:
            msg = "a tensor is placed by _StridedShard, and not as FSDP cuts what tensor parallelism has cut"
            raise CheckpointError(
                msg, hint="save it with SHARDED_STATE_DICT, whose index says where each shard is"
            )
    return plain + strided
