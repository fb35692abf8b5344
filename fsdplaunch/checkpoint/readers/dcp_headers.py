"""The headers of a checkpoint's items, read file by file, and each checked against the index.

A large checkpoint holds hundreds of thousands of items that differ in little but their data. The first of a kind
is parsed, and those that follow are compared with it, byte by byte wherever parsing would look.
"""

from collections.abc import Iterable
from itertools import pairwise
from struct import Struct

from fsdplaunch.checkpoint.invalid_file import COPY_AGAIN, InvalidFileError, short
from fsdplaunch.checkpoint.item_location import ItemLocation
from fsdplaunch.checkpoint.readers.data_files import DataFiles
from fsdplaunch.checkpoint.readers.dcp_index import StoredChunk, StoredTensor
from fsdplaunch.checkpoint.readers.torch_zip import TorchZipItem, parse_item
from fsdplaunch.checkpoint.readers.zip_directory import ReadWindow, ZipDirectory
from fsdplaunch.errors import CheckpointError

# Items up to this size are read whole, as many at once as fit a block.
SMALL = 32 * 2**10
BLOCK = 2**20
MAX_FORMS = 4096
# The most that stands around the data in a compressed item: its description and table of contents.
MOST_AROUND = 4 * 2**20
_CRC_AT = 16  # of a file's entry in the table of contents
_CRC = 4

Kind = tuple[int, str, tuple[int, ...]]  # bytes of the item, dtype, sizes


class HeaderForm:
    """What an item shares with others of its kind: all that stands before its data, and its table of contents.

    Left open are the checksums of the data and of torch's own identifier; nothing else that is read may differ.
    """

    __slots__ = ("_checked", "_crc", "_fixed", "_layout", "head", "item", "tail")

    def __init__(self, item: TorchZipItem, built: ZipDirectory, window: ReadWindow) -> None:
        data = built.members[f"{built.prefix}/data/{item.description.storage}"]
        own = built.members.get(f"{built.prefix}/.data/serialization_id")
        places = sorted(member.entry + _CRC_AT for member in (data, own) if member is not None)
        self.item, self.tail = item, built.directory
        self.head = window.bytes_at(0, item.data_offset)
        edges = [self.tail, *(edge for at in places for edge in (at, at + _CRC)), window.length]
        widths = [end - start for start, end in pairwise(edges)]
        self._layout = Struct("".join(f"{width}s" for width in widths))
        self._crc = 1 + 2 * places.index(data.entry + _CRC_AT)
        self._fixed = self._layout.unpack(window.bytes_at(self.tail, window.length - self.tail))[::2]
        self._checked = built.members[f"{built.prefix}/data.pkl"].crc != 0

    def read(self, head: bytes, tail: bytes) -> TorchZipItem | None:
        """Return the item with these bytes before its data and from its table of contents on; None: parse it."""
        parts = self._layout.unpack(tail)
        if head != self.head or parts[::2] != self._fixed:
            return None
        crc: int | None = int.from_bytes(parts[self._crc], "little")
        if not crc and not self._checked:
            crc = None
        known = self.item
        return known if crc == known[3] else TorchZipItem(known[0], known[1], known[2], crc)


def make_form(item: TorchZipItem, built: ZipDirectory, window: ReadWindow) -> HeaderForm | None:
    """Return the form of a parsed item; None when what parsing looks at stands behind the data."""
    looked_at = [built.members.get(f"{built.prefix}/{name}") for name in ("data.pkl", "byteorder")]
    before = all(member is None or member.header < item.data_offset for member in looked_at)
    return HeaderForm(item, built, window) if before and built.directory >= item.data_offset else None


class HeaderReader:
    """Reads the items of one file after the other."""

    def __init__(self, sources: DataFiles) -> None:
        self.sources = sources
        self.forms: dict[Kind, HeaderForm | None] = {}
        self.block, self.file, self.start = b"", "", 0

    def read(self, tensor: StoredTensor, chunk: StoredChunk) -> TorchZipItem:
        """Return where a chunk's bytes are; places are given in ascending order."""
        place = chunk[1]
        kind = (place[2], tensor.dtype.name, chunk[0][1])
        form = self.forms.get(kind)
        if form is not None:
            head, tail = self._ends(place, len(form.head), form.tail)
            item = form.read(head, tail)
            if item is not None:
                return item
        item, made = _read_checked(self.sources, tensor, chunk)
        if kind not in self.forms:
            if len(self.forms) >= MAX_FORMS:
                self.forms.clear()
            self.forms[kind] = made
        return item

    def _ends(self, place: ItemLocation, head: int, tail: int) -> tuple[bytes, bytes]:
        """Return an item's first `head` bytes and those from `tail` on."""
        file, offset, length = place
        if length > SMALL:
            return self.sources.read(place, 0, head), self.sources.read(place, tail, length - tail)
        at = offset - self.start
        if file != self.file or at < 0 or at + length > len(self.block):
            self.file, self.start, at = file, offset, 0
            self.block = self.sources.read_up_to(place, max(BLOCK, length))
        return self.block[at : at + head], self.block[at + tail : at + length]


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
    reader = HeaderReader(sources)
    items: dict[ItemLocation, TorchZipItem] = {}
    for file in sorted(wanted):
        here = wanted.pop(file)
        here.sort(key=_offset)
        for _, tensor, chunk in here:
            items[chunk[1]] = reader.read(tensor, chunk)
    return items


def _offset(entry: tuple[int, StoredTensor, StoredChunk]) -> int:
    return entry[0]


def _read_checked(
    sources: DataFiles, tensor: StoredTensor, chunk: StoredChunk
) -> tuple[TorchZipItem, HeaderForm | None]:
    place = chunk.place
    try:
        window = sources.window(place, chunk.region.numel * tensor.dtype.size + MOST_AROUND)
        item, built = parse_item(window)
        packed = place in sources.packed
        item, form = item._replace(packed=packed), None if packed else make_form(item, built, window)
    except (InvalidFileError, UnicodeDecodeError) as problem:
        where = _where(sources, tensor, place)
        msg = f"{where} cannot be read: {problem if isinstance(problem, InvalidFileError) else 'damaged text'}"
        raise CheckpointError(msg, hint=COPY_AGAIN) from None
    found = item.description
    if found.dtype.name != tensor.dtype.name or found.shape != chunk.region.sizes:
        msg = (
            f"{_where(sources, tensor, place)} holds {found.dtype.name} of shape {list(found.shape)}, "
            f"the index says {tensor.dtype.name} of shape {list(chunk.region.sizes)}"
        )
        raise CheckpointError(msg, hint="index and data are from different saves")
    return item, form


def _where(sources: DataFiles, tensor: StoredTensor, place: ItemLocation) -> str:
    return f"{sources.folder / place.file}: the chunk of {short(tensor.name)} at byte {place.offset}"
