"""What torch keeps behind plain tensors: hooks, storages, trees, dispatch, kernels; and where it waits."""

import operator
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch.autograd import Variable
from torch.nn.functional import pad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten
from torch.utils.data import dataloader

__all__ = ["TorchDispatchMode", "tree_flatten", "tree_leaves", "tree_map", "tree_unflatten"]
"""Torch's own, under plain names."""


def renew_backward_hooks(tensor: Any) -> bool:
    """Connect the hooks that a tensor lists to its gradient, which moving it leaves behind; return if any."""
    listed = tensor._backward_hooks
    if listed is not None:
        tensor._backward_hooks = listed
    return listed is not None


def storage_identity(tensor: torch.Tensor) -> int:
    """Return what is equal for tensors of one storage while it lives, empty or not."""
    return int(tensor.untyped_storage()._cdata)


def inner_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the plain tensor inside torchao's float8 weights, else the tensor itself; torchao 0.10 to 0.14."""
    inner: torch.Tensor = getattr(tensor, "_tensor", tensor)
    return inner


counted_changes = operator.attrgetter("_version")
"""The same as `change_count` of tensors that were not made in inference mode, at the least cost."""


def change_count(tensor: torch.Tensor) -> int:
    """Return how often a tensor, or another one with its storage, was changed in place.

    Torch does not count it for tensors that are made in inference mode: 0.
    """
    return 0 if tensor.is_inference() else int(tensor._version)


def note_changes(tensors: list[torch.Tensor]) -> None:
    """Count a change of each of some tensors whose memory was changed by another tensor."""
    torch.autograd.graph.increment_version(tensors)


def overwriting_uncounted(tensors: Iterable[torch.Tensor]) -> AbstractContextManager[None]:
    """Return a context in which tensors are overwritten without autograd's notice."""
    uncounted: Any = torch.autograd.grad_mode._unsafe_preserve_version_counter(tuple(tensors))
    return uncounted  # type: ignore[no-any-return]


def gradient_hooks(tensor: Any) -> tuple[OrderedDict[int, Any], OrderedDict[int, Any]]:
    """Return what was registered at a tensor for its gradient before and after it is added up.

    In torch's own tables, from which handles remove; in empty ones where nothing was registered.
    """
    after = getattr(tensor, "_post_accumulate_grad_hooks", None)
    return tensor._backward_hooks or OrderedDict(), after or OrderedDict()


def apart_from_parameters(output: Any) -> Any:
    """Return what a module has returned with copies of parameters and of views of them, alone or in a row.

    Memory of gathered parameters is given back after the module.
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
    """Do that as a forward hook."""
    return None if torch.compiler.is_compiling() else apart_from_parameters(output)


def is_in_transform(*, forward: bool = True) -> bool:
    """Return whether a transform of torch.func computes now; `jvp` counts as one only with `forward`."""
    functorch = torch._C._functorch
    top = functorch.peek_interpreter_stack()
    return top is not None and (forward or top.key() != functorch.TransformType.Jvp)


def is_of_transform(values: Any) -> bool:
    """Return whether any of some tensors is what a transform of torch.func computes with."""
    leaves = [values] if isinstance(values, torch.Tensor) else values
    is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
    return any(isinstance(leaf, torch.Tensor) and is_wrapped(leaf) for leaf in leaves)


def recomputes_later(*, trains: bool) -> bool:
    """Return whether what is computed now is computed again in a backward pass, as in a checkpoint; 2.9 to 2.13.

    A reentrant checkpoint computes without gradients where the pass around it `trains`.
    """
    if not trains:
        return False
    return not torch.is_grad_enabled() or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def is_in_backward() -> bool:
    """Return whether a backward pass runs in this thread."""
    return bool(torch._C._current_graph_task_id() != -1)


def wrapper_tensor(kind: type, like: torch.Tensor, shape: Sequence[int]) -> Any:
    """Return a tensor of a subclass that has a shape and no memory, beside that in dtype and device as another."""
    made: Any = torch.Tensor._make_wrapper_subclass
    return made(kind, tuple(shape), dtype=like.dtype, device=like.device, requires_grad=like.requires_grad)


@cache
def metadata_getters() -> frozenset[Any]:
    """Return the methods and properties of tensors that read no value."""
    tensor: Any = torch.Tensor
    properties = ["shape", "dtype", "device", "ndim", "layout", "requires_grad"]
    properties += ["is_cuda", "is_sparse", "itemsize"]
    methods = ["size", "dim", "numel", "nelement", "is_floating_point", "is_complex", "element_size", "__len__"]
    getters = [getattr(tensor, name).__get__ for name in properties if hasattr(tensor, name)]
    return frozenset([*getters, *(getattr(tensor, name) for name in methods)])


def computing_as_plain_tensors() -> AbstractContextManager[Any]:
    """Return a context in which subclasses' `__torch_function__` is passed by."""
    passing: AbstractContextManager[Any] = torch._C.DisableTorchFunctionSubclass()
    return passing


