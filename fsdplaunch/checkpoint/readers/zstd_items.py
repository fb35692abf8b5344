"""Items that torch's ZStandard extension compressed: read as what they grow to, through a bounded buffer.

A compressed item can only be read from its start on. A few streams are kept open, so that reads that go on where
an earlier one ended, as those of a merge do, decompress every item once.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from fsdplaunch.checkpoint.invalid_file import InvalidFileError
from fsdplaunch.checkpoint.item_location import ItemLocation
from fsdplaunch.checkpoint.readers.zip_directory import ReadWindow
from fsdplaunch.errors import CheckpointError

ReadRaw = Callable[[ItemLocation, int, int], bytes]  # (item, offset, length) -> exactly that many stored bytes

MAX_STREAMS = 8
# A stream remembers this much of what it has put out; the extension's own level needs 2 MiB.
MAX_WINDOW = 8 * 2**20
STEP = 2**20
_ENDS = 16 * 2**10


class ZstdReader:
    """Reads compressed items by their decompressed offsets.

    Args:
        read: Reads an item's stored bytes.

    Raises:
        CheckpointError: The package that decompresses is not installed.
    """

    def __init__(self, read: ReadRaw) -> None:
        try:
            import zstandard
        except ImportError:
            msg = "the checkpoint is compressed with zstd, and the package zstandard is not installed"
            raise CheckpointError(msg, hint="install it with: pip install 'fsdplaunch[zstd]'") from None
        self._read, self._errors = read, zstandard.ZstdError
        self._decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW)
        self._streams: OrderedDict[ItemLocation, _Stream] = OrderedDict()

    def read(self, place: ItemLocation, offset: int, count: int) -> bytes:
        """Return exactly `count` decompressed bytes at `offset` of the item at `place`.

        Raises:
            InvalidFileError: The item is damaged or ends before.
        """
        stream = self._streams.pop(place, None)
        if stream is None or stream.position > offset:
            stream = self._open(place)
        while stream.position < offset:
            stream.take(min(STEP, offset - stream.position), exactly=True)
        data = stream.take(count, exactly=True)
        self._streams[place] = stream
        if len(self._streams) > MAX_STREAMS:
            self._streams.popitem(last=False)
        return data

    def window(self, place: ItemLocation, limit: int) -> ReadWindow:
        """Return a view of the decompressed item; its first and last pages are kept, the rest is read again.

        Args:
            place: The item.
            limit: The most bytes that it may grow to; beyond them decompressing stops.

        Raises:
            InvalidFileError: The item is damaged, or larger.
        """
        stream, head, tail = self._open(place), b"", b""
        while part := stream.take(STEP):
            head = head or part[:_ENDS]
            tail = (tail + part)[-_ENDS:]
            if stream.position > limit:
                msg = f"{place.length} bytes grow to more than {limit}, which is more than it can hold"
                raise InvalidFileError(msg)
        length = stream.position

        def read(offset: int, count: int) -> bytes:
            if offset + count <= len(head):
                return head[offset : offset + count]
            start = offset - (length - len(tail))
            return tail[start : start + count] if start >= 0 else self.read(place, offset, count)

        return ReadWindow(read, length)

    def _open(self, place: ItemLocation) -> "_Stream":
        source: Any = _Stored(self._read, place)
        return _Stream(self._decompressor.stream_reader(source, read_across_frames=True), self._errors)


class _Stored:
    """An item's stored bytes as a file."""

    def __init__(self, read: ReadRaw, place: ItemLocation) -> None:
        self._read, self._place, self._position = read, place, 0

    def read(self, count: int = -1) -> bytes:
        left = self._place.length - self._position
        count = left if count < 0 else min(count, left)
        data = self._read(self._place, self._position, count) if count else b""
        self._position += count
        return data


class _Stream:
    """One item while it is decompressed, from its start on."""

    __slots__ = ("_errors", "_reader", "position")

    def __init__(self, reader: Any, errors: type[Exception]) -> None:
        self._reader, self._errors, self.position = reader, errors, 0

    def take(self, count: int, *, exactly: bool = False) -> bytes:
        """Return the next `count` bytes, fewer only at the end and unless they have to be there."""
        parts = []
        while count:
            try:
                part: bytes = self._reader.read(count)
            except self._errors as problem:
                msg = f"it cannot be decompressed: {problem}"
                raise InvalidFileError(msg) from None
            if not part:
                break
            parts.append(part)
            count -= len(part)
            self.position += len(part)
        if count and exactly:
            msg = f"it ends after {self.position} decompressed bytes"
            raise InvalidFileError(msg)
        return parts[0] if len(parts) == 1 else b"".join(parts)
