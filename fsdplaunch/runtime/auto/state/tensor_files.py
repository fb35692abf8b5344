"""Write a safetensors file one tensor after the other, each from memory that need not outlive its turn."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fsdplaunch.atomic_file import atomic_file
from fsdplaunch.checkpoint.dtypes import DTYPES
from fsdplaunch.checkpoint.safetensors_format import TensorHeader, header_with, in_file_order
from fsdplaunch.runtime.torch_internals.dtensor import local_tensor
from fsdplaunch.runtime.torch_internals.tensors import storage_identity


def storage_of(tensor: Any) -> int:
    """Return what is equal for tensors in one storage."""
    return storage_identity(local_tensor(tensor) if isinstance(tensor, DTensor) else tensor)


def one_by_one(tensors: Mapping[str, Any]) -> bool:
    """Return whether tensors are such that safetensors writes them without a word; others it shall see itself."""
    filled = [value for value in tensors.values() if value.numel()]
    return len({storage_of(value) for value in filled}) == len(filled) and all(map(_is_plain, tensors.values()))


def _is_plain(tensor: Any) -> bool:
    known = DTYPES.get(_dtype(tensor))
    strided = tensor.layout is torch.strided and tensor.is_contiguous()
    return strided and known is not None and known.code is not None and known.lanes == 1


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def file_entries(tensors: Mapping[str, Any]) -> list[TensorHeader]:
    """Return what a file says of tensors that `one_by_one` finds fit for it, in the order they have there."""
    return in_file_order(
        TensorHeader(name, DTYPES[_dtype(value)], tuple(value.shape), value.numel() * value.element_size())
        for name, value in tensors.items()
    )


def write_file(path: Path, entries: list[TensorHeader], metadata: Any, values: Iterable[torch.Tensor]) -> None:
    """Write a file that is there when it is complete.

    Args:
        path: The file.
        entries: What it holds.
        metadata: What it says besides; None for nothing.
        values: The full tensors in that order, each dropped before the next one is asked for.
    """
    with atomic_file(path) as part, part.open("wb") as file:
        file.write(header_with(entries, metadata))
        for tensor in values:
            _as_bytes(tensor).numpy().tofile(file)
            del tensor  # before the next one is put together


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's memory on the host as bytes."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
