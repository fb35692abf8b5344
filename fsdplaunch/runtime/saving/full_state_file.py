"""Full tensors of a sharded state in one file, torch's or safetensors', gathered to rank 0 one at a time.

`torch.save` wants all of them in memory; under `torch.serialization.skip_data` it leaves room for tensors that are
filled in later, but writes no checksum of them.
"""

import collections
import io
import os
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

from fsdplaunch.checkpoint.chunks import Region
from fsdplaunch.checkpoint.dtypes import DTYPES, STORAGES
from fsdplaunch.checkpoint.safetensors_format import TensorHeader, header_bytes, in_file_order
from fsdplaunch.errors import CheckpointError
from fsdplaunch.runtime.inspection.parameters import joined
from fsdplaunch.runtime.inspection.units import as_bytes
from fsdplaunch.runtime.torch_internals.checkpoint import tensor_builder, zip_writer
from fsdplaunch.runtime.torch_internals.distributed import ShardedTensor, local_tensor, shape_and_offset

_STORAGE_OF = {dtype.name: name for name, dtype in STORAGES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingTensor:
    """A tensor that is not here yet: what a file says about it before its bytes.

    Attributes:
        name: Its place in the state, joined by dots.
        key: Its number in the torch file.
        source: What this rank has of it.
    """

    name: str
    key: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    source: torch.Tensor | ShardedTensor

    @property
    def nbytes(self) -> int:
        """Return the bytes of all its elements."""
        return int(torch.Size(self.shape).numel() * self.dtype.itemsize)


def header_entry(pending: PendingTensor) -> TensorHeader:
    """Return what a safetensors header says of a tensor."""
    name = str(pending.dtype).removeprefix("torch.")
    return TensorHeader(pending.name, DTYPES[name], pending.shape, pending.nbytes)


class TorchFile:
    """A file as `torch.save` writes it, whose tensors come one after the other."""

    def __init__(self, path: Path, tree: Any) -> None:
        self._path = path
        self._tree = tree

    def __enter__(self) -> "TorchFile":
        self._writer: Any = zip_writer(str(self._path))
        data = io.BytesIO()
        _Pickler(data, protocol=2).dump(self._tree)
        self._writer.write_record("data.pkl", data.getvalue(), len(data.getvalue()))
        self._writer.write_record("byteorder", b"little", len(b"little"))
        return self

    def write(self, pending: PendingTensor, tensor: torch.Tensor) -> None:
        """Append one tensor's bytes."""
        self._writer.write_record(f"data/{pending.key}", tensor.untyped_storage(), pending.nbytes)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self._writer.write_end_of_file()
        except RuntimeError as error:  # what a full disk looks like here
            if kind is None:
                msg = f"cannot write {self._path}: {str(error).splitlines()[0]}"
                raise CheckpointError(msg) from None
        if kind is None:
            force(self._path)


class _Pickler(pickle.Pickler):
    """Pickles a `PendingTensor` as the tensor it stands for."""

    def persistent_id(self, value: Any) -> Any:
        return value.persistent_id if isinstance(value, _PendingStorage) else None

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, PendingTensor):
            return NotImplemented
        stride = torch.empty(value.shape, device="meta").stride()
        hooks: Any = collections.OrderedDict()
        common = (_PendingStorage(value), 0, value.shape, stride, False, hooks)
        if _storage_class(value.dtype) is not None:
            return tensor_builder(with_dtype=False), common
        return tensor_builder(with_dtype=True), (*common, value.dtype)


def _storage_class(dtype: torch.dtype) -> Any:
    return getattr(torch, _STORAGE_OF.get(str(dtype).removeprefix("torch."), ""), None)


class _PendingStorage:
    """The persistent id of a tensor's memory in a torch file."""

    def __init__(self, pending: PendingTensor) -> None:
        kind = _storage_class(pending.dtype)
        elements = pending.nbytes // (1 if kind is None else pending.dtype.itemsize)
        self.persistent_id = ("storage", kind or torch.UntypedStorage, str(pending.key), "cpu", elements)


class SafeFile:
    """A safetensors file whose tensors come one after the other; none for no path."""

    def __init__(self, path: Path | None, tensors: list[PendingTensor], aliases: Mapping[str, str]) -> None:
        self._path = path
        self._aliases = aliases
        self._entries = [header_entry(pending) for pending in tensors if pending.name not in aliases]
        self._file: BinaryIO | None = None

    def __enter__(self) -> "SafeFile":
        if self._path is not None:
            self._file = self._path.open("wb")
            self._file.write(header_bytes(self._entries, self._aliases))
        return self

    def write(self, pending: PendingTensor, tensor: torch.Tensor) -> None:
        """Append one tensor's bytes, unless the tensor stands here under another name."""
        if self._file is not None and pending.name not in self._aliases:
            as_bytes(tensor).numpy().tofile(self._file)

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()


