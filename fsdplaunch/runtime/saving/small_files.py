"""Small files of a checkpoint that hold plain values and tensors only."""

import io
import os
from pathlib import Path
from typing import Any, BinaryIO

import torch

from fsdplaunch.errors import CheckpointError
from fsdplaunch.runtime.saving.plain_files import load_plain


def packed(value: Any, what: str) -> bytes:
    """Return a value as the bytes of a file that can be read back without running code.

    Raises:
        CheckpointError: It holds objects of classes, which only running code could bring back.
    """
    data = serialized(value)
    try:
        load_plain(data, what)
    except CheckpointError:
        msg = f"{what} holds more than plain values and tensors"
        hint = "give numbers, texts, lists, mappings and tensors; save other objects in a file of your own"
        raise CheckpointError(msg, hint=hint) from None
    return data


def serialized(value: Any) -> bytes:
    """Return a value that is known to be plain as the bytes of a file."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def write_bytes(path: Path, data: bytes) -> None:
    """Write a small file and force it to disk."""
    with path.open("wb") as file:
        file.write(data)
        _force(file)


def write_large(value: Any, path: Path) -> None:
    """Write tensors straight to a file, without a copy of them in memory, and force it to disk."""
    with path.open("wb") as file:
        torch.save(value, file)
        _force(file)


def _force(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
