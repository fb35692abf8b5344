"""The stand-ins for what a torch.save file names: tensors, storages, sharded tensors, placements. Inert."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fsdplaunch.checkpoint.chunks import Region
from fsdplaunch.checkpoint.dtypes import STORAGES, Dtype
from fsdplaunch.checkpoint.safe_pickle import (
    OBJECT,
    PickledCallable,
    PickledDict,
    PickledObject,
    unpickle,
)
from fsdplaunch.checkpoint.safe_pickle.dcp_classes import SIZE_NAMES, is_memory_format
from fsdplaunch.checkpoint.untrusted_files import MAX_DIMENSIONS, InvalidFileError, check_counts, refuse, short
from fsdplaunch.errors import CheckpointError

# torch, and what pickles of protocol 2 call modules of the standard library.
_REFUSED = {"torch", "__builtin__", "copy_reg", "commands", "__main__"}
# Wrapper classes whose one inner tensor of the same shape and dtype is the weight.
_TRANSPARENT = {
    "torchao.float8.fsdp_utils.WeightWithDynamicFloat8CastTensor",
    "torchao.float8.fsdp_utils.WeightWithDelayedFloat8CastTensor",
    "torchao.float8.fsdp_utils.WeightWithStaticFloat8CastTensor",
    "float8_experimental.fsdp_utils.WeightWithDynamicFloat8CastTensor",
}


@dataclass(frozen=True, slots=True)
class TensorDescription:
    """One dense tensor on one storage."""

    dtype: Dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # its strides, in elements
    start: int  # the first element's place in the storage, in elements
    storage: str  # the storage's key inside the item


@dataclass(frozen=True, slots=True)
class _StorageClass:
    """A storage class, with the dtype it implies; None for an untyped one."""

    dtype: Dtype | None


@dataclass(frozen=True, slots=True)
class _Storage:
    """A persistent id: which data member, and the dtype its class implies."""

    key: str
    dtype: Dtype | None


@dataclass(frozen=True, slots=True)
class WrapperTensor:
    """A tensor of a wrapper class, which has no storage of its own: its dtype and shape."""

    dtype: Dtype
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class MeshShard:
    """A rank's shard of a tensor on a device mesh."""

    local: TensorDescription  # the shard
    dtype: Dtype
    shape: tuple[int, ...]  # the full tensor's shape
    # For each dimension of the mesh which of the tensor's it cuts, None when none is.
    placements: tuple[int | None, ...]
    coordinates: tuple[int, ...]  # the rank's place in the mesh

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


def read_description(data: bytes) -> TensorDescription:
    """Return the tensor that `data.pkl` describes.

    Raises:
        InvalidFileError: When it describes anything but one dense tensor.
    """
    try:
        found = _read(data, "its description")
    except CheckpointError as problem:
        raise InvalidFileError(problem.message) from None
    if not isinstance(found, TensorDescription):
        refuse(f"it describes a {type(found).__name__.lstrip('_').lower()}, not a dense tensor")
    return found


def read_state(data: bytes, where: str) -> dict[Any, Any]:
    """Return the dictionary that a file's `data.pkl` holds, with a part or a description for each tensor.

    Raises:
        CheckpointError: When it names what a state dict has no use for, or is damaged.
        InvalidFileError: When it is not a dictionary.
    """
    found = _read(data, where)
    if not isinstance(found, dict):
        refuse(f"it holds a {type(found).__name__}, not a dictionary of tensors")
    return found


def check_plain(data: bytes, where: str) -> None:
    """Check the description that a file of torch.save holds.

    Raises:
        CheckpointError: It names what plain values have no use for, is damaged, or asks for much memory.
    """
    _read(data, where)


def _read(data: bytes, where: str) -> Any:
    return unpickle(data, _NAMES, persistent=_storage_of, unknown=_foreign, where=where)


def _storage_of(key: tuple[Any, ...]) -> _Storage:
    """Return the storage of a `('storage', class, key, device, size)`."""
    if len(key) != 5 or key[0] != "storage" or not isinstance(key[1], _StorageClass) or type(key[2]) is not str:  # noqa: PLR2004
        refuse("its storage is not one that torch.save writes")
    return _Storage(key[2], key[1].dtype)


