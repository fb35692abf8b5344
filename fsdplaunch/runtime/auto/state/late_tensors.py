"""Full tensors that a library is given before their values are here: gathered one at a time when they are written.

Needed so that rank 0 can give `save_pretrained` a state of the model's size and hold one tensor of it. Whatever a
library does with such a tensor but look at it, or write it, gathers it first: nobody computes with values that are
not there.
"""

import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

from fsdplaunch.errors import CheckpointError
from fsdplaunch.runtime.auto.state.late_storages import Fill, LateStorages
from fsdplaunch.runtime.collectives.rank_group import from_rank_0
from fsdplaunch.runtime.torch_internals.tensors import storage_identity, tree_map

_PROPERTIES = (
    *("shape", "dtype", "device", "layout", "ndim", "nbytes", "itemsize", "requires_grad", "is_leaf", "grad"),
    *("grad_fn", "is_meta", "is_cpu", "is_cuda", "is_sparse", "is_quantized", "is_nested", "is_xla", "is_mps"),
)
_METHODS = (
    *("size", "dim", "numel", "nelement", "element_size", "stride", "storage_offset", "untyped_storage"),
    *("is_contiguous", "is_floating_point", "is_complex", "requires_grad_", "get_device"),
)
_FUNCTIONS = (torch.is_floating_point, torch.is_complex, torch.numel)
_LOOKING = {
    *(getattr(torch.Tensor, name).__get__ for name in _PROPERTIES),
    torch.Tensor.requires_grad.__set__,  # type: ignore[attr-defined]
    *(getattr(torch.Tensor, name) for name in _METHODS),
    *_FUNCTIONS,
}
"""What tells of a tensor without its values."""

_SAME = {torch.Tensor.detach, torch.Tensor.contiguous, torch.Tensor.cpu, torch.Tensor.data.__get__}  # type: ignore[attr-defined]
"""What returns the same values: these tensors are contiguous and in host memory."""

_COPYING = {getattr(torch.Tensor, name) for name in ("clone", "half", "bfloat16", "float", "double", "to", "cuda")}
"""What makes a tensor of a late one, which need not keep its values for that."""

_COMPARING_PLACES = {"_is_complete", "_end_ptr", "_find_disjoint", "_find_identical", "_filter_shared_not_shared"}
_LIBRARIES = {"safetensors", "transformers", "huggingface_hub", "diffusers", "accelerate"}
"""Functions of safetensors, and where they were copied to, which look for tensors that share memory."""


class LateTensor(torch.Tensor):
    """One of them: contiguous, in host memory, of the full tensor's shape and dtype.

    Attributes:
        memory: The same as a plain tensor, with its values once they were needed.
        owner: What knows how to gather it.
    """

    memory: torch.Tensor
    owner: "LateTensors"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Gather what an operation computes with, except where it only looks at the tensor."""
        alone = len(args) == 1 and not kwargs
        if func in _LOOKING or (func in _SAME and alone):
            result = super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
            return result if func in _LOOKING else _like(result, args[0])
        if func in _COPYING and isinstance(args[0], LateTensor) and not args[0].owner.keeps:
            return func(args[0].values(), *args[1:], **(kwargs or {}))
        plain = _memory if _compares_places(sys._getframe(1)) else _filled
        args, kwargs = tree_map(plain, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle a plain tensor: torch.save asks for its values when it writes them, others have them now."""
        frame = sys._getframe(1)
        by_torch = (frame.f_globals.get("__name__"), frame.f_code.co_name) == ("torch.serialization", "_save")
        return (_memory if by_torch and self.owner.is_writing else _filled)(self).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """Return a plain copy, the same one for names of one tensor; the values are not kept here as well."""
        key = id(self.memory)
        if key not in memo:
            memo[key] = self.values().clone()
        copied: torch.Tensor = memo[key]
        return copied

    def values(self) -> torch.Tensor:
        """Return the full tensor without keeping it, unless it has been needed before."""
        return self.owner.values(self.memory)


