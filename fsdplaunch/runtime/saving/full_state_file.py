"""Full tensors of a sharded state in one file, torch's or safetensors', gathered to rank 0 one at a time.

`torch.save` wants all of them at once: they are written one after the other, as safetensors where that is wanted,
and then read back as maps of that file, of which the system keeps in memory what it has room for.
"""

import collections
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

from fsdplaunch.checkpoint.chunks import Region
from fsdplaunch.checkpoint.dtypes import DTYPES
from fsdplaunch.checkpoint.safetensors_format import TensorHeader, file_order, header_bytes
from fsdplaunch.errors import CheckpointError
from fsdplaunch.files import durable_file
from fsdplaunch.runtime.inspection import joined
from fsdplaunch.runtime.inspection.units import as_bytes
from fsdplaunch.runtime.saving.plain_files import write_large
from fsdplaunch.runtime.torch_internals.distributed import ShardedTensor, local_tensor, shape_and_offset
from fsdplaunch.runtime.torch_internals.tensors import tree_map


@dataclass(frozen=True, slots=True, eq=False)
class PendingTensor:
    """A tensor that is not here yet, and what this rank has of it.

    The name in its header is its place in the state, joined by dots.
    """

    header: TensorHeader
    dtype: torch.dtype
    source: torch.Tensor | ShardedTensor


def storable(state: Mapping[str, Any]) -> bool:
    """Say whether safetensors can hold a model's state: tensors only, of dtypes that it knows."""
    kinds = {getattr(value, "dtype", None) for value in state.values()}
    names = {str(kind).removeprefix("torch.") for kind in kinds}
    return all(name in DTYPES and DTYPES[name].code is not None for name in names)


def write_full(
    state: Any,
    torch_path: Path,
    safe_path: Path | None,
    *,
    aliases: Mapping[str, str],
    group: dist.ProcessGroup | None,
) -> None:
    """Write a sharded state in full, as rank 0's files; every rank calls this, over gloo.

    Rank 0 raises after all shards have come in, so that no other rank waits. The state is nested dictionaries and
    lists, with names of a model at the top; `aliases` are further names of tensors, each with the one under which
    the file for safetensors keeps it.
    """
    tensors: list[PendingTensor] = []

    def outline(value: Any, name: str) -> Any:
        """Put a `PendingTensor` in the place of each tensor."""
        if isinstance(value, dict):
            return {key: outline(item, joined(name, str(key))) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(outline(item, f"{name}.{number}") for number, item in enumerate(value))
        if isinstance(value, torch.Tensor | ShardedTensor):
            size, known = torch.Size(value.size()), DTYPES[str(value.dtype).removeprefix("torch.")]
            header = TensorHeader(name, known, tuple(size), size.numel() * value.dtype.itemsize)
            tensors.append(PendingTensor(header, value.dtype, value))
            return tensors[-1]
        return value

    tree = outline(state, "")
    kept = [pending for pending in tensors if pending.header.name not in aliases]
    kept.sort(key=lambda pending: file_order(pending.header))
    full = _gathered(kept, group)
    if dist.get_rank() != 0:
        collections.deque(full, maxlen=0)
        return
    path = safe_path or torch_path.with_name(f"{torch_path.name}.tmp")
    try:
        head = header_bytes([pending.header for pending in kept], aliases) if safe_path else b""
        with durable_file(path) as file:
            file.write(head)
            for tensor in full:
                as_bytes(tensor).numpy().tofile(file)
                del tensor  # before the next one is put together
        mapped = _mapped(path, len(head), kept)
        first = {pending.header.name: pending for pending in kept}
        mapped |= {each: mapped[first[aliases[each.header.name]]] for each in tensors if each not in mapped}
        filled = tree_map(lambda leaf: mapped[leaf] if isinstance(leaf, PendingTensor) else leaf, tree)
        write_large(filled, torch_path)
    except RuntimeError as error:  # what a full disk looks like in torch's writer
        msg = f"cannot write {torch_path}: {str(error).splitlines()[0]}"
        raise CheckpointError(msg) from None
    finally:
        collections.deque(full, maxlen=0)
        if safe_path is None:
            path.unlink(missing_ok=True)


def _mapped(path: Path, start: int, tensors: Iterable[PendingTensor]) -> dict[PendingTensor, torch.Tensor]:
    """Return what stands in the file from `start` on; each tensor has a storage of its own."""
    found = {}
    for pending in tensors:
        shape, nbytes = pending.header.shape, pending.header.nbytes
        if nbytes:
            memory = torch.from_numpy(np.memmap(path, np.uint8, "c", start, (nbytes,)))
            found[pending] = memory.view(pending.dtype).view(shape)
        else:
            found[pending] = torch.empty(shape, dtype=pending.dtype)
        start += nbytes
    return found


def _gathered(tensors: list[PendingTensor], group: dist.ProcessGroup | None) -> Iterator[torch.Tensor]:
    """Yield each tensor in full on rank 0, on the host; on other ranks this rank's shard of each goes out."""
    own = [_own_shards(pending.source) for pending in tensors]
    regions: list[Any] = [None] * dist.get_world_size()
    first = dist.get_rank() == 0
    dist.gather_object([[region for region, _ in each] for each in own], regions if first else None, group=group)
    if not first:
        for _, shard in itertools.chain.from_iterable(own):
            dist.send(as_bytes(shard.detach().cpu()), dst=0, group=group)
        return
    for number, pending in enumerate(tensors):
        yield _assembled(pending, own[number], [each[number] for each in regions], group)
    for number, pending in enumerate(tensors):  # only now: the other ranks send all that they have
        held: set[Region] = set().union(*(each[number] for each in regions))
        if sum(region.numel for region in held) != math.prod(pending.header.shape):
            msg = f"the ranks' shards of {pending.header.name} do not add up to {pending.header.shape}"
            raise CheckpointError(msg, hint="report this with the model and the configuration")


def _assembled(
    pending: PendingTensor,
    own: list[tuple[Region, torch.Tensor]],
    regions: list[list[Region]],
    group: dist.ProcessGroup | None,
) -> torch.Tensor:
    full = torch.empty(pending.header.shape, dtype=pending.dtype)
    for rank, held in enumerate(regions):
        for number, region in enumerate(held):
            goal = full[tuple(slice(at, at + size) for at, size in zip(*region, strict=True))]
            if rank == 0:
                goal.copy_(own[number][1])
                continue
            received = goal if goal.is_contiguous() else torch.empty(region.sizes, dtype=pending.dtype)
            dist.recv(as_bytes(received), src=rank, group=group)
            if received is not goal:
                goal.copy_(received)
    return full


def _own_shards(source: torch.Tensor | ShardedTensor) -> list[tuple[Region, torch.Tensor]]:
    """Return what this rank has to send of a tensor, each with its region; nothing if another rank sends it."""
    if isinstance(source, ShardedTensor):
        local = [(shard.metadata, shard.tensor) for shard in source.local_shards()]
        shards = [(Region(tuple(at.shard_offsets), tuple(at.shard_sizes)), tensor) for at, tensor in local]
    elif isinstance(source, DTensor):
        coordinate = source.device_mesh.get_coordinate()
        copies = zip(coordinate or (), source.placements, strict=False)
        if coordinate is None or any(at > 0 for at, kind in copies if isinstance(kind, Replicate)):
            return []
        shape, offset = shape_and_offset(source)
        shards = [(Region(offset, shape), local_tensor(source))]
    else:
        shards = [(Region((0,) * source.dim(), tuple(source.shape)), source)] if dist.get_rank() == 0 else []
    return [(region, tensor) for region, tensor in shards if tensor.numel()]
