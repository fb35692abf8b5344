"""The stand-ins for what a rank's own torch.save file names: sharded tensors, meshes, placements. Inert."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fsdplaunch.checkpoint.checked_ints import MAX_DIMENSIONS, check_counts
from fsdplaunch.checkpoint.dtypes import Dtype
from fsdplaunch.checkpoint.invalid_file import InvalidFileError, short
from fsdplaunch.checkpoint.regions import Region
from fsdplaunch.checkpoint.safe_pickle.dcp_classes import memory_format
from fsdplaunch.checkpoint.safe_pickle.interpreter import OBJECT, PickledCallable, PickledDict, PickledRecord
from fsdplaunch.checkpoint.safe_pickle.tensor_classes import (
    TENSOR_NAMES,
    TensorDescription,
    WrapperTensor,
    foreign,
    rebuild_shell,
    rebuild_subclass,
    storage_of,
)
from fsdplaunch.checkpoint.safe_pickle.unpickle import unpickle

# Fields come as a dictionary, or as a pair of one and the slots.
_MAX_STATES = 2
_WRAPPER = "torch._utils._rebuild_wrapper_subclass"
_SHARDED = "torch.distributed._shard."
_PLACEMENTS = ("torch.distributed.tensor.placement_types", "torch.distributed._tensor.placement_types")


@dataclass(frozen=True, slots=True)
class ShardPlacement:
    """How a tensor lies along one dimension of a mesh: which of its own is cut, None when none is.

    Attributes:
        dim: The tensor's dimension.
        cuts: Into how many shards later dimensions of the mesh had cut it before.
    """

    dim: int | None
    cuts: int = 1


@dataclass(frozen=True, slots=True)
class MeshShard:
    """A rank's shard of a tensor on a device mesh.

    Attributes:
        local: The shard.
        dtype: The dtype.
        shape: The full tensor's shape.
        placements: How it lies along each dimension of the mesh.
        coordinates: The rank's place in the mesh.
    """

    local: TensorDescription
    dtype: Dtype
    shape: tuple[int, ...]
    placements: tuple[ShardPlacement, ...]
    coordinates: tuple[int, ...]

    @property
    def weight(self) -> int:
        """Return the bytes that it takes."""
        return OBJECT * (2 + len(self.placements))


@dataclass(frozen=True, slots=True)
class ListedShards:
    """A rank's shards of a tensor, each with its rectangle of the full tensor."""

    dtype: Dtype
    shape: tuple[int, ...]
    parts: tuple[tuple[Region, TensorDescription], ...]

    @property
    def weight(self) -> int:
        """Return the bytes that it takes."""
        return OBJECT * (2 + 2 * len(self.parts))


class SavedFields(PickledRecord):
    """An object as the fields it was saved with, which may come as a dictionary, or beside one in a pair."""

    __slots__ = ("name", "states")

    def __init__(self, name: str) -> None:
        self.name = name
        self.states: tuple[Any, ...] = ()

    def __setstate__(self, state: Any) -> None:
        # Kept as it is: several objects may name one state.
        self.states = state[:_MAX_STATES] if type(state) is tuple else (state,)

    def get(self, key: str) -> Any:
        """Return a field, None when there is none."""
        return next((part[key] for part in reversed(self.states) if type(part) is dict and key in part), None)


def read_state(data: bytes, where: str, names: Mapping[tuple[str, str], Any] | None = None) -> dict[Any, Any]:
    """Return the dictionary that a file's `data.pkl` holds, with a part or a description for each tensor.

    Args:
        data: The file's.
        where: It, in words.
        names: What it may name; left out, what a state dict of torch has a use for.

    Raises:
        CheckpointError: When it names what a state dict has no use for, or is damaged.
        InvalidFileError: When it is no dictionary.
    """
    known = RANK_FILE_NAMES if names is None else names
    found = unpickle(data, known, persistent=storage_of, unknown=foreign, where=where)
    if not isinstance(found, dict):
        msg = f"it holds a {type(found).__name__}, not a dictionary of tensors"
        raise InvalidFileError(msg)
    return found


def _rebuild(arguments: tuple[Any, ...]) -> Any:
    """Read `(function, class, arguments, state)`: a shard on a mesh, listed shards, or any other subclass."""
    if len(arguments) == 4 and isinstance(arguments[1], PickledCallable):  # noqa: PLR2004
        function, cls, inner, state = arguments
        make = _SUBCLASSES.get(cls.name.rpartition(".")[2]) if cls.name.startswith("torch.distributed.") else None
        if (
            make is not None
            and isinstance(function, PickledCallable)
            and function.name == _WRAPPER
            and type(inner) is tuple
        ):
            return make(rebuild_shell(inner), state)
    return rebuild_subclass(arguments)


def _mesh_shard(shell: WrapperTensor, state: Any) -> MeshShard:
    """Return a DTensor: its local tensor, and what its spec says of its place."""
    fields = SavedFields("DTensor")
    fields.__setstate__(state)
    local, spec = fields.get("_local_tensor"), fields.get("_spec")
    mesh = spec.get("mesh") if isinstance(spec, SavedFields) else None
    placements = spec.get("placements") if isinstance(spec, SavedFields) else None
    coordinates = mesh.get("_coordinate_on_dim") if isinstance(mesh, SavedFields) else None
    if type(coordinates) is list:
        coordinates = tuple(coordinates)
    if (
        not isinstance(local, TensorDescription)
        or type(placements) is not tuple
        or type(coordinates) is not tuple
        or len(placements) > MAX_DIMENSIONS
    ):
        msg = "a tensor on a mesh does not say which shard of it this is"
        raise InvalidFileError(msg)
    places = tuple(_placement(item) for item in placements)
    return MeshShard(
        local, shell.dtype, shell.shape, places, check_counts(coordinates, "a rank's place in a mesh")
    )


