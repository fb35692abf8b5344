"""Let what a script writes into shards, into parts of them and into `out=` be what one process would write.

Seen at the operators whose schema says that they write, so that methods, functions, `torch.nn.init` and
`inplace=True` are all one. Needed because torch writes into the copy that a part is, fills `out=` with a shard of
another placement, and does not write elements by their place at all.
"""

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fsdplaunch.runtime.auto.dtensor.mixtures import cut_as_updated, placed_as_updated
from fsdplaunch.runtime.auto.dtensor.shard_handlers import Handler, gather, placed_like
from fsdplaunch.runtime.auto.dtensor.shard_parts import full_copy, is_part, refresh, written_back
from fsdplaunch.runtime.state_dict.optim_state_dict import cut_to_shard
from fsdplaunch.runtime.torch_internals.dtensor import (
    filled_arguments,
    gives_view,
    known_operators,
    local_tensor,
    with_local_tensor,
    writes,
)
from fsdplaunch.runtime.torch_internals.tensors import tree_leaves, tree_map

FULL_WRITES = (
    *("__setitem__", "index_fill_", "index_add_", "index_copy_", "index_reduce_", "index_put_", "put_", "renorm_"),
    *("scatter_", "scatter_add_", "scatter_reduce_", "masked_scatter_", "fill_diagonal_", "cumsum_", "cumprod_"),
    *("tril_", "triu_", "addmm_", "addmv_", "addr_", "addbmm_", "baddbmm_"),
)
"""What writes elements by their place in the full tensor, which torch does for no shard."""


_MADE_OF_VIEWS = (
    *("chunk", "narrow", "movedim", "moveaxis", "swapaxes", "swapdims", "tensor_split", "hsplit", "vsplit"),
    *("dsplit", "unflatten", "expand_as", "view_as", "matrix_H", "mH", "mT"),
)
"""What torch computes by other operators before it asks a DTensor, but for inference mode."""


_WITH_PLAIN = (
    *("allclose", "dist", "_cdist_forward", "isin", "searchsorted"),
    *("linear", "matmul", "where", "broadcast_tensors", "cosine_similarity"),  # in inference mode
)
"""What shards are computed with plain tensors by, and DTensor does not know."""
_SHARING = ("detach", "alias", "lift_fresh", "is_same_size", "is_set_to", "record_stream", "is_pinned")
"""What gives the same shard once more, or asks for its memory."""


def view_operators() -> list[Any]:
    """Return the operators that give views, by their schemas."""
    refused = torch.ops.aten.as_strided.default  # by torch, with its reason
    aten = torch.ops.aten
    unknown = [aten.unfold.default, aten.unbind.int, aten.select.int]  # to all DTensors, the last two to 2.7's
    packets = [getattr(aten, name) for name in _MADE_OF_VIEWS if hasattr(aten, name)]
    made = [getattr(packet, each) for packet in packets for each in packet.overloads()]
    known = [op for op in [*_torchs(), *made] if gives_view(op) and op is not refused]
    return list(dict.fromkeys([*unknown, *known]))


def writing_operators() -> list[Any]:
    """Return the operators that write into what they are given first, by their names."""
    return [op for op in _torchs() if is_writing(op)]


def is_writing(op: Any) -> bool:
    """Return whether an operator writes into what it is given first: `aten.add_.Tensor`."""
    return _opname(op).endswith("_")


def is_computing(op: Any) -> bool:
    """Return whether an operator computes something of what it is given, or takes a part, and writes nothing."""
    library, name, overload = str(op).split(".")
    computes = library in ("aten", "prims") and name not in _SHARING
    return computes and not is_writing(op) and "out" not in overload and not writes(op)


def computing_operators() -> list[Any]:
    """Return the operators that compute, of those that DTensor knows or refuses to mix with plain tensors."""
    packets = [getattr(torch.ops.aten, name) for name in _WITH_PLAIN]
    mixing = [getattr(packet, each) for packet in packets for each in packet.overloads()]
    return [op for op in [*known_operators(), *mixing] if is_computing(op)]


def filling_operators() -> list[Any]:
    """Return the operators that write into `out=`, by their names."""
    return [op for op in _torchs() if "out" in str(op).rpartition(".")[2]]


def _torchs() -> list[Any]:
    return [op for op in known_operators() if str(op).startswith("aten.")]


def _opname(op: Any) -> str:
    return str(op).split(".")[1]


def seen_writing(update: Handler) -> Handler:
    """Return a handler of an operator that writes, after which what was written into parts is in their shards."""

    def compute(op: Any, args: Any, kwargs: Any) -> Any:
        parts = [each for each in tree_leaves(args[0]) if isinstance(each, DTensor) and is_part(each)]
        for part in parts:
            refresh(part)
        result = update(op, args, kwargs)
        for part in parts:
            written_back(part)
        return result

    return compute


def update_placed(op: Any, args: Any, kwargs: Any) -> Any:
    """Write with operands placed as what is written into."""
    target, *operands = args
    if isinstance(target, DTensor):
        operands = cut_as_updated(target, placed_as_updated(target, tuple(operands)))
    return op(target, *operands, **kwargs)


@torch.no_grad()
def write_full(op: Any, args: Any, kwargs: Any) -> Any:
    """Write into elements of a shard that an index, a mask or a place names, in the full tensor. Collective."""
    shard, *rest = args
    rest, kwargs = tree_map(full_copy, (rest, kwargs))
    if not isinstance(shard, DTensor):
        return op(shard, *rest, **kwargs)
    written: Any = shard
    full = full_copy(written)
    op(full, *rest, **kwargs)
    written.copy_(cut_to_shard(full, written))
    return written


@torch.no_grad()
def fill_out(op: Any, args: Any, kwargs: Any) -> Any:
    """Compute beside a shard that is given as `out=`, and place the result as that is; torch would not.

    What is made of plain tensors alone is full, and cut. A plain tensor gets the full result.
    """
    names = [name for name in filled_arguments(op) if isinstance(kwargs.get(name), DTensor)]
    if not names:
        return gather(op, args, kwargs)
    sharded = [
        each
        for each in tree_leaves((args, [kwargs[name] for name in kwargs if name not in names]))
        if isinstance(each, DTensor)
    ]
    outs = [kwargs[name] for name in names]
    beside = {name: _empty_like(kwargs[name], full=not sharded) for name in names}
    op(*args, **{**kwargs, **beside})
    for name, out in zip(names, outs, strict=True):
        made: Any = beside[name]
        made = placed_like(out, made) if sharded else cut_to_shard(made, out)
        local_tensor(out).copy_(local_tensor(made))
        written_back(out)
    return outs[0] if len(outs) == 1 else tuple(outs)


def _empty_like(out: Any, *, full: bool) -> Any:
    """Return what an operator makes as large as it needs, which it warns of where there are elements."""
    empty = local_tensor(out).new_empty(0)
    return empty if full else with_local_tensor(out, empty)