def _foreign(module: str, name: str) -> PickledCallable:
    """Stand for a class of some library, or one that a sharded tensor is made of; refuse torch's others.

    Those of the standard library are refused as well: none is harmless.
    """
    top, full = module.partition(".")[0], f"{module}.{name}"
    if module.startswith("torch.distributed.") and not module.startswith("torch.distributed.checkpoint"):
        return _inert(full, full)
    if top in _REFUSED or top in sys.stdlib_module_names:
        refuse(f"it names {short(full)}, which a tensor never needs")
    return _inert(full, name)


def _inert(name: str, made: str) -> PickledCallable:
    """Stand for a class whose objects are their fields; called, it makes a `made` without any."""
    return PickledCallable(name, call=lambda _: PickledObject(made), new=True, any_arguments=True)


def _rebuild_tensor(arguments: tuple[Any, ...], typed: int) -> TensorDescription:
    """Read `(storage, offset, size, stride, requires_grad, hooks[, flags])`.

    With `typed` 1, a dtype stands before the flags.
    """
    _check_number(arguments, 6 + typed, 7 + typed)
    storage, start, shape, strides = arguments[:4]
    dtype = arguments[6] if typed else storage.dtype if isinstance(storage, _Storage) else None
    if not isinstance(storage, _Storage) or not isinstance(dtype, Dtype):
        refuse("its tensor has no storage or no dtype")
    sizes, steps = check_counts(shape, "its shape"), check_counts(strides, "its strides")
    (first,) = check_counts((start,), "its storage offset")
    if len(sizes) != len(steps):
        refuse(f"its shape has {len(sizes)} dimensions, its strides {len(steps)}")
    flags = arguments[6 + typed :]
    if flags not in ((), (None,), ({},)):
        refuse("its bytes are the conjugate or the negative of the values: save it with resolve_conj, resolve_neg")
    return TensorDescription(dtype, sizes, steps, first, storage.key)


def _rebuild_parameter(arguments: tuple[Any, ...]) -> TensorDescription:
    """Read `(data, requires_grad, hooks[, state])`."""
    _check_number(arguments, 3, 4)
    if not isinstance(arguments[0], TensorDescription):
        refuse("its parameter holds no tensor")
    return arguments[0]


def _rebuild_shell(arguments: tuple[Any, ...]) -> WrapperTensor:
    """Read `(class, dtype, size, stride, offset, layout, device, requires_grad)`."""
    _check_number(arguments, 8, 8)
    if not isinstance(arguments[1], Dtype):
        refuse("its wrapper has no dtype")
    return WrapperTensor(arguments[1], check_counts(arguments[2], "its shape"))


def _rebuild_subclass(arguments: tuple[Any, ...]) -> Any:
    """Read `(function, class, arguments, state)`: a shard on a mesh, listed shards, or any other subclass."""
    _check_number(arguments, 4, 4)
    function, cls, inner, state = arguments
    name = function.name if isinstance(function, PickledCallable) else ""
    if name not in _REBUILDERS or not isinstance(cls, PickledCallable):
        refuse("it is built by something other than torch's own functions")
    made = _REBUILDERS[name](inner if type(inner) is tuple else ())
    if isinstance(made, TensorDescription):
        return made
    kind = cls.name.rpartition(".")[2] if cls.name.startswith("torch.distributed.") else ""
    if kind == "DTensor":
        return _mesh_shard(made, state)
    if kind == "ShardedTensor":
        return _listed_parts(made, state)
    if cls.name not in _TRANSPARENT:
        refuse(f"it is a {short(cls.name)}, whose values only its own library can read")
    values = state.values() if type(state) is dict else ()
    found = [
        v for v in values if isinstance(v, TensorDescription) and (v.dtype, v.shape) == (made.dtype, made.shape)
    ]
    if len(found) != 1:
        refuse(f"it is a {short(cls.name)} with {len(found)} inner tensors of its shape")
    return found[0]


def _check_number(arguments: tuple[Any, ...], least: int, most: int) -> None:
    if not least <= len(arguments) <= most:
        refuse(f"a tensor is built from {len(arguments)} values")


def _field(record: Any, key: str) -> Any:
    return record.get(key) if isinstance(record, PickledObject) else None


