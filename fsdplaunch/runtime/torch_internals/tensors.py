"""What torch keeps behind plain tensors: hooks, storages, and the functions that stand for torch's in scripts."""

import operator
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

__all__ = ["TorchDispatchMode", "tree_flatten", "tree_leaves", "tree_map", "tree_unflatten"]
"""Torch's own, under plain names; all versions."""


def has_backward_hooks(tensor: torch.Tensor) -> bool:
    """Return whether `register_hook` was ever called on a tensor; all versions."""
    return tensor._backward_hooks is not None


def renew_backward_hooks(tensor: Any) -> None:
    """Connect the hooks that a tensor lists to its gradient, which moving it leaves behind; all versions."""
    tensor._backward_hooks = tensor._backward_hooks


def storage_identity(tensor: torch.Tensor) -> int:
    """Return what is equal for tensors of one storage while it lives, empty or not; all versions."""
    return identity_of(tensor.untyped_storage())


def identity_of(storage: torch.UntypedStorage) -> int:
    """Return what is equal for two objects that stand for one storage while it lives; all versions."""
    return int(storage._cdata)


def inner_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the plain tensor inside torchao's float8 weights, else the tensor itself; torchao 0.10 to 0.14."""
    inner: torch.Tensor = getattr(tensor, "_tensor", tensor)
    return inner


def is_function_transforms(tensor: torch.Tensor) -> bool:
    """Return whether torch.func made a tensor, which stands for many and has no values; all versions."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


counted_changes = operator.attrgetter("_version")
"""The same as `change_count` of tensors that were not made in inference mode, at the least cost; all versions."""


def change_count(tensor: torch.Tensor) -> int:
    """Return how often a tensor, or another one with its storage, was changed in place; all versions.

    Torch does not count it for tensors that are made in inference mode: 0.
    """
    return 0 if tensor.is_inference() else int(tensor._version)


def note_changes(tensors: list[torch.Tensor]) -> None:
    """Count a change of each of some tensors whose memory was changed by another tensor; all versions."""
    torch.autograd.graph.increment_version(tensors)


def overwriting_uncounted(tensors: Iterable[torch.Tensor]) -> AbstractContextManager[None]:
    """Return a context in which tensors are overwritten without autograd's notice; all versions."""
    uncounted: Any = torch.autograd.grad_mode._unsafe_preserve_version_counter(tuple(tensors))
    return uncounted  # type: ignore[no-any-return]


def gradient_hooks(tensor: Any) -> tuple[OrderedDict[int, Any], OrderedDict[int, Any]]:
    """Return what was registered at a tensor for its gradient before and after it is added up; all versions.

    In torch's own tables, from which handles remove; in empty ones where nothing was registered.
    """
    after = getattr(tensor, "_post_accumulate_grad_hooks", None)
    return tensor._backward_hooks or OrderedDict(), after or OrderedDict()


def apart_from_parameters(output: Any) -> Any:
    """Return what a module has returned with copies of parameters and of views of them, alone or in a row.

    Memory of gathered parameters is given back after the module; all versions.
    """
    if type(output) is torch.Tensor and not output._is_view():  # what most modules return, at the least cost
        return output
    if type(output) in (tuple, list) and any(isinstance(each, torch.Tensor) for each in output):
        return type(output)(map(apart_from_parameters, output))
    if not isinstance(output, torch.Tensor):
        return output
    of = output._base if output._is_view() else output
    return output.clone() if isinstance(of, torch.nn.Parameter) else output


def return_no_parameters(_module: Any, _args: Any, output: Any) -> Any:
    """Do that as a forward hook; all versions."""
    return None if torch.compiler.is_compiling() else apart_from_parameters(output)


_instead_of: dict[int, Callable[..., Any]] = {}
"""By the identity of what stands for a function of torch written in Python: that function; all versions."""


def known_to_scripts(owner: Any, original: Any) -> bool:
    """Return whether a thing is a function of torch, which scripted code may name.

    To be asked before another stands in its place: torch lists its own at the first question; all versions.
    """
    if not isinstance(owner, ModuleType) or owner.__name__.partition(".")[0] != "torch" or not callable(original):
        return False
    builtins: Any = torch.jit._builtins
    builtins._get_builtin_table()
    return True


def scripted_as(instead: Any, original: Any) -> None:
    """Let `torch.jit.script` compile `original` where code names what stands in its place; all versions."""
    builtins: Any = torch.jit._builtins
    if name := builtins._find_builtin(original):
        builtins._register_builtin(instead, name)
    else:
        _instead_of[id(instead)] = original


def not_scripted(instead: Any) -> None:
    """Forget what `scripted_as` was told; all versions."""
    builtins: Any = torch.jit._builtins
    builtins._get_builtin_table().pop(id(instead), None)
    _instead_of.pop(id(instead), None)


def _original(function: Any) -> Any:
    while id(function) in _instead_of:
        function = _instead_of[id(function)]
    return function


def is_in_transform(*, forward: bool = True) -> bool:
    """Return whether a transform of torch.func computes now; all versions.

    Args:
        forward: Whether `jvp` counts as one.
    """
    functorch = torch._C._functorch
    top = functorch.peek_interpreter_stack()
    return top is not None and (forward or top.key() != functorch.TransformType.Jvp)


def is_of_transform(values: Any) -> bool:
    """Return whether any of some tensors is what a transform of torch.func computes with; all versions."""
    leaves = [values] if isinstance(values, torch.Tensor) else values
    is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
    return any(isinstance(leaf, torch.Tensor) and is_wrapped(leaf) for leaf in leaves)


def recomputes_later(*, trains: bool) -> bool:
    """Return whether what is computed now is computed again in a backward pass, as in a checkpoint; 2.9 to 2.13.

    Args:
        trains: Whether the pass around it has gradients: a reentrant checkpoint computes without them.
    """
    if not trains:
        return False
    return not torch.is_grad_enabled() or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def is_in_backward() -> bool:
    """Return whether a backward pass runs in this thread; all versions."""
    return bool(torch._C._current_graph_task_id() != -1)


def wrapper_tensor(kind: type, like: torch.Tensor, shape: Sequence[int]) -> Any:
    """Return a tensor of a subclass that has a shape and no memory, beside that in dtype and device as another."""
    made: Any = torch.Tensor._make_wrapper_subclass
    return made(kind, tuple(shape), dtype=like.dtype, device=like.device, requires_grad=like.requires_grad)


@cache
def metadata_getters() -> frozenset[Any]:
    """Return the methods and properties of tensors that read no value; all versions."""
    tensor: Any = torch.Tensor
    properties = (
        "shape",
        "dtype",
        "device",
        "ndim",
        "layout",
        "requires_grad",
        "is_cuda",
        "is_sparse",
        "itemsize",
    )
    methods = ("size", "dim", "numel", "nelement", "is_floating_point", "is_complex", "element_size", "__len__")
    return frozenset(
        [
            *(getattr(tensor, name).__get__ for name in properties if hasattr(tensor, name)),
            *(getattr(tensor, name) for name in methods),
        ]
    )


@contextmanager
def computing_as_plain_tensors() -> Iterator[None]:
    """Let subclasses' `__torch_function__` be passed by; all versions."""
    with torch._C.DisableTorchFunctionSubclass():
        yield
