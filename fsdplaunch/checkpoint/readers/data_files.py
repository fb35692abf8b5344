"""The data files of a checkpoint: opened safely, checked against the index, read exactly."""

import errno
import os
import stat
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from fsdplaunch.checkpoint.index_file import INDEX_NAME
from fsdplaunch.checkpoint.invalid_file import COPY_AGAIN, InvalidFileError, short
from fsdplaunch.checkpoint.item_location import ItemLocation
from fsdplaunch.checkpoint.readers.dcp_index import CheckpointIndex
from fsdplaunch.checkpoint.readers.pieces import Piece
from fsdplaunch.checkpoint.readers.zip_directory import ReadWindow
from fsdplaunch.checkpoint.readers.zstd_items import ZstdReader
from fsdplaunch.checkpoint.regular_file import real_path
from fsdplaunch.errors import CheckpointError
from fsdplaunch.name_lists import listed

# Fewer than the usual limit of 1024, which checkpoints of large jobs exceed.
MAX_OPEN = 128
_OTHERS = 32
"""Files that a process opens for other reasons."""


class DataFiles:
    """The data files of one checkpoint folder; items at `packed` are compressed."""

    def __init__(
        self, folder: Path, files: Mapping[str, int], packed: frozenset[ItemLocation] = frozenset()
    ) -> None:
        self.folder, self.packed = folder, packed
        self._unpacker = ZstdReader(self.read) if packed else None
        self._open: OrderedDict[str, int] = OrderedDict()
        self._identity: dict[str, tuple[int, int, int]] = {}
        self._check_all(files)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close every file."""
        while self._open:
            os.close(self._open.popitem()[1])

    def descriptor(self, name: str) -> int:
        """Return an open descriptor of the file; it stays valid until a hundred other files were opened."""
        if name in self._open:
            self._open.move_to_end(name)
            return self._open[name]
        fd, identity = self._open_file(name)
        if self._identity.setdefault(name, identity) != identity:
            os.close(fd)
            msg = f"{self.folder / name} changed while it was read"
            raise CheckpointError(msg, hint="merge again when nothing writes to the checkpoint")
        self._open[name] = fd
        if len(self._open) > MAX_OPEN:
            os.close(self._open.popitem(last=False)[1])
        return fd

    def read(self, place: ItemLocation, offset: int, count: int) -> bytes:
        """Return exactly `count` bytes at `offset` of the item at `place`."""
        fd, parts, position = self.descriptor(place.file), [], place.offset + offset
        while count:
            part = os.pread(fd, count, position)
            if not part:
                msg = f"{self.folder / place.file} ends at {position} bytes"
                raise CheckpointError(msg, hint="the file is incomplete; copy the checkpoint again")
            parts.append(part)
            count -= len(part)
            position += len(part)
        return b"".join(parts) if len(parts) != 1 else parts[0]

    def read_up_to(self, place: ItemLocation, count: int) -> bytes:
        """Return what stands in the file from `place` on: the item at least, `count` bytes at most."""
        fd = self.descriptor(place.file)
        data = os.pread(fd, count, place.offset)
        return data if len(data) >= place.length else self.read(place, 0, place.length)

    def read_piece(self, piece: Piece, offset: int, count: int) -> bytes:
        """Return exactly `count` bytes at `offset` of a chunk's data."""
        if offset < 0 or offset + count > piece.data_length:
            msg = f"{self.folder / piece.place.file}: {count} bytes at {offset} are not in the chunk's data"
            raise CheckpointError(msg)
        return self.read_inside(piece.place, piece.file_offset - piece.place.offset + offset, count)

    def read_inside(self, place: ItemLocation, offset: int, count: int) -> bytes:
        """Return exactly `count` bytes at `offset` of the item at `place`, decompressed if it has to be.

        Raises:
            CheckpointError: It ends before, or cannot be decompressed.
        """
        if self._unpacker is None or place not in self.packed:
            return self.read(place, offset, count)
        try:
            return self._unpacker.read(place, offset, count)
        except InvalidFileError as problem:
            msg = f"{self.folder / place.file}: the item at byte {place.offset}: {problem}"
            raise CheckpointError(msg, hint=COPY_AGAIN) from None

    def window(self, place: ItemLocation, limit: int) -> ReadWindow:
        """Return a view of the item at `place`, which may decompress to `limit` bytes.

        Raises:
            InvalidFileError: It is larger, or cannot be decompressed.
        """
        if self._unpacker is not None and place in self.packed:
            return self._unpacker.window(place, limit)
        return ReadWindow(lambda offset, count: self.read(place, offset, count), place.length)

    def _open_file(self, name: str) -> tuple[int, tuple[int, int, int]]:
        path = self.folder / name
        try:
            # Without NONBLOCK a named pipe would wait for ever.
            fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as problem:
            msg = f"{path} cannot be opened: {problem.strerror}"
            few = f"let a process open {MAX_OPEN + _OTHERS} files at a time: ulimit -n"
            raise CheckpointError(msg, hint=few if problem.errno == errno.EMFILE else None) from None
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            os.close(fd)
            msg = f"{path} is not a regular file"
            raise CheckpointError(msg, hint="put the real file there, or use an older checkpoint")
        return fd, (status.st_dev, status.st_ino, status.st_size)

    def _check_all(self, files: Mapping[str, int]) -> None:
        """Check presence, place and size of every file before anything is read."""
        missing = [name for name in files if not os.path.lexists(self.folder / name)]
        if missing:
            shown = listed([short(name) for name in sorted(missing)], 5)
            msg = f"{self.folder} lacks {len(missing)} of the {len(files)} files its index names: {shown}"
            raise CheckpointError(
                msg,
                hint="a rank did not finish saving, or its files are on another node; bring them together",
            )
        home = real_path(self.folder)
        for name, end in files.items():
            path = self.folder / name
            if path.is_symlink() and real_path(path).parent != home:
                msg = f"{path} is a link that leads out of the checkpoint"
                raise CheckpointError(msg, hint="put the real file there")
            self._check_size(path, end)

    def _check_size(self, path: Path, end: int) -> None:
        try:
            status = path.stat()
        except OSError as problem:
            msg = f"{path} cannot be read: {problem.strerror}"
            raise CheckpointError(msg, hint="put the real file there, or use an older checkpoint") from None
        if not stat.S_ISREG(status.st_mode):
            msg = f"{path} is not a regular file"
            raise CheckpointError(msg, hint="put the real file there, or use an older checkpoint")
        if status.st_size < end:
            msg = f"{path} has {status.st_size} bytes, the index expects {end}"
            raise CheckpointError(msg, hint=f"the file is incomplete; {COPY_AGAIN}")
        self._identity[path.name] = (status.st_dev, status.st_ino, status.st_size)


def open_data_files(folder: Path, index: CheckpointIndex) -> DataFiles:
    """Check every data file that the index names, and open them for reading.

    Raises:
        CheckpointError: When one is missing, too short, or not a file of this folder.
    """
    return DataFiles(folder, {name: end for name, end in index.files.items() if name != INDEX_NAME}, index.packed)
