"""The stand-ins for what a torch.save file names: tensors, storages, sharded tensors, placements. Inert."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fsdplaunch.checkpoint.chunks import Region
from fsdplaunch.checkpoint.dtypes import STORAGES, Dtype
from fsdplaunch.checkpoint.safe_pickle.dcp_classes import SIZE_NAMES, memory_format
from fsdplaunch.checkpoint.safe_pickle.unpickle import (
    OBJECT,
    PickledCallable,
    PickledDict,
    PickledObject,
    unpickle,
)
from fsdplaunch.checkpoint.untrusted_files import MAX_DIMENSIONS, InvalidFileError, check_counts, short
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
    """One dense tensor on one storage.

    Attributes:
        dtype: Its dtype.
        shape: Its sizes.
        strides: Its strides, in elements.
        start: The first element's place in the storage, in elements.
        storage: The storage's key inside the item.
        conjugated: The bytes are the complex conjugate of the values.
        negated: The bytes are the negative of the values.
    """

    dtype: Dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    start: int
    storage: str
    conjugated: bool = False
    negated: bool = False


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
        msg = f"it describes a {type(found).__name__.lstrip('_').lower()}, not a dense tensor"
        raise InvalidFileError(msg)
    return found


def _foreign(module: str, name: str) -> PickledCallable:
    """Stand for a class of some library, or one that a sharded tensor is made of; refuse torch's others.

    Those of the standard library are refused as well: none is harmless.
    """
    if module.startswith("torch.distributed.") and not module.startswith("torch.distributed.checkpoint"):
        return _fields(f"{module}.{name}")
    top = module.partition(".")[0]
    if top in _REFUSED or top in sys.stdlib_module_names:
        msg = f"it names {short(module + '.' + name)}, which a tensor has no use for"
        raise InvalidFileError(msg)
    return PickledCallable(f"{module}.{name}", call=lambda _: PickledObject(name), new=True, any_arguments=True)


def _storage_of(key: tuple[Any, ...]) -> _Storage:
    """Return the storage of a `('storage', class, key, device, size)`."""
    if len(key) != 5 or key[0] != "storage" or not isinstance(key[1], _StorageClass) or type(key[2]) is not str:  # noqa: PLR2004
        msg = "its storage is not one that torch.save writes"
        raise InvalidFileError(msg)
    return _Storage(key[2], key[1].dtype)


def _tensor(
    storage: Any, start: Any, shape: Any, strides: Any, dtype: Dtype | None, flags: Any
) -> TensorDescription:
    if not isinstance(storage, _Storage) or not isinstance(dtype, Dtype):
        msg = "its tensor has no storage or no dtype"
        raise InvalidFileError(msg)
    sizes, steps = check_counts(shape, "its shape"), check_counts(strides, "its strides")
    (first,) = check_counts((start,), "its storage offset")
    if len(sizes) != len(steps):
        msg = f"its shape has {len(sizes)} dimensions, its strides {len(steps)}"
        raise InvalidFileError(msg)
    marks = {} if flags is None else flags
    if type(marks) is not dict or not all(
        key in {"conj", "neg"} and type(on) is bool for key, on in marks.items()
    ):
        msg = "its tensor carries flags that are not known"
        raise InvalidFileError(msg)
    return TensorDescription(
        dtype, sizes, steps, first, storage.key, marks.get("conj", False), marks.get("neg", False)
    )


def _rebuild_v2(arguments: tuple[Any, ...]) -> TensorDescription:
    """Read `(storage, offset, size, stride, requires_grad, hooks[, flags])`."""
    _check_number(arguments, 6, 7)
    storage, start, shape, strides = arguments[:4]
    dtype = storage.dtype if isinstance(storage, _Storage) else None
    return _tensor(storage, start, shape, strides, dtype, arguments[6] if len(arguments) > 6 else None)  # noqa: PLR2004


def _rebuild_v3(arguments: tuple[Any, ...]) -> TensorDescription:
    """Read `(storage, offset, size, stride, requires_grad, hooks, dtype[, flags])`."""
    _check_number(arguments, 7, 8)
    storage, start, shape, strides = arguments[:4]
    return _tensor(storage, start, shape, strides, arguments[6], arguments[7] if len(arguments) > 7 else None)  # noqa: PLR2004


def _rebuild_parameter(arguments: tuple[Any, ...]) -> TensorDescription:
    """Read `(data, requires_grad, hooks[, state])`."""
    _check_number(arguments, 3, 4)
    if not isinstance(arguments[0], TensorDescription):
        msg = "its parameter holds no tensor"
        raise InvalidFileError(msg)
    return arguments[0]


def rebuild_shell(arguments: tuple[Any, ...]) -> WrapperTensor:
    """Read `(class, dtype, size, stride, offset, layout, device, requires_grad)`."""
    _check_number(arguments, 8, 8)
    if not isinstance(arguments[1], Dtype):
        msg = "its wrapper has no dtype"
        raise InvalidFileError(msg)
    return WrapperTensor(arguments[1], check_counts(arguments[2], "its shape"))


def rebuild_subclass(arguments: tuple[Any, ...]) -> TensorDescription:
    """Read `(function, class, arguments, state)`: a tensor subclass, or a wrapper around an inner tensor."""
    _check_number(arguments, 4, 4)
    function, cls, inner, state = arguments
    if (
        not isinstance(function, PickledCallable)
        or function.name not in _REBUILDERS
        or not isinstance(cls, PickledCallable)
    ):
        msg = "it is built by something else than torch's own functions"
        raise InvalidFileError(msg)
    made = _REBUILDERS[function.name](inner if type(inner) is tuple else ())
    if isinstance(made, TensorDescription):
        return made
    return _inner_tensor(made, cls, state)


def _inner_tensor(shell: WrapperTensor, cls: PickledCallable, state: Any) -> TensorDescription:
    if cls.name not in _TRANSPARENT:
        msg = f"it is a {short(cls.name)}, whose values only its own library knows"
        raise InvalidFileError(msg)
    values = state.values() if type(state) is dict else ()
    found = [
        v for v in values if isinstance(v, TensorDescription) and (v.dtype, v.shape) == (shell.dtype, shell.shape)
    ]
    if len(found) != 1:
        msg = f"it is a {short(cls.name)} with {len(found)} inner tensors of its shape"
        raise InvalidFileError(msg)
    return found[0]


def _check_number(arguments: tuple[Any, ...], least: int, most: int) -> None:
    if not least <= len(arguments) <= most:
        msg = f"a tensor is built from {len(arguments)} values"
        raise InvalidFileError(msg)


_WRAPPER = "torch._utils._rebuild_wrapper_subclass"


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


def read_state(data: bytes, where: str) -> dict[Any, Any]:
    """Return the dictionary that a file's `data.pkl` holds, with a part or a description for each tensor.

    Args:
        data: The file's.
        where: It, in words.

    Raises:
        CheckpointError: When it names what a state dict has no use for, or is damaged.
        InvalidFileError: When it is not a dictionary.
    """
    found = _read(data, where)
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
    fields = PickledObject("DTensor")
    fields.take(state)
    local, spec = fields.get("_local_tensor"), fields.get("_spec")
    mesh = spec.get("mesh") if isinstance(spec, PickledObject) else None
    placements = spec.get("placements") if isinstance(spec, PickledObject) else None
    coordinates = mesh.get("_coordinate_on_dim") if isinstance(mesh, PickledObject) else None
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
    kind = item.name.rpartition(".")[2] if isinstance(item, PickledObject) else type(item).__name__
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
    tensor = shard.get("tensor") if isinstance(shard, PickledObject) else None
    place = shard.get("metadata") if isinstance(shard, PickledObject) else None
    if not isinstance(tensor, TensorDescription) or not isinstance(place, PickledObject):
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
    return PickledCallable(name, call=lambda _: PickledObject(name), new=True, any_arguments=True)


_SUBCLASSES: dict[str, Callable[[WrapperTensor, Any], Any]] = {
    "DTensor": _mesh_shard,
    "ShardedTensor": _listed_parts,
}


def _value(_: tuple[Any, ...]) -> None:
    """Stand for a value that is of no interest here."""


_REBUILDERS: dict[str, Callable[[tuple[Any, ...]], TensorDescription | WrapperTensor]] = {
    "torch._utils._rebuild_tensor_v2": _rebuild_v2,
    "torch._utils._rebuild_tensor_v3": _rebuild_v3,
    _WRAPPER: rebuild_shell,
}
_CALLS: dict[str, Callable[[tuple[Any, ...]], Any] | None] = {
    **_REBUILDERS,
    "torch._utils._rebuild_parameter": _rebuild_parameter,
    "torch._utils._rebuild_parameter_with_state": _rebuild_parameter,
    "torch._tensor._rebuild_from_type_v2": _rebuild,
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


def _read(data: bytes, where: str) -> Any:
    return unpickle(data, _NAMES, persistent=_storage_of, unknown=_foreign, where=where)


def check_plain(data: bytes, where: str) -> None:
    """Check the description that a file of torch.save holds.

    Raises:
        CheckpointError: It names what plain values have no use for, is damaged, or asks for much memory.
    """
    _read(data, where)
