"""Let safetensors write full tensors of sharded models, one after the other: rank 0 holds one at a time."""

import collections
import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from fsdplaunch.runtime.auto.context import HookContext
from fsdplaunch.runtime.auto.state.gather import ShardGatherer, gathered
from fsdplaunch.runtime.auto.state.late_files import streaming
from fsdplaunch.runtime.auto.state.saved_paths import note_saved, path_of
from fsdplaunch.runtime.auto.state.saving_threads import in_turn
from fsdplaunch.runtime.auto.state.tensor_files import file_entries, one_by_one, storage_of, write_file
from fsdplaunch.runtime.inspection.units import has_shards
from fsdplaunch.runtime.patch import replaced
from fsdplaunch.runtime.torch_internals.dtensor import local_tensor


@contextmanager
def saving_safetensors(hook_context: HookContext) -> Iterator[None]:
    """Let `save_file`, `save_model` and `save` write full tensors; files once, by rank 0."""
    import safetensors.torch as safe

    plain = safe.save_file
    with (
        replaced(safe, "save", _save_bytes),
        replaced(safe, "save_file", lambda save: _save_file(save, hook_context)),
        replaced(safe, "save_model", lambda save: _save_model(save, plain, hook_context)),
    ):
        yield


def _save_bytes(save: Any) -> Any:
    def save_full(tensors: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        if not _sharded(tensors):
            return save(tensors, *args, **kwargs)
        gathering = ShardGatherer("safetensors' save", keep=True)
        full = gathered(tensors, gathering)
        with gathering.finish("make what safetensors' save returns"):
            return save(_detached(full), *args, **kwargs)

    return save_full


def _save_file(save: Any, hook_context: HookContext) -> Any:
    @functools.wraps(save)  # so that the library's own is found behind it
    def save_file_once(tensors: Mapping[str, Any], filename: Any, *args: Any, **kwargs: Any) -> None:
        if _sharded(tensors):  # whoever sharded them: safetensors itself cannot write one
            metadata = args[0] if args else kwargs.get("metadata")
            with in_turn("save_file"):
                gathering = ShardGatherer("save_file", keep=hook_context.rank == 0)
                gathering.keep_by_rank(path_of(filename), hook_context.ownership)
                _write(tensors, filename, metadata, gathering, save)
                _note(filename, gathering, hook_context)
        elif not hook_context.ownership.ours or hook_context.rank == 0 or hook_context.ownership.ranked:
            streaming(save)(tensors, filename, *args, **kwargs)

    return save_file_once


def _write(tensors: Mapping[str, Any], filename: Any, metadata: Any, gathering: ShardGatherer, save: Any) -> None:
    """Write a file once, one tensor after the other where safetensors has nothing to say about them."""
    if one_by_one(tensors):
        _stream(tensors, Path(filename), metadata, gathering)
        return
    full = gathered(tensors, gathering)
    with gathering.finish(f"write {filename}"):
        if gathering.keep:
            save(_detached(full), filename, metadata=metadata)


def _save_model(save: Any, save_file: Any, hook_context: HookContext) -> Any:
    def save_model_once(model: nn.Module, filename: Any, metadata: Any = None, *args: Any, **kwargs: Any) -> None:
        shards = hook_context.ownership.ours or has_shards(model)
        state = model.state_dict() if shards else {}
        if not _sharded(state):
            save(model, filename, metadata, *args, **kwargs)
            return
        kept, aliases = _without_duplicates(state)
        noted = (metadata or {}) | {name: first for name, first in aliases.items() if name not in (metadata or {})}
        with in_turn("save_model"):
            gathering = ShardGatherer("save_model", keep=hook_context.rank == 0)
            gathering.keep_by_rank(path_of(filename), hook_context.ownership)
            _write(kept, filename, noted or None, gathering, save_file)
            _note(filename, gathering, hook_context)

    return save_model_once


def _note(filename: Any, gathering: ShardGatherer, hook_context: HookContext) -> None:
    if gathering.together and not gathering.by_rank and hook_context.ownership.ours:
        note_saved(hook_context.saved, path_of(filename))


def _sharded(tensors: Mapping[str, Any]) -> bool:
    return any(isinstance(value, DTensor) for value in tensors.values())


def _detached(full: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.detach() for name, value in full.items()}


def _place(tensor: Any) -> tuple[Any, ...]:
    """Return what is equal for names of one tensor, and not for two parts of one storage."""
    local = local_tensor(tensor) if isinstance(tensor, DTensor) else tensor
    return storage_of(tensor), local.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def _without_duplicates(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return each tensor under the first of its names, and the others with that one, as safetensors does."""
    first: dict[tuple[Any, ...], str] = {}
    for name, value in sorted(state.items()):
        first.setdefault(_place(value), name)
    aliases = {name: first[_place(value)] for name, value in state.items() if first[_place(value)] != name}
    kept = {name: value.contiguous() for name, value in state.items() if name not in aliases}
    return kept, aliases


def _stream(tensors: Mapping[str, Any], path: Path, metadata: Any, gathering: ShardGatherer) -> None:
    """Write a file on rank 0 while all ranks gather, or rank 0 fetches, what is in it, one tensor at a time."""
    entries = file_entries(tensors)
    gathering.meet()
    values = (tensors[entry.name] for entry in entries)
    full = (gathering.gather(value) if isinstance(value, DTensor) else value for value in values)
    with gathering.finish(f"write {path}"):
        if not gathering.keep:
            collections.deque(full, maxlen=0)
            return
        try:
            write_file(path, entries, metadata, full)
        finally:
            if gathering.together:  # the others gather all of it
                collections.deque(full, maxlen=0)