def force(path: Path) -> None:
    """Force a file that was written before to disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def storable(state: Mapping[str, Any]) -> bool:
    """Say whether safetensors can hold a model's state: tensors only, of dtypes that it knows."""
    kinds = {getattr(value, "dtype", None) for value in state.values()}
    names = {str(kind).removeprefix("torch.") for kind in kinds}
    return all(name in DTYPES and DTYPES[name].code is not None for name in names)


def outline(state: Any) -> tuple[Any, list[PendingTensor]]:
    """Return a state with a `PendingTensor` in the place of each tensor, and those in their order."""
    found: list[PendingTensor] = []

    def visit(value: Any, name: str) -> Any:
        if isinstance(value, dict):
            return {key: visit(item, joined(name, str(key))) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(visit(item, f"{name}.{number}") for number, item in enumerate(value))
        if isinstance(value, torch.Tensor | ShardedTensor):
            shape = tuple(value.size())
            found.append(PendingTensor(name=name, key=len(found), dtype=value.dtype, shape=shape, source=value))
            return found[-1]
        return value

    return visit(state, ""), found


def write_full(
    state: Any,
    torch_path: Path,
    safe_path: Path | None,
    *,
    aliases: Mapping[str, str],
    group: dist.ProcessGroup | None,
) -> None:
    """Write a sharded state in full, as rank 0's files; every rank calls this.

    Args:
        state: Nested dictionaries and lists; names of a model at the top.
        torch_path: For `torch.load`.
        safe_path: For safetensors as well, or None.
        aliases: Further names of tensors, each with the one under which safetensors keeps it.
        group: All ranks, over gloo.

    Raises:
        OSError: On rank 0, after all shards have come in, so that no other rank waits.
    """
    tree, tensors = outline(state)
    entries = in_file_order(list(map(header_entry, tensors)))
    order = {entry.name: at for at, entry in enumerate(entries)}
    tensors.sort(key=lambda pending: order[pending.name])
    gathered_tensors = gathered(tensors, group)
    if dist.get_rank() != 0:
        collections.deque(gathered_tensors, maxlen=0)
        return
    try:
        with TorchFile(torch_path, tree) as plain, SafeFile(safe_path, tensors, aliases) as safe:
            for pending, tensor in gathered_tensors:
                plain.write(pending, tensor)
                safe.write(pending, tensor)
                del tensor  # before the next one is put together
    finally:
        collections.deque(gathered_tensors, maxlen=0)


def gathered(
    tensors: list[PendingTensor], group: dist.ProcessGroup | None
) -> Iterator[tuple[PendingTensor, torch.Tensor]]:
    """Yield each tensor in full on rank 0, on the host; on other ranks this rank's shard of each goes out."""
    own = [_own_shards(pending.source) for pending in tensors]
    regions: list[Any] = [None] * dist.get_world_size()
    first = dist.get_rank() == 0
    dist.gather_object([[region for region, _ in each] for each in own], regions if first else None, group=group)
    if not first:
        for pending, shards in zip(tensors, own, strict=True):
            for _, shard in shards:
                dist.send(as_bytes(shard.detach().cpu()), dst=0, group=group)
            yield pending, _NOTHING
        return
    for number, pending in enumerate(tensors):
        yield pending, _assembled(pending, own[number], [each[number] for each in regions], group)


_NOTHING = torch.empty(0)


def _assembled(
    pending: PendingTensor,
    own: list[tuple[Region, torch.Tensor]],
    regions: list[list[Region]],
    group: dist.ProcessGroup | None,
) -> torch.Tensor:
    full = torch.empty(pending.shape, dtype=pending.dtype)
    covered: set[Region] = set()
    for rank, held in enumerate(regions):
        for number, region in enumerate(held):
            covered.add(region)
            goal = full[tuple(slice(at, at + size) for at, size in zip(*region, strict=True))]
            if rank == 0:
                goal.copy_(own[number][1])
            elif goal.is_contiguous():
                dist.recv(as_bytes(goal), src=rank, group=group)
            else:
                received = torch.empty(region.sizes, dtype=pending.dtype)
                dist.recv(as_bytes(received), src=rank, group=group)
                goal.copy_(received)
    if sum(region.numel for region in covered) != full.numel():
        msg = f"the ranks' shards of {pending.name} do not add up to {tuple(pending.shape)}"
        raise CheckpointError(msg, hint="report this with the model and the configuration")
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
