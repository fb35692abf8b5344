"""Small files of a checkpoint that hold plain values and tensors only."""

import io
import os
import pickle
from pathlib import Path
from typing import Any, BinaryIO

import torch

from fsdplaunch.errors import CheckpointError


def write_plain(value: Any, path: Path, what: str) -> None:
    """Write a value that can be read back without running code, and force it to disk.

    Raises:
        CheckpointError: It holds objects of classes, which only running code could bring back.
    """
    box = io.BytesIO()
    torch.save(value, box)
    box.seek(0)
    try:
        torch.load(box, weights_only=True)
    except pickle.UnpicklingError:
        msg = f"{what} holds more than plain values and tensors"
        hint = "give numbers, texts, lists, mappings and tensors; save other objects in a file of your own"
        raise CheckpointError(msg, hint=hint) from None
    with path.open("wb") as file:
        file.write(box.getvalue())
        _force(file)


def write_large(value: Any, path: Path) -> None:
    """Write tensors straight to a file, without a copy of them in memory, and force it to disk."""
    with path.open("wb") as file:
        torch.save(value, file)
        _force(file)


def _force(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def read_plain(path: Path) -> Any:
    """Read a value back, running no code of it.

    Raises:
        CheckpointError: The file holds something else, or is damaged.
    """
    try:
        return torch.load(path, weights_only=True, map_location="cpu")
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        msg = f"cannot read {path}: {str(error).splitlines()[0]}"
        hint = "the file is damaged, or holds objects that only running code could read"
        raise CheckpointError(msg, hint=hint) from None
