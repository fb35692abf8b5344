"""Remember of what shard a tensor is a part, so that what a script writes into the part is in the shard.

Needed because torch gathers what is cut along the sharded dimension: a part of a tensor is a view in one process,
and a copy here, and what is written into it is lost without a word. Seen at the operators that torch marks as
views, so that it does not matter by which function or method a part is taken.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor, Replicate, Shard

from fsdplaunch.runtime.auto.dtensor.shard_handlers import Handler, full_tensor, is_replicated
from fsdplaunch.runtime.state_dict.optim_state_dict import cut_to_shard
from fsdplaunch.runtime.torch_internals.dtensor import gives_view, local_tensor, placements_of, shape_and_offset
from fsdplaunch.runtime.torch_internals.tensors import change_count, storage_identity, tree_map

_PART = "fsdplaunch_part"
_MOST_PLACED = 2**16
"""Elements of a part that are put into a shard each by its place, which takes memory."""


def take_part(begun: Callable[[], None], op: Any, args: Any, kwargs: Any) -> Any:
    """Run an operator that gives views, and remember what is a copy here; not of what a model computes.

    Args:
        begun: Called where there is a part: what writes into it has to be seen from then on.
        op: Torch's operator.
        args: What it was called with, the tensor first.
        kwargs: What it was called with by name.
    """
    source, *rest = args
    with outside_of_inference_mode(source):
        result = _taken_by(op, source, rest, kwargs)
    if not torch.compiler.is_compiling() and (is_part(source) or source.grad_fn is None):

        def is_copy(each: Any) -> bool:
            return type(each) is DTensor and each is not source and (is_part(source) or not _shares(each, source))

        if remember_parts(result, source, partial(taken_of, op, rest, kwargs), is_copy):
            begun()
    return result


@contextmanager
def outside_of_inference_mode(source: Any = None) -> Iterator[None]:
    """Make views of a shard as they are elsewhere: torch's, made in inference mode, have no count of changes.

    `Cannot set version_counter for inference tensor` it says then, for it shares the count of the shard.

    Args:
        source: Of which a view is made; one that was made in inference mode stays as it is.
    """
    if not torch.is_inference_mode_enabled() or (source is not None and source.is_inference()):
        yield
        return
    with torch.inference_mode(mode=False), torch.no_grad():
        yield


def compute_plainly(op: Any, args: Any, kwargs: Any) -> Any:
    """Run torch's operator, of which no view can be had in inference mode, whoever has sharded the tensor."""
    if not torch.is_inference_mode_enabled() or not gives_view(op):
        return op(*args, **kwargs)
    with outside_of_inference_mode(args[0]):
        return op(*args, **kwargs)


def _taken_by(op: Any, source: Any, rest: Any, kwargs: Any) -> Any:
    """Return what an operator gives; of the full tensor where torch knows no way to take it of shards."""
    try:
        return op(source, *rest, **kwargs)
    except (NotImplementedError, RuntimeError):
        if torch.is_grad_enabled() and source.requires_grad and not is_replicated(source):
            raise
    mesh = source.device_mesh
    placements = [Replicate()] * mesh.ndim
    result = op(full_tensor(source.detach()), *rest, **kwargs)
    return tree_map(lambda each: DTensor.from_local(each, mesh, placements, run_check=False), result)


def _shares(tensor: Any, source: Any) -> bool:
    return storage_identity(local_tensor(tensor)) == storage_identity(local_tensor(source))


def remember_parts(
    result: Any, source: Any, take: Callable[[torch.Tensor], Any], is_copy: Callable[[Any], bool] = lambda _: True
) -> bool:
    """Remember of what those of a function's results that are copies were taken; return whether any is.

    Args:
        result: One tensor, or several.
        source: What they were taken of.
        take: Gives the same of a plain tensor.
        is_copy: Whether a result is.
    """
    several, found = isinstance(result, tuple | list), False
    seen = [change_count(source)]
    for position, each in enumerate(result if several else (result,)):
        if is_copy(each):
            each.__dict__[_PART] = _Part(each, source, partial(_at, take, position) if several else take, seen)
            found = True
    return found


def taken_of(op: Any, rest: Any, kwargs: Any, tensor: torch.Tensor) -> Any:
    """Return what an operator or a function takes of another tensor, with the arguments that follow it."""
    return op(tensor, *rest, **kwargs)


def _at(take: Callable[[torch.Tensor], Any], position: int, tensor: torch.Tensor) -> Any:
    return take(tensor)[position]