# Objects within each other that are looked into: torch_geometric's batches have tensors in the second.
_DEEPEST = 3
_MOST = 1000  # values of one that are looked at: what a batch refers to may refer to a whole dataset


def tensors_held(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in a value, wherever they stand: alone, in a row or mapping, in an object's attributes."""
    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif _may_hold(type(leaf)):  # which torch's own functions for trees take for nothing
            yield from (each for each in _leaves_of_object(leaf) if isinstance(each, torch.Tensor))


def numbers_of_object(value: Any) -> list[Any]:
    """Return the numbers and texts in an object's attributes, which may say something about rows."""
    return [leaf for leaf in _leaves_of_object(value) if isinstance(leaf, int | float | complex | str)]


def _leaves_of_object(value: Any) -> Iterator[Any]:
    seen: set[int] = set()
    inside = [value]
    for _ in range(_DEEPEST):
        leaves = [leaf for each in inside if (held := _attributes(each)) for leaf in tree_leaves(held)]
        new = [leaf for leaf in leaves[:_MOST] if id(leaf) not in seen]
        seen.update(map(id, new))
        yield from new
        inside = [leaf for leaf in new if _may_hold(type(leaf))]


def _may_hold(kind: type) -> bool:
    """Return whether objects of a class may have tensors as attributes, and are not models."""
    if kind.__module__ == "builtins" or kind.__module__.startswith(("torch.utils.data", "numpy")):
        return False
    return not issubclass(kind, torch.Tensor | torch.nn.Module | ModuleType | type)


def _attributes(value: Any) -> list[Any]:
    if isinstance(value, Mapping):  # such as UserDict's children, which torch does not know for mappings
        return list(value.values())
    named = getattr(value, "__dict__", None) or {}
    declared = [kind.__dict__.get("__slots__", ()) for kind in type(value).__mro__]
    slots = [name for each in declared for name in ((each,) if isinstance(each, str) else each)]
    own = [name for name in slots if not name.startswith("__") and hasattr(value, name)]
    return [*named.values(), *(getattr(value, name) for name in own)]


def replace_tensors(value: Any, instead: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Put other tensors in the place of those in an object's attributes, and in lists and mappings there.

    Such as those of a cache of keys and values that a module has made and returned.
    """
    seen: set[int] = set()
    inside = [value]
    for _ in range(2 * _DEEPEST):
        found: list[Any] = []
        for each in inside:
            for place, held in list(_places(each)):
                if isinstance(held, torch.Tensor):
                    _put(each, place, instead(held))
                elif id(held) not in seen and (isinstance(held, list | tuple | Mapping) or _may_hold(type(held))):
                    seen.add(id(held))
                    found.append(held)
        inside = found


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        yield from value.items()
    elif isinstance(value, list | tuple):
        yield from enumerate(value)
    else:
        yield from getattr(value, "__dict__", {}).items()


def _put(value: Any, place: Any, tensor: torch.Tensor) -> None:
    if isinstance(value, list | dict):
        value[place] = tensor
    elif not isinstance(value, tuple | Mapping):
        object.__setattr__(value, place, tensor)  # also where a dataclass is frozen


_ATEN: Any = torch.ops.aten
FUNCTIONAL_COLLECTIVES: Any = torch.ops._c10d_functional
"""The operators that exchange tensors of ranks and return the result."""
_ON_CPU = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_ALIGNED = 8  # what the width of a head must be a multiple of: torch pads others before it calls GPUs' kernels
# What the efficient kernel rounds the number of logsumexps up to; those beyond the last row are infinite.
_ROWS = 32

Forward = Callable[..., tuple[torch.Tensor, torch.Tensor, tuple[Any, ...]]]
Backward = Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


def exchanges(function: Any) -> bool:
    """Return whether a function is one of these, by itself or by one of its overloads."""
    return str(getattr(function, "__module__", "")).endswith(f".{FUNCTIONAL_COLLECTIVES.name}")


def operator_name(operator: Any) -> str:
    """Return an operator's name without its library if that is torch's own, as in `add_`."""
    return str(operator._schema.name).removeprefix("aten::")


def argument_names(operator: Any) -> list[str]:
    """Return the names of what an operator is given, in order."""
    return [each.name for each in operator._schema.arguments]


def written_places(operator: Any) -> list[bool]:
    """Return for each argument of an operator, in order, whether it is written into."""
    return [each.alias_info is not None and each.alias_info.is_write for each in operator._schema.arguments]


@dataclass(frozen=True, slots=True)
class AttentionKernel:
    """One of torch's kernels, both ways."""

    # (query, key, value, is_causal, scale) -> the result, the logsumexp of each row (batch x heads x rows, fp32
    # or fp64), and what else backward is given. Tensors are batch x heads x positions x width, with as many heads
    # of keys as of queries
    forward: Forward
    # (gradient, query, key, value, result, logsumexp, what else, is_causal, scale) -> gradients of query, key and
    # value. Result and logsumexp may be those over more keys than these: the gradients are then what comes of
    # these keys
    backward: Backward


def kernel_for(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> AttentionKernel | None:
    """Return the kernel that torch would choose without mask and dropout; None where it has none that does this.

    The switches of torch.nn.attention.sdpa_kernel hold. Tensors are batch x heads x positions x width; of keys and
    values there may be fewer heads than of queries: the kernel is given as many.
    """
    widths = {each.size(-1) for each in (query, key, value)}
    if query.device.type == "cpu":
        fits = len(widths) == 1 and query.dtype in _ON_CPU and torch.backends.cuda.flash_sdp_enabled()
        return CPU if fits else None
    if query.device.type != "cuda" or any(width % _ALIGNED for width in widths):
        return None
    key, value = (each[:, :1].expand(-1, query.size(1), -1, -1) for each in (key, value))
    asked = torch.backends.cuda.SDPAParams(query, key, value, None, 0.0, False, False)
    if torch.backends.cuda.can_use_flash_attention(asked):
        return FLASH
    return EFFICIENT if torch.backends.cuda.can_use_efficient_attention(asked) else None


def _cpu(*inputs: Any) -> Any:
    *tensors, is_causal, scale = inputs
    return *_ATEN._scaled_dot_product_flash_attention_for_cpu(*tensors, 0.0, is_causal, scale=scale), ()


def _cpu_backward(*inputs: Any) -> Any:
    *tensors, _, is_causal, scale = inputs
    return _ATEN._scaled_dot_product_flash_attention_for_cpu_backward(*tensors, 0.0, is_causal, scale=scale)


def _flash(*inputs: Any) -> Any:
    *tensors, is_causal, scale = inputs
    result, sums, *more = _ATEN._scaled_dot_product_flash_attention(*tensors, 0.0, is_causal, scale=scale)
    return result, sums, tuple(more[:6])  # where sequences begin and end, the longest, the random state


def _flash_backward(*inputs: Any) -> Any:
    *tensors, (*limits, seed, offset), is_causal, scale = inputs
    backward = _ATEN._scaled_dot_product_flash_attention_backward
    return backward(*tensors, *limits, 0.0, is_causal, seed, offset, scale=scale)


def _efficient(*inputs: Any) -> Any:
    *tensors, is_causal, scale = inputs
    attention = _ATEN._scaled_dot_product_efficient_attention
    result, sums, *more = attention(*tensors, None, True, 0.0, is_causal, scale=scale)
    return result, sums[..., : tensors[0].size(-2)], tuple(more)


def _efficient_backward(*inputs: Any) -> Any:
    *tensors, result, sums, more, is_causal, scale = inputs
    backward = _ATEN._scaled_dot_product_efficient_attention_backward
    sums = pad(sums, (0, -sums.size(-1) % _ROWS), value=float("inf"))
    wanted = [True, True, True, False]
    return backward(*tensors, None, result, sums, *more, 0.0, wanted, is_causal, scale=scale)[:3]


CPU = AttentionKernel(_cpu, _cpu_backward)
FLASH = AttentionKernel(_flash, _flash_backward)
EFFICIENT = AttentionKernel(_efficient, _efficient_backward)
"""All versions have the three, with these arguments in this order."""


def below() -> AbstractContextManager[Any]:
    """Return a context in which operators are torch's own again, without gradients."""
    guard: AbstractContextManager[Any] = torch._C._AutoDispatchBelowAutograd()
    return guard


WAITS = (
    ("torch.distributed", "Work.wait"),
    ("torch.distributed", "_broadcast_coalesced"),
    ("torch.distributed._functional_collectives", "wait_tensor"),
)
"""Modules, and their functions in which a rank waits for others.

Every collective of `torch.distributed` ends in the first, that of gloo blocks there; DistributedDataParallel sends
buffers by the second; DTensors wait in the third.
"""
STATE_BEGUN = ("torch.distributed.checkpoint.state_dict", "_init_optim_state")
"""What steps an optimizer without gradients, so that it has the state that is to be saved or loaded."""
NEXT_BATCH = (dataloader, "_BaseDataLoaderIter.__next__")
"""What every DataLoader's iterator has, with worker processes or without."""


def call_after_backward(function: Callable[[], None]) -> None:
    """Call a function at the end of the running backward pass, after what has been asked for so before."""
    Variable._execution_engine.queue_callback(function)