def _mesh_shard(shell: WrapperTensor, state: Any) -> MeshShard:
    """Return a DTensor: its local tensor, and what its spec says of its place."""
    fields = PickledObject("DTensor")
    fields.take(state)
    local, spec = fields.get("_local_tensor"), fields.get("_spec")
    placements, coordinates = _field(spec, "placements"), _field(_field(spec, "mesh"), "_coordinate_on_dim")
    if type(coordinates) is list:
        coordinates = tuple(coordinates)
    if (
        not isinstance(local, TensorDescription)
        or type(placements) is not tuple
        or type(coordinates) is not tuple
        or len(placements) > MAX_DIMENSIONS
    ):
        refuse("a tensor on a mesh does not say which shard of it this is")
    dims: list[int | None] = []
    for item in placements:
        kind = item.name.rpartition(".")[2] if isinstance(item, PickledObject) else type(item).__name__
        dim = _field(item, "dim")
        if kind != "Replicate" and (kind != "Shard" or type(dim) is not int):
            what = f"a tensor is placed by {short(kind)}, which cannot be put together from files of single ranks"
            refuse(f"{what}: save it with SHARDED_STATE_DICT, whose index says where each shard is")
        dims.append(None if kind == "Replicate" else dim)
    place = check_counts(coordinates, "a rank's place in a mesh")
    return MeshShard(local, shell.dtype, shell.shape, tuple(dims), place)


def _listed_parts(shell: WrapperTensor, state: Any) -> ListedShards:
    """Return a ShardedTensor: `(local shards, metadata, ...)`."""
    shards = state[0] if type(state) is tuple and state else None
    if type(shards) is not list:
        refuse("a sharded tensor does not list its shards")
    parts = []
    for shard in shards:
        tensor, place = _field(shard, "tensor"), _field(shard, "metadata")
        if not isinstance(tensor, TensorDescription) or not isinstance(place, PickledObject):
            refuse("a sharded tensor has a shard without a tensor or a place")
        listed = (place.get(key) for key in ("shard_offsets", "shard_sizes"))
        offsets, sizes = (
            check_counts(tuple(value) if type(value) is list else value, "a shard's place") for value in listed
        )
        parts.append((Region(offsets, sizes), tensor))
    return ListedShards(shell.dtype, shell.shape, tuple(parts))


def _attribute(arguments: tuple[Any, ...]) -> PickledCallable | None:
    """Read `getattr(ShardedTensor, "ProcessGroupState")`, as a class inside a class is named; a memory format."""
    if is_memory_format(arguments):
        return None
    owner = arguments[0].name if arguments and isinstance(arguments[0], PickledCallable) else ""
    if not owner.endswith(".ShardedTensor") or arguments[1:] != ("ProcessGroupState",):
        refuse("it looks up an attribute")
    return _inert("ProcessGroupState", "ProcessGroupState")


def _value(_: tuple[Any, ...]) -> None:
    """Stand for a value that is of no interest here."""


_REBUILDERS: dict[str, Callable[[tuple[Any, ...]], TensorDescription | WrapperTensor]] = {
    "torch._utils._rebuild_tensor_v2": lambda arguments: _rebuild_tensor(arguments, 0),
    "torch._utils._rebuild_tensor_v3": lambda arguments: _rebuild_tensor(arguments, 1),
    "torch._utils._rebuild_wrapper_subclass": _rebuild_shell,
}
_CALLS: dict[str, Callable[[tuple[Any, ...]], Any] | None] = {
    **_REBUILDERS,
    "torch._utils._rebuild_parameter": _rebuild_parameter,
    "torch._utils._rebuild_parameter_with_state": _rebuild_parameter,
    "torch._tensor._rebuild_from_type_v2": _rebuild_subclass,
    "collections.OrderedDict": lambda _: PickledDict(),
    "builtins.getattr": _attribute,
    "__builtin__.getattr": _attribute,
    "torch.Tensor": None,
    "torch.nn.parameter.Parameter": None,
    "torch.nn.parameter.Buffer": None,
    # What torch's reader makes of plain values besides what state dicts hold.
    **dict.fromkeys(
        (
            *(
                f"{home}.{kind}"
                for home in ("builtins", "__builtin__")
                for kind in ("set", "complex", "bytearray")
            ),
            *("collections.Counter", "collections.defaultdict", "_codecs.encode", "torch.device"),
            *("torch._utils._rebuild_tensor", "torch._utils._rebuild_sparse_tensor"),
            *("torch._utils._rebuild_qtensor", "torch._utils._rebuild_meta_tensor_no_storage"),
        ),
        _value,
    ),
}
_NAMES: dict[tuple[str, str], Any] = {
    **SIZE_NAMES,
    **{
        (name.rpartition(".")[0], name.rpartition(".")[2]): PickledCallable(name, call=call)
        for name, call in _CALLS.items()
    },
    **{("torch", name): _StorageClass(dtype) for name, dtype in STORAGES.items()},
    ("torch.storage", "UntypedStorage"): _StorageClass(None),
}
