"""What a merge will do, as data: which bytes go where. Pure; the merge and `--dry-run` use the same plan."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from operator import mul
from typing import Any

from fsdplaunch.checkpoint.chunks import ItemLocation, Piece, Region, is_dense, is_one_run, row_major
from fsdplaunch.checkpoint.dtypes import Dtype, written_dtype
from fsdplaunch.checkpoint.merge.weight_names import Selection
from fsdplaunch.checkpoint.readers.dcp_index import StoredTensor
from fsdplaunch.checkpoint.readers.torch_zip import TorchZipItem
from fsdplaunch.checkpoint.safe_pickle.tensor_classes import TensorDescription
from fsdplaunch.checkpoint.safetensors_format import (
    INDEX_NAME,
    TensorHeader,
    file_shape,
    header_bytes,
    index_bytes,
    split_into_files,
)
from fsdplaunch.checkpoint.untrusted_files import short
from fsdplaunch.errors import CheckpointError

_FLOATS = {"float64", "float32", "float16", "bfloat16"}


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """One tensor of an output file.

    Attributes:
        name: Its name there.
        stored_name: Its name in the checkpoint.
        dtype: Its dtype in the checkpoint.
        shape: Its shape in elements.
        offset: Where it starts, in bytes from the file's start.
        nbytes: Its size there, in bytes.
        pieces: Its chunks, in target order.
        written: Its dtype in the output file.
    """

    name: str
    stored_name: str
    dtype: Dtype
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    pieces: tuple[Piece, ...]
    written: Dtype

    @property
    def in_runs(self) -> bool:
        """Return whether every chunk is one run of bytes, there and here, and the same bytes."""
        return self.written is self.dtype and all(piece.run for piece in self.pieces)

    def to_dict(self) -> dict[str, Any]:
        """Return the tensor as plain data."""
        return {
            "name": self.name,
            "stored_name": self.stored_name,
            "dtype": self.written.code,
            "stored_dtype": self.dtype.name,
            "shape": list(file_shape(self.written, self.shape)),
            "offset": self.offset,
            "bytes": self.nbytes,
            "copies": [piece.to_dict(self.dtype.size) for piece in self.pieces],
        }


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """One output file: its header's bytes, then its tensors."""

    name: str
    header: bytes
    tensors: tuple[PlannedTensor, ...]

    @property
    def nbytes(self) -> int:
        """Return the bytes of the finished file."""
        return len(self.header) + sum(tensor.nbytes for tensor in self.tensors)


@dataclass(frozen=True, slots=True, kw_only=True)
class MergePlan:
    """Everything a merge writes.

    Attributes:
        files: The safetensors files.
        index: The bytes of `model.safetensors.index.json`, None when one file is enough.
    """

    files: tuple[PlannedFile, ...]
    index: bytes | None

    @property
    def nbytes(self) -> int:
        """Return the bytes of all files together."""
        return sum(file.nbytes for file in self.files) + len(self.index or b"")

    @property
    def tensor_bytes(self) -> int:
        """Return the bytes of the tensors alone."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def tensors(self) -> tuple[PlannedTensor, ...]:
        """Return all tensors, file by file."""
        return tuple(tensor for file in self.files for tensor in file.tensors)

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain data, for printing and for programs."""
        files = [
            {"name": file.name, "bytes": file.nbytes, "tensors": [tensor.to_dict() for tensor in file.tensors]}
            for file in self.files
        ]
        return {"bytes": self.nbytes, "files": files, "index": INDEX_NAME if self.index else None}


def build_plan(
    selection: Selection,
    items: Mapping[ItemLocation, TorchZipItem],
    *,
    max_shard_size: int,
    dtype: str | None = None,
    aliases: Mapping[str, str] | None = None,
) -> MergePlan:
    """Return the plan that merges the selected tensors.

    Args:
        selection: Names and tensors.
        items: Where each chunk's bytes are.
        max_shard_size: Bytes of tensors in one file; more are split over several.
        dtype: `bf16`, `fp16` or `fp32` to convert floating-point weights to.
        aliases: Names that are not written, with the name that holds their weight; the files' metadata says so.

    Raises:
        CheckpointError: When a tensor's dtype has no safetensors code.
    """
    stored = dict(selection.tensors)
    entries = [_entry(name, tensor, dtype) for name, tensor in selection.tensors]
    groups = split_into_files(entries, max_shard_size)
    files = tuple(_plan_file(name, group, stored, items, aliases or {}) for name, group in groups)
    return MergePlan(files=files, index=index_bytes(dict(groups)) if len(groups) > 1 else None)


