"""The data files of a checkpoint: opened safely, checked against the index, read exactly.

A large checkpoint holds hundreds of thousands of items that differ in little but their data. The first header of a
kind is parsed, and those that follow are compared with it, byte by byte wherever parsing would look.
"""

import errno
import os
import stat
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from contextlib import suppress
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from struct import Struct
from types import TracebackType
from typing import Self

from fsdplaunch.checkpoint.byte_transfer import read_all
from fsdplaunch.checkpoint.chunks import ItemLocation, Piece
from fsdplaunch.checkpoint.manifest import crc_of_items, known_crcs
from fsdplaunch.checkpoint.readers.dcp_index import StoredChunk, StoredTensor
from fsdplaunch.checkpoint.readers.torch_zip import ReadWindow, TorchZipItem, ZipDirectory, parse_item
from fsdplaunch.checkpoint.untrusted_files import COPY_AGAIN, InvalidFileError, real_path, short
from fsdplaunch.display_text import listed
from fsdplaunch.errors import CheckpointError

# Fewer than the usual limit of 1024, which checkpoints of large jobs exceed; a process opens others, too.
MAX_OPEN = 128
_OTHERS = 32
_REAL = "put the real file there, or use an older checkpoint"
Identity = tuple[int, int, int, int]


def identity_of(status: os.stat_result) -> Identity:
    """Return what is equal as long as a file is the same and nobody writes into it."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


class DataFiles:
    """The data files of one checkpoint folder, with the end of the last item in each; all checked at once."""

    def __init__(self, folder: Path, files: Mapping[str, int]) -> None:
        self.folder = folder
        self._open: OrderedDict[str, int] = OrderedDict()
        self.identity: dict[str, Identity] = {}
        missing = [name for name in files if not os.path.lexists(folder / name)]
        if missing:
            shown = listed([short(name) for name in sorted(missing)], 5)
            msg = f"{folder} lacks {len(missing)} of the {len(files)} files its index names: {shown}"
            hint = "a rank did not finish saving, or its files are on another node; copy them all into one folder"
            raise CheckpointError(msg, hint=hint)
        home = real_path(folder)
        for name, end in files.items():
            path = folder / name
            if path.is_symlink() and real_path(path).parent != home:
                msg = f"{path} is a link that leads out of the checkpoint"
                raise CheckpointError(msg, hint="put the real file there")
            try:
                status = path.stat()
            except OSError as problem:
                msg = f"{path} cannot be read: {problem.strerror}"
                raise CheckpointError(msg, hint=_REAL) from None
            if not stat.S_ISREG(status.st_mode):
                msg = f"{path} is not a regular file"
                raise CheckpointError(msg, hint=_REAL)
            if status.st_size < end:
                msg = f"{path} has {status.st_size} bytes, the index expects {end}"
                raise CheckpointError(msg, hint=f"the file is incomplete; {COPY_AGAIN}")
            self.identity[name] = identity_of(status)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._open:
            with suppress(OSError):  # of a file server: all that was wanted of it has been read
                os.close(self._open.popitem()[1])

    def descriptor(self, name: str) -> int:
        """Return an open descriptor of the file; it stays valid until the next call but one."""
        if name in self._open:
            self._open.move_to_end(name)
            return self._open[name]
        path = self.folder / name
        try:
            # Without NONBLOCK a named pipe would wait for ever.
            fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as problem:
            msg = f"{path} cannot be opened: {problem.strerror}"
            few = f"raise the limit on open files to {MAX_OPEN + _OTHERS}: ulimit -n"
            raise CheckpointError(msg, hint=few if problem.errno == errno.EMFILE else None) from None
        if self.identity.get(name) != identity_of(os.fstat(fd)):
            os.close(fd)
            msg = f"{path} changed while it was read"
            raise CheckpointError(msg, hint="merge again when nothing writes to the checkpoint")
        self._open[name] = fd
        if len(self._open) > MAX_OPEN:
            os.close(self._open.popitem(last=False)[1])
        return fd

    def read(self, place: ItemLocation, offset: int, count: int) -> bytes:
        """Return exactly `count` bytes at `offset` of the item at `place`."""
        position = place.offset + offset
        data = read_all(self.descriptor(place.file), position, count)
        if len(data) != count:
            msg = f"{self.folder / place.file} ends at {position + len(data)} bytes"
            raise CheckpointError(msg, hint="the file is incomplete; copy the checkpoint again")
        return data

    def read_piece(self, piece: Piece, offset: int, count: int) -> bytes:
        """Return exactly `count` bytes at `offset` of a chunk's data."""
        if offset < 0 or offset + count > piece.data_length:
            msg = f"{self.folder / piece.place.file}: {count} bytes at {offset} are not in the chunk's data"
            raise CheckpointError(msg)
        return self.read(piece.place, piece.file_offset - piece.place.offset + offset, count)

    def window(self, place: ItemLocation) -> ReadWindow:
        """Return a view of the item at `place`."""
        return ReadWindow(lambda offset, count: self.read(place, offset, count), place.length)


def data_crcs(sources: DataFiles, places: Iterable[ItemLocation]) -> dict[str, int]:
    """Return the checksums of data files, all of whose items' places are given, as the manifest has them."""
    items: dict[str, list[tuple[int, int]]] = {}
    for file, offset, length in places:
        items.setdefault(file, []).append((offset, length))
    return {file: crc_of_items(sources.descriptor(file), own) for file, own in items.items()}


