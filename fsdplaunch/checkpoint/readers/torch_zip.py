"""One stored tensor chunk: a torch.save zip inside a data file. Where its bytes are, and how they are laid out.

The zip's own central directory and the tensor description (`data.pkl`) are read and compared with each other
and with the item's length; the data itself is not touched here.
"""

import math
from functools import lru_cache
from typing import NamedTuple

from fsdplaunch.checkpoint.invalid_file import InvalidFileError, short
from fsdplaunch.checkpoint.readers.zip_directory import (
    Read,
    ReadWindow,
    ZipDirectory,
    data_start,
    member_bytes,
    read_zip,
)
from fsdplaunch.checkpoint.safe_pickle.tensor_classes import TensorDescription, read_description

MAX_DIRECTORY = 2**20
MAX_DESCRIPTION = 2**20


class TorchZipItem(NamedTuple):
    """One chunk's data.

    Attributes:
        description: Dtype, shape and strides.
        data_offset: Where the storage's bytes start, counted from the item's start.
        data_length: Bytes of the storage.
        crc: CRC32 of those bytes, or None when the writer did not compute it.
        packed: The item is compressed; the offset counts in what it grows to.
    """

    description: TensorDescription
    data_offset: int
    data_length: int
    crc: int | None
    packed: bool = False


def read_item(read: Read, length: int) -> TorchZipItem:
    """Return what the item of `length` bytes holds.

    Raises:
        InvalidFileError: When it is not a tensor as torch.save writes it.
    """
    return parse_item(ReadWindow(read, length))[0]


def parse_item(window: ReadWindow) -> tuple[TorchZipItem, ZipDirectory]:
    """Return what the item in `window` holds, and how it is built.

    Raises:
        InvalidFileError: When it is not a tensor as torch.save writes it.
    """
    built = read_zip(window, MAX_DIRECTORY)
    description = _parsed(member_bytes(window, f"{built.prefix}/data.pkl", built, MAX_DESCRIPTION))
    return locate_data(window, built, description), built


def locate_data(window: ReadWindow, built: ZipDirectory, description: TensorDescription) -> TorchZipItem:
    """Return where the storage of a tensor is.

    Raises:
        InvalidFileError: When it is not there, or too short for the tensor.
    """
    members, name = built.members, f"{built.prefix}/data/{description.storage}"
    if name not in members:
        msg = f"it has no {short(name)}"
        raise InvalidFileError(msg)
    start = data_start(window, name, members[name], built.directory)
    _check_extent(description, members[name].size)
    has_crc = members[name].crc or members[f"{built.prefix}/data.pkl"].crc
    return TorchZipItem(description, start, members[name].size, members[name].crc if has_crc else None)


@lru_cache(maxsize=4096)
def _parsed(raw: bytes) -> TensorDescription:
    return read_description(raw)


def _check_extent(description: TensorDescription, length: int) -> None:
    """Check that every element lies inside the storage."""
    size = description.dtype.size
    if not size:
        return
    last = description.start + sum(
        (n - 1) * s for n, s in zip(description.shape, description.strides, strict=True)
    )
    if math.prod(description.shape) and (last + 1) * size > length:
        msg = f"its elements reach {(last + 1) * size} bytes into {length} bytes of data"
        raise InvalidFileError(msg)
