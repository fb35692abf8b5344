"""Checkpoints of one file per rank: whether all are there, and reading one of them."""

import os
from collections.abc import Iterator, Mapping, Sized
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from fsdplaunch.checkpoint.invalid_file import COPY_AGAIN, InvalidFileError
from fsdplaunch.checkpoint.readers.zip_directory import ReadWindow
from fsdplaunch.checkpoint.regular_file import open_regular, read_exactly
from fsdplaunch.errors import CheckpointError

MAX_RANKS = 100_000


def check_still_there(folder: Path, files: Sized) -> None:
    """Check that a folder that was found to hold a checkpoint's files still does.

    Raises:
        CheckpointError: They have gone since.
    """
    if not files:
        msg = f"{folder} was changed while it was read: its files have gone"
        raise CheckpointError(msg, hint="read it when nothing writes to it")


def all_ranks(folder: Path, names: Mapping[int, str], world: int) -> list[str]:
    """Return the files of all ranks, rank 0 first.

    Args:
        folder: Where they are.
        names: Those that are there, by rank.
        world: How many there are to be.

    Raises:
        CheckpointError: One is missing, or there are more than can be.
    """
    missing = [] if world > MAX_RANKS else sorted(set(range(world)) - set(names))
    if missing or world > MAX_RANKS:
        shown = ", ".join(map(str, missing[:5])) + (", ..." if len(missing) > 5 else "")  # noqa: PLR2004
        msg = f"{folder} lacks the files of {len(missing)} of {world} ranks: {shown}"
        raise CheckpointError(msg, hint="bring the files of all ranks together")
    return [names[rank] for rank in sorted(names)]


@contextmanager
def reading(path: Path) -> Iterator[ReadWindow]:
    """Give a file's bytes, all of it; what turns out to be wrong with it is an error that names it.

    Raises:
        CheckpointError: It cannot be opened or read, or what it says is not what such files say.
    """
    try:
        fd = open_regular(path)
    except InvalidFileError as problem:
        refuse(path, str(problem))
    try:
        yield ReadWindow(lambda offset, count: read_exactly(fd, offset, count), os.fstat(fd).st_size)
    except (InvalidFileError, UnicodeDecodeError) as problem:
        refuse(path, str(problem) if isinstance(problem, InvalidFileError) else "a text in it is damaged")
    finally:
        os.close(fd)


def refuse(path: Path, reason: str) -> NoReturn:
    """Raise the error of a file that cannot be read."""
    msg = f"{path} cannot be read: {reason}"
    raise CheckpointError(msg, hint=COPY_AGAIN) from None