def _entry(name: str, tensor: StoredTensor, target: str | None) -> TensorHeader:
    if tensor.dtype.code is None:
        msg = f"{short(name)} is {tensor.dtype.name}, which safetensors cannot hold"
        raise CheckpointError(msg, hint="merge into the torch format instead (safe_serialization=False)")
    written = written_dtype(tensor.dtype, target)
    return TensorHeader(name, written, tensor.shape, math.prod(tensor.shape) * written.size)


def _plan_file(
    name: str,
    entries: list[TensorHeader],
    stored: Mapping[str, StoredTensor],
    items: Mapping[ItemLocation, TorchZipItem],
    aliases: Mapping[str, str],
) -> PlannedFile:
    here = {entry.name for entry in entries}
    header = header_bytes(entries, {alias: kept for alias, kept in aliases.items() if kept in here})
    offset = len(header)
    tensors = []
    for entry in entries:
        tensor = stored[entry.name]
        pieces = plan_pieces(tensor, items)
        planned = PlannedTensor(
            entry.name, tensor.name, tensor.dtype, entry.shape, offset, entry.nbytes, pieces, entry.dtype
        )
        tensors.append(planned)
        offset += entry.nbytes
    return PlannedFile(name, header, tuple(tensors))


def plan_alone(tensor: StoredTensor, items: Mapping[ItemLocation, TorchZipItem]) -> PlannedTensor:
    """Return how a tensor is put together by itself, starting at byte 0."""
    pieces = plan_pieces(tensor, items)
    return PlannedTensor(
        tensor.name, tensor.name, tensor.dtype, tensor.shape, 0, tensor.nbytes, pieces, tensor.dtype
    )


def plan_pieces(tensor: StoredTensor, items: Mapping[ItemLocation, TorchZipItem]) -> tuple[Piece, ...]:
    """Return how a tensor's chunks get into it, in their order."""
    size, steps = tensor.dtype.size, row_major(tensor.shape)
    # Nearly all chunks of a tensor are laid out alike; a description lives as long as its item.
    layouts: dict[tuple[tuple[int, ...], int], tuple[int, bool, int]] = {}
    pieces = []
    for region, place in tensor.chunks:
        found, data_offset, data_length, crc = items[place]
        kind = (region[1], id(found))
        layout = layouts.get(kind)
        if layout is None:
            layout = layouts[kind] = _layout(tensor, region, found)
        flip, run, nbytes = layout
        file_offset, target = place[1] + data_offset, sum(map(mul, region[0], steps)) * size
        pieces.append(
            Piece(
                *(region, place, file_offset, data_length, found.strides, found.start, crc, flip, run),
                *(target, nbytes),
            )
        )
    return tuple(pieces)


def _layout(tensor: StoredTensor, region: Region, found: TensorDescription) -> tuple[int, bool, int]:
    """Return which bits of a chunk's elements are inverted, whether it is one run of bytes, and how many."""
    flip = _flip_bits(tensor, conjugated=found.conjugated, negated=found.negated)
    run = not flip and is_dense(found.shape, found.strides) and is_one_run(tensor.shape, region.sizes)
    return flip, run, math.prod(region.sizes) * tensor.dtype.size


def _flip_bits(tensor: StoredTensor, *, conjugated: bool, negated: bool) -> int:
    """Return which bits of an element turn the stored bytes into the value."""
    if not conjugated and not negated:
        return 0
    complex_value = tensor.dtype.name.startswith("complex")
    if not complex_value and (conjugated or tensor.dtype.name not in _FLOATS):
        msg = f"{short(tensor.name)} is {tensor.dtype.name} and marked as conjugated or negated"
        raise CheckpointError(msg, hint="the checkpoint is damaged")
    top = 1 << (8 * tensor.dtype.size - 1)
    both_parts = top | 1 << (4 * tensor.dtype.size - 1) if complex_value else top
    return (top if conjugated else 0) ^ (both_parts if negated else 0)
