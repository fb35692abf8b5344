"""A model's tensors without memory for as long as sharding takes; the shards are then filled from files.

How each tensor of the model gets its values:

* A parameter that the files hold is sharded without memory, and every rank reads its shard of it.
* A persistent buffer, and a parameter of an ignored module, that the files hold is read in full by every rank.
* A parameter that they do not hold (where that is allowed) keeps rank 0's values. Where rank 0 has none, its
  module initialises it. Either way it is sent and split after sharding, one at a time.
* A buffer that they do not hold keeps rank 0's values. Where rank 0 has none (a model built on meta) its
  module makes it again: by `param_init_fn`, the model's `_init_weights`, or the module's `reset_parameters`. If
  that leaves it as it was, it is an error.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fsdplaunch.runtime.inspection.model_tensors import ModelTensor
from fsdplaunch.runtime.loading.broadcast import broadcast_all
from fsdplaunch.runtime.loading.empty_storage import EmptyFlattening, empty_storage
from fsdplaunch.runtime.loading.execute_plan import execute_plan, report_loaded
from fsdplaunch.runtime.loading.load_plan import make_plan
from fsdplaunch.runtime.loading.local_shards import LocalShard, clear_padding, local_shards
from fsdplaunch.runtime.loading.match_names import RequestedTensor
from fsdplaunch.runtime.sharding.blocks import class_name
from fsdplaunch.runtime.sharding.ignored import is_special
from fsdplaunch.runtime.sharding.materialize import Materializer
from fsdplaunch.runtime.sharding.settings import Settings
from fsdplaunch.runtime.torch_internals.modules import is_persistent


class DeferredWeights(Materializer):
    """Materializes a model's tensors for sharding as the module's text says, and fills them afterwards.

    Args:
        model: Not sharded yet, on any device.
        where: A model folder or a weight file.
        strict: Whether names that are missing or left over are errors.
        settings: How the model will be sharded.
        arguments: Those of Materializer.

    Raises:
        CheckpointError: The files do not fit the model, or cannot be read; raised on every rank.
    """

    def __init__(
        self, model: nn.Module, *, where: Path, strict: bool, settings: Settings, **arguments: Any
    ) -> None:
        self.split_empty: Callable[[ModelTensor], None] | None = arguments.pop("split", None)
        super().__init__(model, origin=f"weights from {where}, strict={strict}", **arguments)
        self.settings = settings
        self.name = class_name(model)
        self.plan = make_plan(
            self.ranks, model, [self._wanted(each) for each in self.entries], where, strict=strict
        )
        self.aside: dict[str, torch.Tensor] = {}
        self.made: dict[str, torch.dtype] = {}
        self.emptied: list[ModelTensor] = []

    def _wanted(self, entry: ModelTensor) -> RequestedTensor:
        saved = any(is_persistent(module, attribute) for module, attribute in entry.places)
        shape, _, _ = self.sources[entry.name]
        return RequestedTensor(names=tuple(entry.names), shape=shape, dtype=self._dtype(entry), saved=saved)

    def _dtype(self, entry: ModelTensor) -> torch.dtype:
        """Return the dtype the tensor is going to be kept in."""
        dtype = self.sources[entry.name][1]
        due = self._is_split(entry) and (entry.tensor.requires_grad or self.frozen_too)
        due = due and not is_special(entry.tensor)
        return self.master if self.master is not None and due and dtype.is_floating_point else dtype

    def _is_split(self, entry: ModelTensor) -> bool:
        ignored = any(module in self.ignored for module, _ in entry.places)
        is_kept = not entry.spec[0] or (is_special(entry.tensor) and not entry.tensor.is_floating_point())
        return isinstance(entry.tensor, nn.Parameter) and not is_kept and not ignored

    def materialize_entries(self, due: list[ModelTensor]) -> None:
        """Materialize tensors that are not there yet; those that are read later have no values."""
        for entry in due:
            if self.plan.stored(entry.names) is None:
                continue
            if self._is_split(entry):
                self._empty(entry)
            else:
                self._make_room(entry)
            entry.materialized = True
        super().materialize_entries([entry for entry in due if not entry.materialized])
        for entry in due:
            if self._is_split(entry) and self.plan.stored(entry.names) is None:
                self._put_aside(entry)
        if self.settings.version == 1:
            self._stand_in([entry for entry in due if entry.tensor.is_meta])

    def _empty(self, entry: ModelTensor) -> None:
        shape = self.sources[entry.name][0]
        entry.exchange(torch.empty(shape, dtype=self._dtype(entry), device="meta"))
        if self.split_empty is not None:
            self.split_empty(entry)
        self.emptied.append(entry)

    def _make_room(self, entry: ModelTensor) -> None:
        """Let a tensor that stays unsharded have memory on the device; it may already."""
        tensor, dtype = entry.tensor, self._dtype(entry)
        if tensor.device != self.device or tensor.dtype != dtype or not tensor.is_contiguous():
            entry.exchange(torch.empty(self.sources[entry.name][0], dtype=dtype, device=self.device))

    def _put_aside(self, entry: ModelTensor) -> None:
        if self.ranks.is_first:
            self.aside[entry.name] = entry.tensor.detach()
        self.made[entry.name] = self._dtype(entry)
        self._empty(entry)

    def _stand_in(self, entries: Sequence[ModelTensor]) -> None:
        for entry in entries:
            entry.exchange(empty_storage(entry.tensor.shape, entry.tensor.dtype, self.device))

    def wrapping(self) -> AbstractContextManager[Any]:
        """Return what must be active while FSDP1's constructor runs."""
        return EmptyFlattening() if self.settings.version == 1 else nullcontext()

    def fill(self, sharded: nn.Module) -> None:
        """Give the sharded model memory and values, and say so; every rank calls this.

        Raises:
            CheckpointError: A rank could not read its shards; raised on every rank.
        """
        device = torch.device("cpu") if self.settings.offload else self.device
        for entry in self.emptied if self.settings.version != 1 else ():
            give_memory(entry, device)
        clear_padding(sharded)
        held = local_shards(sharded)
        loaded = execute_plan(self.ranks, self.plan, held)
        made = self._send_aside(held)
        report_loaded(self.plan, loaded, name=self.name, made=made)

    def _send_aside(self, held: Sequence[LocalShard]) -> list[str]:
        """Split the parameters that no file holds; their names."""
        due = [(shard, name, self.made[name]) for shard in held for name in shard.names if name in self.made]
        with torch.no_grad():
            broadcast_all(self.ranks, self.aside, due)
        self.aside.clear()
        return list(self.made)


def give_memory(entry: ModelTensor, device: torch.device) -> None:
    """Exchange a tensor on the meta device for one with this rank's shard of the memory, in all its places."""
    if entry.tensor.is_meta:
        entry.exchange(torch.empty_like(entry.tensor.detach(), device=device))
