"""Full tensors that only the first rank has, sent to all in pieces; every rank keeps its shard of each."""

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from fsdplaunch.checkpoint.dtypes import DTYPES
from fsdplaunch.checkpoint.model_weights import StoredWeight
from fsdplaunch.checkpoint.untrusted_files import short
from fsdplaunch.errors import CheckpointError
from fsdplaunch.runtime.collectives.rank_group import RankGroup
from fsdplaunch.runtime.loading.read_shards import LocalShard
from fsdplaunch.runtime.saving.plain_files import read_plain

PIECE = 32 * 1024 * 1024
"""Bytes that are sent at once."""
_NESTED = ("state_dict", "model_state_dict", "model", "module")


def _keep(piece: torch.Tensor, first: int, count: int, held: LocalShard) -> None:
    """Copy what this rank holds of rows `first` to `first + count` of the full tensor."""
    region, shape, local = held.region, held.cut_shape, held.local
    if not region.numel:
        return
    if not shape:
        local.copy_(piece.view(()))
        return
    begin, end = max(first, region.offsets[0]), min(first + count, region.offsets[0] + region.sizes[0])
    if begin < end:
        values = piece.view(count, *shape[1:])[(slice(begin - first, end - first), *region.inner_slices)]
        local[begin - region.offsets[0] : end - region.offsets[0]].copy_(values)


def broadcast_all(
    ranks: RankGroup, full: Mapping[str, torch.Tensor], held: Iterable[tuple[LocalShard, str, torch.dtype]]
) -> None:
    """Send tensors, that the first rank has by name, into every rank's shard of each. Collective.

    What goes wrong is raised at the end, on all ranks: none is left waiting. The shards, each with its tensor's
    name and dtype, come in the same order on all ranks.
    """
    failure: RuntimeError | None = None
    for shard, name, dtype in held:
        row = math.prod(shard.cut_shape[1:])
        rows = shard.cut_shape[0] if shard.cut_shape else 1
        most = max(1, PIECE // max(1, row * dtype.itemsize))
        flat = full[name].detach().contiguous().view(-1) if name in full else None
        for first in range(0, rows if row else 0, most):
            count = min(most, rows - first)
            piece = torch.empty(count * row, dtype=dtype, device=ranks.device)
            try:
                if flat is not None:
                    piece.copy_(flat[first * row : (first + count) * row])
            except RuntimeError as error:
                failure = failure or error
            ranks.send(piece)
            try:
                _keep(piece, first, count, shard)
            except RuntimeError as error:
                failure = failure or error
    with ranks.raise_on_all("take over the first rank's tensors"):
        if failure is not None:
            raise failure


def open_pickled(paths: Iterable[Path]) -> dict[str, tuple[int, torch.Tensor]]:
    """Return the tensors of files of `torch.save` by name, each with its file's number; no code of theirs is run.

    They are maps of the files where possible.
    """
    found: dict[str, tuple[int, torch.Tensor]] = {}
    for number, path in enumerate(paths):
        state = _tensors(read_plain(path, checksums=False))
        if state is None:
            msg = f"{path} does not hold tensors by name"
            raise CheckpointError(msg, hint="save model.state_dict(), not the model or a larger structure")
        found |= {name: (number, tensor) for name, tensor in state.items()}
    return found


def _tensors(value: Any) -> dict[str, torch.Tensor] | None:
    """Return the tensors of a state dict, or of the one inside of it; version counts and the like are left out."""
    if not isinstance(value, Mapping):
        return None
    inner = next((inner for key in _NESTED if (inner := _tensors(value.get(key))) is not None), None)
    tensors = {str(name): each for name, each in value.items() if isinstance(each, torch.Tensor)}
    return inner or tensors or None


def describe_pickled(found: Mapping[str, tuple[int, torch.Tensor]]) -> dict[str, StoredWeight]:
    """Return what opened files hold, in the form of safetensors headers."""
    described = {}
    for name, (number, tensor) in found.items():
        if tensor.layout is not torch.strided or tensor.is_quantized:
            msg = f"{short(name)} is sparse or quantized"
            raise CheckpointError(msg, hint="load this model with the library that wrote it")
        dtype = DTYPES.get(str(tensor.dtype).removeprefix("torch."))
        described[name] = StoredWeight(name, number, str(tensor.dtype), dtype, tuple(tensor.shape), 0)
    return described
