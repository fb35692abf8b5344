"""What a merge will do, as data: which bytes go where. Pure; the merge and `--dry-run` use the same plan."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from operator import mul
from typing import Any

from fsdplaunch.checkpoint.chunks import ItemLocation, Piece, is_dense, row_major
from fsdplaunch.checkpoint.dtypes import DTYPES, TARGETS, Dtype
from fsdplaunch.checkpoint.merge.weight_names import Selection
from fsdplaunch.checkpoint.readers.dcp_index import StoredTensor
from fsdplaunch.checkpoint.readers.torch_zip import TorchZipItem
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

_CONVERTIBLE = {"float64", "float32", "float16", "bfloat16"}


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """One tensor of an output file."""

    name: str  # its name there
    stored_name: str  # its name in the checkpoint
    dtype: Dtype  # its dtype in the checkpoint
    shape: tuple[int, ...]  # its shape in elements
    offset: int  # where it starts, in bytes from the file's start
    nbytes: int  # its size there, in bytes
    pieces: tuple[Piece, ...]  # its chunks, in target order
    written: Dtype  # its dtype in the output file

    @property
    def in_runs(self) -> bool:
        """Return whether every chunk is one run of bytes, there and here, and the same bytes."""
        return self.written is self.dtype and all(piece.run for piece in self.pieces)


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
    """Everything a merge writes."""

    files: tuple[PlannedFile, ...]  # the safetensors files
    index: bytes | None  # the bytes of `model.safetensors.index.json`, None when one file is enough

    @property
    def names(self) -> list[str]:
        """Return the names of all files, the index's last."""
        return [*(file.name for file in self.files), *([INDEX_NAME] if self.index else [])]

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
            {
                "name": file.name,
                "bytes": file.nbytes,
                "tensors": [
                    {
                        "name": tensor.name,
                        "stored_name": tensor.stored_name,
                        "dtype": tensor.written.code,
                        "stored_dtype": tensor.dtype.name,
                        "shape": list(file_shape(tensor.written, tensor.shape)),
                        "offset": tensor.offset,
                        "bytes": tensor.nbytes,
                    }
                    for tensor in file.tensors
                ],
            }
            for file in self.files
        ]
        return {"bytes": self.nbytes, "files": files, "index": INDEX_NAME if self.index else None}


def build_plan(
    selection: Selection,
    items: Mapping[ItemLocation, TorchZipItem],  # where each chunk's bytes are
    *,
    max_shard_size: int,  # bytes of tensors in one file; more are split over several
    dtype: str | None = None,  # `bf16`, `fp16` or `fp32` to convert floating-point weights to
    # Names that are not written, with the name that holds their weight; the files' metadata says so.
    aliases: Mapping[str, str] | None = None,
) -> MergePlan:
    """Return the plan that merges the selected tensors.

    Raises:
        CheckpointError: When a tensor's dtype has no safetensors code.
    """
    entries = []
    for name, tensor in selection.tensors:
        if tensor.dtype.code is None:
            msg = f"{short(name)} is {tensor.dtype.name}, which safetensors cannot hold"
            raise CheckpointError(msg, hint="merge into the torch format instead (safe_serialization=False)")
        written = DTYPES[TARGETS[dtype]] if dtype and tensor.dtype.name in _CONVERTIBLE else tensor.dtype
        entries.append(TensorHeader(name, written, tensor.shape, math.prod(tensor.shape) * written.size))
    stored, files = dict(selection.tensors), []
    groups = split_into_files(entries, max_shard_size)
    for file, group in groups:
        here = {entry.name for entry in group}
        header = header_bytes(group, {alias: kept for alias, kept in (aliases or {}).items() if kept in here})
        planned, offset = [], len(header)
        for name, written, shape, nbytes in group:
            tensor = stored[name]
            pieces = plan_pieces(tensor, items)
            planned.append(PlannedTensor(name, tensor.name, tensor.dtype, shape, offset, nbytes, pieces, written))
            offset += nbytes
        files.append(PlannedFile(file, header, tuple(planned)))
    return MergePlan(files=tuple(files), index=index_bytes(dict(groups)) if len(groups) > 1 else None)


def plan_alone(tensor: StoredTensor, items: Mapping[ItemLocation, TorchZipItem]) -> PlannedTensor:
    """Return how a tensor is put together by itself, starting at byte 0."""
    name, dtype, pieces = tensor.name, tensor.dtype, plan_pieces(tensor, items)
    return PlannedTensor(name, name, dtype, tensor.shape, 0, tensor.nbytes, pieces, dtype)


def plan_pieces(tensor: StoredTensor, items: Mapping[ItemLocation, TorchZipItem]) -> tuple[Piece, ...]:
    """Return how a tensor's chunks get into it, in their order."""
    size, steps = tensor.dtype.size, row_major(tensor.shape)
    # Nearly all chunks of a tensor are laid out alike; a description lives as long as its item.
    layouts: dict[tuple[tuple[int, ...], int], tuple[bool, int]] = {}
    pieces = []
    for region, place in tensor.chunks:
        found, data_offset, data_length, crc = items[place]
        kind = (region[1], id(found))
        layout = layouts.get(kind)
        if layout is None:
            run = is_dense(found.shape, found.strides) and is_dense(region.sizes, steps)
            layout = layouts[kind] = (run, region.numel * size)
        file_offset, target = place[1] + data_offset, sum(map(mul, region[0], steps)) * size
        pieces.append(
            Piece(
                *(region, place, file_offset, data_length, found.strides, found.start, crc),
                *(layout[0], target, layout[1]),
            )
        )
    return tuple(pieces)
