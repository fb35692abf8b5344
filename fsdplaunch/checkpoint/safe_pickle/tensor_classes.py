"""What an item's `data.pkl` says about its tensor: dtype, shape, strides, storage. No class is imported."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fsdplaunch.checkpoint.checked_ints import check_counts
from fsdplaunch.checkpoint.dtypes import STORAGES, Dtype
from fsdplaunch.checkpoint.invalid_file import InvalidFileError, short
from fsdplaunch.checkpoint.safe_pickle.dcp_classes import SIZE_NAMES
from fsdplaunch.checkpoint.safe_pickle.interpreter import PickledCallable, PickledRecord
from fsdplaunch.checkpoint.safe_pickle.unpickle import unpickle
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


class _Opaque(PickledRecord):
    """An object of a class we know nothing about, inside a wrapper's state. Its content is dropped."""

    __slots__ = ()

    def __setstate__(self, state: Any) -> None:
        """Forget the state."""


def read_description(data: bytes) -> TensorDescription:
    """Return the tensor that `data.pkl` describes.

    Raises:
        InvalidFileError: When it describes anything but one dense tensor.
    """
    try:
        found = unpickle(data, TENSOR_NAMES, persistent=storage_of, unknown=foreign, where="its description")
    except CheckpointError as problem:
        raise InvalidFileError(problem.message) from None
    if not isinstance(found, TensorDescription):
        msg = f"it describes a {type(found).__name__.lstrip('_').lower()}, not a dense tensor"
        raise InvalidFileError(msg)
    return found


def foreign(module: str, name: str) -> PickledCallable:
    """Stand for a class of some library; refuse torch's and the standard library's, where none is harmless."""
    top = module.partition(".")[0]
    if top in _REFUSED or top in sys.stdlib_module_names:
        msg = f"it names {short(module + '.' + name)}, which a tensor has no use for"
        raise InvalidFileError(msg)
    return PickledCallable(f"{module}.{name}", call=lambda _: _Opaque(), new=_Opaque, any_arguments=True)


def storage_of(key: tuple[Any, ...]) -> _Storage:
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


def _nothing(_: tuple[Any, ...]) -> None:
    """Drop a device, which is of no interest on disk."""


def _hooks(_: tuple[Any, ...]) -> dict[Any, Any]:
    """Return an empty OrderedDict of hooks, or a state dict."""
    return {}


def _split(name: str) -> tuple[str, str]:
    module, _, last = name.rpartition(".")
    return module, last


_REBUILDERS: dict[str, Callable[[tuple[Any, ...]], TensorDescription | WrapperTensor]] = {
    "torch._utils._rebuild_tensor_v2": _rebuild_v2,
    "torch._utils._rebuild_tensor_v3": _rebuild_v3,
    "torch._utils._rebuild_wrapper_subclass": rebuild_shell,
}
_CALLS: dict[str, Callable[[tuple[Any, ...]], Any] | None] = {
    **_REBUILDERS,
    "torch._utils._rebuild_parameter": _rebuild_parameter,
    "torch._utils._rebuild_parameter_with_state": _rebuild_parameter,
    "torch._tensor._rebuild_from_type_v2": rebuild_subclass,
    "torch.device": _nothing,
    "collections.OrderedDict": _hooks,
    "torch.Tensor": None,
    "torch.nn.parameter.Parameter": None,
    "torch.nn.parameter.Buffer": None,
}
TENSOR_NAMES: dict[tuple[str, str], Any] = {
    **SIZE_NAMES,
    **{_split(name): PickledCallable(name, call=call) for name, call in _CALLS.items()},
    **{("torch", name): _StorageClass(dtype) for name, dtype in STORAGES.items()},
    ("torch.storage", "UntypedStorage"): _StorageClass(None),
}
