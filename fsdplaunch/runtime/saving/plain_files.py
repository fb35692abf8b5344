"""Read what `torch.save` wrote, as plain values and tensors: none of its code runs, none is read unchecked."""

import io
import os
import pickle
from pathlib import Path
from typing import Any

import torch

from fsdplaunch.checkpoint.crc32 import crc32
from fsdplaunch.checkpoint.invalid_file import InvalidFileError, short
from fsdplaunch.checkpoint.readers.zip_directory import ReadWindow, data_start, member_bytes, read_zip
from fsdplaunch.checkpoint.regular_file import open_regular, read_exactly
from fsdplaunch.checkpoint.safe_pickle.plain_values import check_old_plain, check_plain
from fsdplaunch.errors import CheckpointError

_MAX_DIRECTORY = 64 * 2**20
_MAX_DESCRIPTION = 256 * 2**20
_STEP = 4 * 2**20


def load_plain(data: bytes, where: str) -> Any:
    """Return the value that the bytes of a file of torch.save hold.

    Raises:
        CheckpointError: They hold something else, or are damaged.
    """
    _check(ReadWindow(lambda offset, count: data[offset : offset + count], len(data)), where, checksums=True)
    return _loaded(io.BytesIO(data), where)


def read_plain(path: Path, *, checksums: bool = True) -> Any:
    """Read a file back, running no code of it. Tensors of a large file stay there until they are used.

    Args:
        path: The file.
        checksums: Compare all of it with its checksums first.

    Raises:
        CheckpointError: The file holds something else, or is damaged.
    """
    try:
        fd = open_regular(path)
    except InvalidFileError as problem:
        msg = f"cannot read {path}: {problem}"
        raise CheckpointError(msg, hint="put the real file there, readable by the user who runs this") from None
    try:
        window = ReadWindow(lambda offset, count: read_exactly(fd, offset, count), os.fstat(fd).st_size)
        is_zip = _check(window, str(path), checksums=checksums)
    finally:
        os.close(fd)
    return _loaded(path, str(path), mmap=is_zip)


def _check(window: ReadWindow, where: str, *, checksums: bool) -> bool:
    """Check a file's description, and the rest against its checksums. Returns whether it is a zip file."""
    try:
        if window.length < 2 or window.bytes_at(0, 2) != b"PK":  # noqa: PLR2004
            check_old_plain(window.bytes_at(0, min(window.length, _MAX_DESCRIPTION)), where)
            return False
        built = read_zip(window, _MAX_DIRECTORY)
        if len({name.lower() for name in built.members}) != len(built.members):
            msg = "its table of contents lists a file twice"  # torch's reader does not look at the case
            raise InvalidFileError(msg)
        check_plain(member_bytes(window, f"{built.prefix}/data.pkl", built, _MAX_DESCRIPTION), where)
        for name, member in built.members.items() if checksums else ():
            if (
                member.crc
                and _crc(window, data_start(window, name, member, window.length), member.size) != member.crc
            ):
                msg = f"{short(name)} does not match its checksum"
                raise InvalidFileError(msg)
    except (InvalidFileError, UnicodeDecodeError) as problem:
        reason = problem if isinstance(problem, InvalidFileError) else "a text in it is damaged"
        msg = f"cannot read {where}: {reason}"
        raise CheckpointError(msg, hint="the file is damaged; copy it again, or use an older checkpoint") from None
    return True


def _crc(window: ReadWindow, start: int, size: int) -> int:
    crc = 0
    for offset in range(0, size, _STEP):
        crc = crc32(window.bytes_at(start + offset, min(_STEP, size - offset)), crc)
    return crc


def _loaded(source: Path | io.BytesIO, where: str, *, mmap: bool = False) -> Any:
    try:
        return torch.load(source, weights_only=True, map_location="cpu", mmap=mmap)
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError, KeyError, TypeError) as error:
        msg = f"cannot read {where}: {(str(error).strip() or type(error).__name__).splitlines()[0]}"
        hint = "the file is damaged, or holds objects that only running code could read"
        raise CheckpointError(msg, hint=hint) from None