class _Part:
    """How a part of a tensor was taken.

    Args:
        of: The part. A deep copy of it, which gets what it remembers, is no part any more.
        source: What it was taken of.
        take: By this function, which gives the part of a plain tensor.
        seen: How often the source was changed when the part was last equal to it; one list for what was taken
            together, since such parts have no element in common.
    """

    def __init__(
        self, of: Any, source: Any, take: Callable[[torch.Tensor], torch.Tensor], seen: list[int]
    ) -> None:
        self.of, self.source, self.take, self.seen = weakref.ref(of), source, take, seen

    def __deepcopy__(self, memo: Any) -> "_Part":
        """Return itself: what a part was taken of is not copied with it."""
        return self

    def refresh(self, tensor: Any) -> None:
        """Give a part what was written into its source since. Collective where it has to be taken anew."""
        refresh(self.source)
        if self.seen[0] != change_count(self.source) and not _shares(tensor, self.source):
            fresh = self.take(full_copy(self.source))
            local_tensor(tensor).copy_(local_tensor(cut_to_shard(fresh, tensor)))

    def write_back(self, written: Any) -> None:
        """Put a part that was written to into the tensor that it was taken of.

        Collective where it is a copy, and where ranks have different parts of it or it is large.
        """
        if not _shares(written, self.source):
            full = full_copy(written)
            if not _is_cut_in_blocks(self.source) or full.numel() > _MOST_PLACED:
                every = full_copy(self.source)
                self.take(every).copy_(full)
                local_tensor(self.source).copy_(local_tensor(cut_to_shard(every, self.source)))
            else:
                self._place(full)
            if not self.source.is_inference():
                increment_version(self.source)
        self.seen[0] = change_count(self.source) + 1  # torch counts the change of the part when it has ended
        written_back(self.source)

    def _place(self, full: torch.Tensor) -> None:
        """Put each element of the part that this rank's shard has where it is."""
        at = self.take(torch.empty(self.source.shape, device="meta"))
        flat = torch.full(at.shape, int(at.storage_offset()))
        for dim, (size, stride) in enumerate(zip(at.shape, at.stride(), strict=True)):
            flat += (torch.arange(size) * stride).view([-1] + [1] * (at.dim() - dim - 1))
        shard = local_tensor(self.source)
        shape, begin = shape_and_offset(self.source)
        places = torch.unravel_index(flat.reshape(-1), tuple(self.source.shape))
        own = [place - first for place, first in zip(places, begin, strict=True)]
        held = torch.ones(flat.numel(), dtype=torch.bool)
        for place, size in zip(own, shape, strict=True):
            held &= (place >= 0) & (place < size)
        values = full.reshape(-1)[held.to(full.device)].to(shard)
        shard[tuple(place[held].to(shard.device) for place in own)] = values


def _is_cut_in_blocks(tensor: Any) -> bool:
    return tensor.dim() > 0 and all(type(each) in (Shard, Replicate) for each in placements_of(tensor))


def is_part(tensor: Any) -> bool:
    """Return whether a shard may be a part of another one; at the least cost, since optimizers ask."""
    return _PART in tensor.__dict__


def _part_of(tensor: Any) -> _Part | None:
    taken: _Part | None = tensor.__dict__.get(_PART) if isinstance(tensor, DTensor) else None
    return taken if taken is not None and taken.of() is tensor else None


def origin_of(tensor: Any) -> Any:
    """Return what a part was taken of in the end; any other tensor itself."""
    while (taken := _part_of(tensor)) is not None:
        tensor = taken.source
    return tensor


def fresh(handler: Handler) -> Handler:
    """Return a handler that reads parts as their sources are now."""

    def compute(func: Any, args: Any, kwargs: Any) -> Any:
        if args and isinstance(args[0], DTensor) and is_part(args[0]):
            refresh(args[0])
        return handler(func, args, kwargs)

    return compute


@torch.no_grad()
def refresh(tensor: Any) -> None:
    """Give a tensor that is a part the values that its source has now."""
    taken = _part_of(tensor)
    if taken is not None:
        taken.refresh(tensor)


@torch.no_grad()
def written_back(tensor: Any) -> None:
    """Put what was written into a tensor into those that it is a part of."""
    taken = _part_of(tensor)
    if taken is not None:
        taken.write_back(tensor)


def counted_data(func: Any, args: Any, _kwargs: Any) -> Any:
    """Return the values of a parameter so that changes of them count as changes of it, which torch's do not.

    What was gathered of the values before would be computed with otherwise.
    """
    (param,) = args
    return _DETACH(param) if isinstance(param, nn.Parameter) or is_part(param) else func(param)


_DETACH = torch.Tensor.detach
"""Torch's own, whatever stands in its place."""


def full_copy(value: Any) -> Any:
    """Return the full tensor of a shard, which may be written into; any other value itself. Collective."""
    if not isinstance(value, DTensor):
        return value
    detached: Any = value.detach()
    return torch.clone(detached.full_tensor())
