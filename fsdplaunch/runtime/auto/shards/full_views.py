"""Views of a shard's full tensor: what is written into one is written into the shard, `w[0].mul_(2)`.

Needed because a shard has no memory of what ranks have of each other: a view along the dimension that is split is
one of a full tensor that is gathered for it. The two are kept alike: the shard gets what is written into the view,
and the view what is written into the shard, when it is next looked at.
"""

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fsdplaunch.runtime.auto.shards.values import full_value
from fsdplaunch.runtime.state_dict.split_like import split_like
from fsdplaunch.runtime.torch_internals.dtensor import local_tensor
from fsdplaunch.runtime.torch_internals.tensors import change_count, note_changes, storage_identity, tree_map


class Gathered:
    """The full tensor that some views are of.

    Args:
        shard: Of which it is.
        full: Its values, plain; with its gradients where the views have some.
    """

    def __init__(self, shard: DTensor, full: torch.Tensor) -> None:
        self.shard, self.full = shard, full
        self.storage = storage_identity(full)
        self.changes = shard_changes(shard)

    def refresh(self) -> None:
        """Take the values that the shard has by now. Collective where it has changed."""
        if shard_changes(self.shard) != self.changes:
            full = full_value(self.shard, call="a view of a shard")
            self.full.data.copy_(full)  # torch would refuse to differentiate views of what counts its changes
            self.changes = shard_changes(self.shard)

    def write_back(self) -> None:
        """Give the shard what was written into the full tensor."""
        write_full(self.shard, self.full)
        self.changes = shard_changes(self.shard)


class FullView(torch.Tensor):
    """A view of a full tensor that was gathered; what is computed of it is plain."""

    gathered: Gathered


def view_of(gathered: Gathered, view: torch.Tensor) -> FullView:
    """Return a view that knows what it is of."""
    known = view.as_subclass(FullView)
    known.gathered = gathered
    return known


def plain(value: Any) -> Any:
    """Return a view's tensor without what it knows; any other value itself."""
    return value.as_subclass(torch.Tensor) if isinstance(value, FullView) else value


def as_views(result: Any, sources: list[Gathered]) -> Any:
    """Return what a function has given with views of full tensors known as such.

    Args:
        result: Of a function of full tensors.
        sources: These.
    """
    storages = {source.storage: source for source in sources}

    def known(value: Any) -> Any:
        if type(value) is not torch.Tensor or value.is_meta or value.layout != torch.strided:
            return value
        source = storages.get(storage_identity(value))
        return value if source is None else view_of(source, value)

    return tree_map(known, result)


def shard_changes(shard: Any) -> tuple[int, ...]:
    """Return what is another when a shard has other values, or other memory."""
    local = local_tensor(shard)
    return change_count(shard) + change_count(local), storage_identity(local)


@torch.no_grad()
def write_full(shard: Any, full: torch.Tensor) -> None:
    """Write into a shard its part of a full tensor, which every rank has. Without communication."""
    part: Any = split_like(full, shard)
    local_tensor(shard).copy_(local_tensor(part))
    note_changes([shard])