def check_save(sources: DataFiles, places: Iterable[ItemLocation]) -> None:
    """Check that data files, all of whose items' places are given, are those of the save that the manifest is of.

    Raises:
        CheckpointError: One is of another save, or its checksums are damaged.
    """
    known = known_crcs(sources.folder)
    for file, crc in data_crcs(sources, places).items() if known else ():
        if known.get(file, crc) != crc:
            msg = f"{sources.folder / file} does not match its checksum: it is damaged, or from another save"
            raise CheckpointError(msg, hint=COPY_AGAIN)


# Items up to this size are read whole, as many at once as fit a block.
SMALL = 32 * 2**10
BLOCK = 2**20
_MAX_FORMS = 4096
_CRC_AT = 16  # of a file's entry in the table of contents
_CRC = 4
Kind = tuple[int, str, tuple[int, ...]]  # bytes of the item, dtype, sizes


class HeaderForm:
    """What an item shares with others of its kind: all that stands before its data, and its table of contents.

    Left open are the checksums of the data and of torch's own identifier; nothing else that is read may differ.
    """

    __slots__ = ("_checked", "_crc", "_fixed", "_item", "_layout", "head", "tail")

    def __init__(self, item: TorchZipItem, built: ZipDirectory, window: ReadWindow) -> None:
        data = built.members[f"{built.prefix}/data/{item.description.storage}"]
        own = built.members.get(f"{built.prefix}/.data/serialization_id")
        places = sorted(member.entry + _CRC_AT for member in (data, own) if member is not None)
        self._item, self.tail = item, built.directory
        self.head = window.bytes_at(0, item.data_offset)
        edges = [self.tail, *(edge for at in places for edge in (at, at + _CRC)), window.length]
        self._layout = Struct("".join(f"{end - start}s" for start, end in pairwise(edges)))
        self._crc = 1 + 2 * places.index(data.entry + _CRC_AT)
        self._fixed = self._layout.unpack(window.bytes_at(self.tail, window.length - self.tail))[::2]
        self._checked = built.members[f"{built.prefix}/data.pkl"].crc != 0

    def find(self, sources: DataFiles, place: ItemLocation, block: bytes, at: int) -> TorchZipItem | None:
        """Return the item at `place` if it is of this kind; None: parse it.

        All of it may stand in a block that was read, from `at` on.
        """
        data = block[at : at + place[2]]
        if len(data) == place[2]:
            head, tail = data[: len(self.head)], data[self.tail :]
        else:
            head = sources.read(place, 0, len(self.head))
            tail = sources.read(place, self.tail, place[2] - self.tail)
        parts = self._layout.unpack(tail)
        if head != self.head or parts[::2] != self._fixed:
            return None
        crc: int | None = int.from_bytes(parts[self._crc], "little")
        if not crc and not self._checked:
            crc = None
        known = self._item
        return known if crc == known[3] else TorchZipItem(known[0], known[1], known[2], crc)


def make_form(item: TorchZipItem, built: ZipDirectory, window: ReadWindow) -> HeaderForm | None:
    """Return the form of a parsed item; None when what parsing looks at stands behind the data."""
    looked_at = [built.members.get(f"{built.prefix}/{name}") for name in ("data.pkl", "byteorder")]
    before = all(member is None or member.header < item.data_offset for member in looked_at)
    return HeaderForm(item, built, window) if before and built.directory >= item.data_offset else None


def read_items(sources: DataFiles, tensors: Iterable[StoredTensor]) -> dict[ItemLocation, TorchZipItem]:
    """Read the headers of all chunks of `tensors`, and check each against the index.

    Returns:
        Where each chunk's bytes are, by its place.
    """
    # File by file: in the tensors' order, thousands of ranks' files would be opened again for every tensor.
    wanted: dict[str, list[tuple[int, StoredTensor, StoredChunk]]] = {}
    for tensor in tensors:
        for chunk in tensor.chunks:
            wanted.setdefault(chunk[1][0], []).append((chunk[1][1], tensor, chunk))
    forms: dict[Kind, HeaderForm | None] = {}
    items: dict[ItemLocation, TorchZipItem] = {}
    for file in sorted(wanted):
        here = wanted.pop(file)
        here.sort(key=itemgetter(0))
        block, start = b"", 0
        for offset, tensor, chunk in here:
            place = chunk[1]
            length = place[2]
            kind = (length, tensor.dtype.name, chunk[0][1])
            form, item = forms.get(kind), None
            if form is not None:
                if length <= SMALL and offset + length > start + len(block):
                    block, start = os.pread(sources.descriptor(file), BLOCK, offset), offset
                item = form.find(sources, place, block if length <= SMALL else b"", offset - start)
            if item is None:
                item, made = _parse_checked(sources, tensor, chunk)
                if len(forms) >= _MAX_FORMS:
                    forms.clear()
                forms.setdefault(kind, made)
            items[place] = item
    return items


def _parse_checked(
    sources: DataFiles, tensor: StoredTensor, chunk: StoredChunk
) -> tuple[TorchZipItem, HeaderForm | None]:
    place = chunk.place
    where = f"{sources.folder / place.file}: the chunk of {short(tensor.name)} at byte {place.offset}"
    try:
        window = sources.window(place)
        item, built = parse_item(window)
        form = make_form(item, built, window)
    except InvalidFileError as problem:
        msg = f"{where} cannot be read: {problem}"
        raise CheckpointError(msg, hint=COPY_AGAIN) from None
    found = item.description
    if found.dtype.name != tensor.dtype.name or found.shape != chunk.region.sizes:
        said = f"the index says {tensor.dtype.name} of shape {list(chunk.region.sizes)}"
        msg = f"{where} holds {found.dtype.name} of shape {list(found.shape)}, {said}"
        raise CheckpointError(msg, hint="index and data are from different saves")
    return item, form