class LateTensors(LateStorages):
    """The late tensors of one save, which rank 0 asks for in its own order and the others help to gather.

    Args:
        together: Tells whether the others are in this save, and wait to be told what to gather.

    Attributes:
        keeps: Whether a tensor that was copied keeps its values.
    """

    keeps = True

    def __init__(self, together: Callable[[], bool]) -> None:
        super().__init__()
        self._together = together
        self._made = 0
        self._ended = False
        self._lock = threading.RLock()

    def tensor(self, shape: torch.Size, dtype: torch.dtype, fill: Fill) -> torch.Tensor:
        """Return a late tensor; arguments as for the base class. On all ranks in the same order."""
        ask = partial(self._ask, self._made, fill)
        self._made += 1
        return _late(super().tensor(shape, dtype, ask), self)

    def _ask(self, number: int, fill: Fill) -> torch.Tensor:
        """Tell the other ranks which tensor is gathered now, and gather it."""
        if self._ended:
            msg = "a tensor that save_pretrained was to write is read after it has ended"
            raise CheckpointError(msg, hint="copy it before, or save state_dict() instead")
        with self._lock:
            if self._together():
                from_rank_0(number)
            return fill()

    def _take(self, key: int) -> Fill:
        """Return how to gather a tensor that is written: it may be needed again."""
        return self._fills[key]

    def fill(self, memory: torch.Tensor) -> None:
        """Gather a tensor to stay, unless it is here."""
        with self._lock:
            key = storage_identity(memory)
            if key in self._waiting:
                memory.copy_(self._fills[key]())
                del self._waiting[key], self._fills[key]

    def values(self, memory: torch.Tensor) -> torch.Tensor:
        """Return a tensor's values, gathered for this once if they are not here."""
        with self._lock:
            fill = self._fills.get(storage_identity(memory))
            return memory if fill is None else fill()

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Fill what is pickled by torch.save when it is written, and let the other ranks go at the end."""
        try:
            with self.writing():
                yield
        finally:
            self._ended = True
            if self._together():
                from_rank_0(None)

    def answer(self) -> None:
        """Take part in gathering whatever rank 0 asks for, until it asks no more."""
        while (number := from_rank_0(None)) is not None:
            self._fills[number]()


class StandingTensors(LateTensors):
    """Late tensors of a state that the script holds, outside of any save: those of rank 0 alone."""

    keeps = False

    def __init__(self) -> None:
        super().__init__(lambda: False)
        _standing.add(self)

    def tensor(self, shape: torch.Size, dtype: torch.dtype, fill: Fill) -> torch.Tensor:
        """Return a late tensor; arguments as for the base class."""
        return _late(LateStorages.tensor(self, shape, dtype, fill), self)


_standing: "weakref.WeakSet[StandingTensors]" = weakref.WeakSet()


@contextmanager
def writing_standing() -> Iterator[None]:
    """Fill what the script holds when torch.save writes it."""
    with ExitStack() as stack:
        for each in list(_standing):
            stack.enter_context(each.writing())
        yield


def _late(memory: torch.Tensor, owner: LateTensors) -> LateTensor:
    late = memory.as_subclass(LateTensor)
    late.memory, late.owner = memory, owner
    return late


def _like(result: LateTensor, source: LateTensor) -> LateTensor:
    result.memory, result.owner = source.memory, source.owner
    return result


def _memory(value: Any) -> Any:
    return value.memory if isinstance(value, LateTensor) else value


def _filled(value: Any) -> Any:
    if isinstance(value, LateTensor):
        value.owner.fill(value.memory)
    return _memory(value)


def _compares_places(frame: Any) -> bool:
    """Return whether what calls a tensor's method wants to know only where it is in memory."""
    home = str(frame.f_globals.get("__name__")).partition(".")[0]
    return home in _LIBRARIES and frame.f_code.co_name in _COMPARING_PLACES
