"""Let what a script writes into a part of a shard, `p.data[0] = 1` or `bias[n:2 * n].fill_(1)`, be in the shard.

Needed because torch gathers what is cut along the sharded dimension: a part of a tensor is a view in one process,
and a copy here, and what is written into it is lost without a word. Writing by index it refuses.
"""

import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdplaunch.runtime.auto.dtensor.shard_handlers import full_tensor, replicated
from fsdplaunch.runtime.state_dict.optim_state_dict import cut_to_shard
from fsdplaunch.runtime.torch_internals.dtensor import local_tensor
from fsdplaunch.runtime.torch_internals.tensors import change_count, storage_identity, tree_map

PARTS = (
    *(
        "__getitem__",
        "narrow",
        "select",
        "chunk",
        "split",
        "tensor_split",
        "vsplit",
        "hsplit",
        "unbind",
        "diagonal",
    ),
    *("view", "flatten", "reshape"),
)
"""What gives parts of a tensor, or the same elements in another shape."""
FULL_WRITES = (
    *("__setitem__", "index_fill_", "index_add_", "index_copy_", "index_reduce_", "index_put_", "put_", "renorm_"),
    *("scatter_", "scatter_add_", "scatter_reduce_", "masked_scatter_", "fill_diagonal_", "cumsum_", "cumprod_"),
    *("tril_", "triu_", "addmm_", "addmv_", "addr_", "addbmm_", "baddbmm_"),
)
"""What writes elements by their place in the full tensor, which torch does for no shard."""
_OPERATORS = frozenset(f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "pow", "mod"))
_OTHERS = frozenset(
    (
        *("requires_grad_", "detach_", "rename_", "share_memory_", "resize_", "resize_as_", "set_", "as_strided_"),
        *("t_", "transpose_", "swapaxes_", "swapdims_", "squeeze_", "unsqueeze_", "apply_", "map_", "map2_"),
    )
)
"""Methods named as if they wrote, which change something else or take functions."""
_PART = "fsdplaunch_part"


def writing_methods() -> list[str]:
    """Return the names of the methods that write into a tensor, but for those that write into all of it."""
    named = (name for name in dir(torch.Tensor) if name in _OPERATORS or name[-1] == "_" != name[0])
    return [name for name in named if name not in _OTHERS and name not in FULL_WRITES]


def part(writes: Callable[[], None], func: Any, args: Any, kwargs: Any) -> Any:
    """Remember of what tensor a part was taken, and how.

    Args:
        writes: Called where there is a part: what writes into it has to be seen from then on.
        func: Torch's method that takes it.
        args: What it was called with, the tensor first.
        kwargs: What it was called with by name.
    """
    shard, *rest = args
    result = func(_source(func, shard, rest, kwargs), *rest, **kwargs)
    if not torch.compiler.is_compiling():
        several = isinstance(result, tuple | list)
        for position, each in enumerate(result if several else (result,)):
            if type(each) is DTensor and each is not shard:
                writes()
                place = position if several else None
                each.__dict__[_PART] = _Part(each, shard, partial(_taken, func, rest, kwargs, place))
    return result


def _source(func: Any, shard: Any, rest: Any, kwargs: Any) -> Any:
    """Return what torch can take the parts of: it does not cut a shard into the rows that it is split by."""
    if func.__name__ != "unbind":
        return shard
    dim = (rest[0] if rest else kwargs.get("dim", 0)) % max(shard.dim(), 1)
    return replicated(shard) if any(getattr(each, "dim", None) == dim for each in shard.placements) else shard


def _taken(func: Any, rest: Any, kwargs: Any, place: int | None, full: torch.Tensor) -> Any:
    result = func(full, *rest, **kwargs)
    return result if place is None else result[place]


class _Part:
    """How a part of a tensor was taken.

    Args:
        of: The part. A deep copy of it, which gets what it remembers, is no part any more.
        source: What it was taken of.
        take: By this function, which gives the part of a plain tensor.
    """

    def __init__(self, of: Any, source: Any, take: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.of, self.source, self.take = weakref.ref(of), source, take

    def __deepcopy__(self, memo: Any) -> "_Part":
        """Return itself: what a part was taken of is not copied with it."""
        return self

    def write_back(self, written: Any) -> None:
        """Put a part that was written to into the tensor that it was taken of. Collective where it is a copy."""
        if storage_identity(local_tensor(written)) != storage_identity(local_tensor(self.source)):
            full = _full(self.source)
            self.take(full).copy_(_full(written))
            self.source.copy_(cut_to_shard(full, self.source))
        written_back(self.source)


def is_part(tensor: Any) -> bool:
    """Return whether a shard may be a part of another one; at the least cost, since optimizers ask."""
    return _PART in tensor.__dict__


@torch.no_grad()
def written_back(tensor: Any) -> None:
    """Put what was written into a tensor into those that it is a part of."""
    taken: _Part | None = tensor.__dict__.get(_PART)
    if taken is not None and taken.of() is tensor:
        taken.write_back(tensor)


@torch.no_grad()
def write_full(func: Any, args: Any, kwargs: Any) -> Any:
    """Write into elements of a shard that an index, a mask or a place names, in the full tensor. Collective."""
    shard, *rest = args
    full = _full(shard)
    rest, kwargs = tree_map(_full, (rest, kwargs))
    func(full, *rest, **kwargs)
    shard.copy_(cut_to_shard(full, shard))
    written_back(shard)
    return shard


def rows(func: Any, args: Any, kwargs: Any) -> Any:
    """Go over the rows of the full tensor; what is written into them is in the shard when the loop has ended.

    Collective.
    """
    shard, *_ = args
    if torch.is_grad_enabled() and shard.requires_grad:
        return func(full_tensor(shard), **kwargs)
    return _rows(shard, _full(shard))


def _rows(shard: Any, full: torch.Tensor) -> Iterator[torch.Tensor]:
    before = change_count(full)
    try:
        yield from full.unbind()
    finally:
        if change_count(full) != before:
            with torch.no_grad():
                shard.copy_(cut_to_shard(full, shard))
            written_back(shard)


def counted_data(func: Any, args: Any, _kwargs: Any) -> Any:
    """Return the values of a parameter so that changes of them count as changes of it, which torch's do not.

    What was gathered of the values before would be computed with otherwise.
    """
    (param,) = args
    values = _DETACH(param) if isinstance(param, nn.Parameter) else func(param)
    if is_part(param):
        values.__dict__[_PART] = _Part(values, param, _DETACH)
    return values


_DETACH = torch.Tensor.detach
"""Torch's own, whatever stands in its place."""


def _full(value: Any) -> Any:
    if not isinstance(value, DTensor):
        return value
    detached: Any = value.detach()
    return torch.clone(detached.full_tensor())