def _placement(item: Any) -> ShardPlacement:
    kind = item.name.rpartition(".")[2] if isinstance(item, SavedFields) else type(item).__name__
    if kind == "Replicate":
        return ShardPlacement(None)
    dim = item.get("dim") if kind in ("Shard", "_StridedShard") else None
    cuts = item.get("split_factor") if kind == "_StridedShard" else 1
    if type(dim) is not int or type(cuts) is not int:
        msg = f"a tensor is placed by {short(kind)}, which cannot be put together from files of single ranks"
        raise InvalidFileError(msg)
    return ShardPlacement(dim, cuts)


def _listed_parts(shell: WrapperTensor, state: Any) -> ListedShards:
    """Return a ShardedTensor: `(local shards, metadata, ...)`."""
    shards = state[0] if type(state) is tuple and state else None
    if type(shards) is not list:
        msg = "a sharded tensor does not list its shards"
        raise InvalidFileError(msg)
    return ListedShards(shell.dtype, shell.shape, tuple(_shard(shard) for shard in shards))


def _shard(shard: Any) -> tuple[Region, TensorDescription]:
    tensor = shard.get("tensor") if isinstance(shard, SavedFields) else None
    place = shard.get("metadata") if isinstance(shard, SavedFields) else None
    if not isinstance(tensor, TensorDescription) or not isinstance(place, SavedFields):
        msg = "a sharded tensor has a shard without a tensor or a place"
        raise InvalidFileError(msg)
    offsets, sizes = (_numbers(place.get(key)) for key in ("shard_offsets", "shard_sizes"))
    return Region(offsets, sizes), tensor


def _numbers(value: Any) -> tuple[int, ...]:
    return check_counts(tuple(value) if type(value) is list else value, "a shard's place")


def _attribute(arguments: tuple[Any, ...]) -> PickledCallable | int:
    """Read `getattr(ShardedTensor, "ProcessGroupState")`, as a class inside a class is named; a memory format."""
    found = memory_format(arguments)
    if found is not None:
        return found
    owner = arguments[0].name if arguments and isinstance(arguments[0], PickledCallable) else ""
    if not owner.endswith(".ShardedTensor") or arguments[1:] != ("ProcessGroupState",):
        msg = "it asks for an attribute"
        raise InvalidFileError(msg)
    return _fields("ProcessGroupState")


def _fields(name: str) -> PickledCallable:
    return PickledCallable(
        name, call=lambda _: SavedFields(name), new=lambda: SavedFields(name), any_arguments=True
    )


def _all(module: str, names: Iterable[str], make: Callable[[str], PickledCallable]) -> dict[tuple[str, str], Any]:
    return {(module, name): make(f"{module}.{name}") for name in names}


_SUBCLASSES: dict[str, Callable[[WrapperTensor, Any], Any]] = {
    "DTensor": _mesh_shard,
    "ShardedTensor": _listed_parts,
}
_SPEC = ("DTensorSpec", "TensorMeta", "ShardOrderEntry")
_MESH_LAYOUT = ("_MeshLayout", "_FlatLayout")
RANK_FILE_NAMES: dict[tuple[str, str], Any] = {
    **TENSOR_NAMES,
    ("torch._tensor", "_rebuild_from_type_v2"): PickledCallable(
        "torch._tensor._rebuild_from_type_v2", call=_rebuild
    ),
    ("collections", "OrderedDict"): PickledCallable("collections.OrderedDict", call=lambda _: PickledDict()),
    **{(module, "getattr"): PickledCallable("getattr", call=_attribute) for module in ("__builtin__", "builtins")},
    **_all("torch.distributed.tensor", ("DTensor",), PickledCallable),
    **_all("torch.distributed.tensor._api", ("DTensor",), PickledCallable),
    **_all("torch.distributed._tensor.api", ("DTensor",), PickledCallable),
    **_all("torch.distributed._tensor", ("DTensor",), PickledCallable),
    **_all(f"{_SHARDED}sharded_tensor.api", ("ShardedTensor",), PickledCallable),
    **{
        key: made
        for module in _PLACEMENTS
        for key, made in _all(
            module, ("Shard", "Replicate", "Partial", "_Partial", "_StridedShard"), _fields
        ).items()
    },
    **_all("torch.distributed.tensor._dtensor_spec", _SPEC, _fields),
    **_all("torch.distributed._tensor._dtensor_spec", _SPEC, _fields),
    **_all("torch.distributed._tensor.placement_types", _SPEC, _fields),
    **_all("torch.distributed.device_mesh", ("DeviceMesh",), _fields),
    **_all("torch.distributed._tensor.device_mesh", ("DeviceMesh",), _fields),
    **_all("torch.distributed._mesh_layout", _MESH_LAYOUT, _fields),
    **_all(f"{_SHARDED}sharded_tensor.shard", ("Shard",), _fields),
    **_all(f"{_SHARDED}metadata", ("ShardMetadata",), _fields),
    **_all(f"{_SHARDED}sharded_tensor.metadata", ("ShardedTensorMetadata", "TensorProperties"), _fields),
    **_all(f"{_SHARDED}sharded_tensor.metadata", ("MEM_FORMAT_ENCODING",), _fields),
    **_all(f"{_SHARDED}sharding_spec.chunk_sharding_spec", ("ChunkShardingSpec",), _fields),
    **_all(f"{_SHARDED}sharding_spec.api", ("EnumerableShardingSpec",), _fields),
    **_all("torch.distributed.remote_device", ("_remote_device",), _fields),
}
