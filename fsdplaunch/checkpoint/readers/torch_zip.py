"""What torch.save wrote, a zip: its table of contents, description and data, read without torch.

Every number in it is checked against the others and against the file's length before it is used.
"""

import math
import struct
import zlib
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

from fsdplaunch.checkpoint.safe_pickle.tensor_classes import TensorDescription, read_description
from fsdplaunch.checkpoint.untrusted_files import InvalidFileError, short

Read = Callable[[int, int], bytes]
"""Takes an offset in the item and a number of bytes, and returns exactly those."""

_PIECE = 4096
_MAX_ORDER = 2**20
_END = struct.Struct("<4s4H2IH")
_END64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR = struct.Struct("<4sIQI")
_ENTRY = struct.Struct("<4s6H3I5H2I")
_LOCAL = struct.Struct("<4s5H3I2H")
_U64 = struct.Struct("<Q")
_NARROW = 0xFFFFFFFF
_ENCRYPTED = 1


class ZipMember(NamedTuple):
    """One file of the zip: where its local header stands, its size in bytes, its CRC32, and its entry's place."""

    header: int
    size: int
    crc: int
    entry: int


class ZipDirectory(NamedTuple):
    """How an item is built: where its table of contents starts, the files in it, and the folder they are in."""

    directory: int
    members: dict[str, ZipMember]
    prefix: str


class ReadWindow:
    """Reads of one item; the first and last pages are fetched once."""

    def __init__(self, read: Read, length: int) -> None:
        self.read, self.length = read, length
        if length <= 4 * _PIECE:
            self.head = self.tail = read(0, length)
            self.tail_start = 0
        else:
            self.head, self.tail = read(0, _PIECE), read(length - _PIECE, _PIECE)
            self.tail_start = length - _PIECE

    def bytes_at(self, offset: int, count: int) -> bytes:
        """Return exactly `count` bytes at `offset`."""
        if offset < 0 or count < 0 or offset + count > self.length:
            msg = f"it refers to {count} bytes at {offset}, the item has {self.length}"
            raise InvalidFileError(msg)
        if offset + count <= len(self.head):
            return self.head[offset : offset + count]
        if offset >= self.tail_start:
            return self.tail[offset - self.tail_start : offset - self.tail_start + count]
        return self.read(offset, count)


def read_zip(window: ReadWindow, limit: int) -> ZipDirectory:
    """Return the table of contents of what torch.save wrote, of at most `limit` bytes.

    Raises:
        InvalidFileError: When it is something else, or not from a machine that stores the low byte first.
    """
    if window.length < _END.size:
        msg = f"an item of {window.length} bytes is too short to be a tensor"
        raise InvalidFileError(msg)
    directory_start, members = _directory(window, limit)
    prefix = next((name[: -len("/data.pkl")] for name in members if name.endswith("/data.pkl")), None)
    if prefix is None:
        msg = "it has no tensor description"
        raise InvalidFileError(msg)
    built = ZipDirectory(directory_start, members, prefix)
    _check_byte_order(window, built)
    return built


def _directory(window: ReadWindow, limit: int) -> tuple[int, dict[str, ZipMember]]:
    """Return where the central directory starts and what it lists."""
    magic, disk, first_disk, here, count, size, start, comment = _END.unpack(
        window.bytes_at(window.length - _END.size, _END.size)
    )
    if magic != b"PK\5\6" or comment:
        msg = "its end is not the end of a torch.save file"
        raise InvalidFileError(msg)
    before = window.length - _END.size
    locator = window.length - _END.size - _LOCATOR.size
    if locator >= 0 and window.bytes_at(locator, 4) == b"PK\6\7":
        _, _, end64, _ = _LOCATOR.unpack(window.bytes_at(locator, _LOCATOR.size))
        record = _END64.unpack(window.bytes_at(end64, _END64.size))
        if record[0] != b"PK\6\6":
            msg = "its zip64 record is not one"
            raise InvalidFileError(msg)
        disk, first_disk, here, count, size, start = record[4:]
        before = end64
    if size > limit:
        msg = f"its table of contents has {size} bytes"
        raise InvalidFileError(msg)
    if disk or first_disk or here != count or start + size > before:
        msg = f"its table of contents of {size} bytes at {start} does not fit"
        raise InvalidFileError(msg)
    return start, _entries(window.bytes_at(start, size), count, start)


def _entries(table: bytes, count: int, start: int) -> dict[str, ZipMember]:
    members: dict[str, ZipMember] = {}
    position = 0
    while position + _ENTRY.size <= len(table):
        fields = _ENTRY.unpack_from(table, position)
        magic, flags, method, crc = fields[0], fields[3], fields[4], fields[7]
        name_end = position + _ENTRY.size + fields[10]
        end = name_end + fields[11] + fields[12]
        name = table[position + _ENTRY.size : name_end].decode()
        if magic != b"PK\1\2" or end > len(table) or name in members:
            msg = "its table of contents is damaged"
            raise InvalidFileError(msg)
        stored, size, header = _sizes(fields, table[name_end : name_end + fields[11]])
        if method or flags & _ENCRYPTED or stored != size:
            msg = f"{short(name)} is compressed or encrypted"
            raise InvalidFileError(msg)
        members[name] = ZipMember(header, size, crc, start + position)
        position = end
    if position != len(table) or len(members) != count:
        msg = f"its table of contents lists {len(members)} files, {count} were announced"
        raise InvalidFileError(msg)
    return members


def _sizes(fields: tuple[int, ...], extra: bytes) -> tuple[int, int, int]:
    """Return stored size, size and header offset, from the zip64 field where the narrow ones overflow."""
    size, stored, header = fields[9], fields[8], fields[16]
    if _NARROW not in {size, stored, header}:
        return stored, size, header
    wide: list[int] = []
    position = 0
    while position + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, position)
        if kind == 1:
            body = extra[position + 4 : position + 4 + length]
            wide = [_U64.unpack_from(body, at)[0] for at in range(0, len(body) - 7, 8)]
        position += 4 + length
    values = []
    for value in (size, stored, header):
        if value == _NARROW and not wide:
            msg = "its zip64 sizes are missing"
            raise InvalidFileError(msg)
        values.append(wide.pop(0) if value == _NARROW else value)
    return values[1], values[0], values[2]


def data_start(window: ReadWindow, name: str, member: ZipMember, limit: int) -> int:
    """Return where a member's bytes start, after its local header; `limit` is where they have to end."""
    fields = _LOCAL.unpack(window.bytes_at(member.header, _LOCAL.size))
    magic, method, name_length, extra_length = fields[0], fields[3], fields[9], fields[10]
    raw = window.bytes_at(member.header + _LOCAL.size, name_length)
    start = member.header + _LOCAL.size + name_length + extra_length
    if magic != b"PK\3\4" or method or raw != name.encode() or start + member.size > limit:
        msg = f"the header of {short(name)} does not agree with the table of contents"
        raise InvalidFileError(msg)
    return int(start)


def member_bytes(window: ReadWindow, name: str, built: ZipDirectory, limit: int) -> bytes:
    """Return the content of one small file of the zip, checked against its checksum."""
    member = built.members[name]
    if member.size > limit:
        msg = f"{short(name)} has {member.size} bytes"
        raise InvalidFileError(msg)
    raw = window.bytes_at(data_start(window, name, member, window.length), member.size)
    if member.crc and zlib.crc32(raw) != member.crc:
        msg = f"{short(name)} does not match its checksum"
        raise InvalidFileError(msg)
    return raw


def _check_byte_order(window: ReadWindow, built: ZipDirectory) -> None:
    name = f"{built.prefix}/byteorder"
    if name in built.members and (order := member_bytes(window, name, built, _MAX_ORDER)) != b"little":
        msg = f"its byte order is {short(order.decode(errors='replace'))}, not little"
        raise InvalidFileError(msg)


MAX_DIRECTORY = 2**20
MAX_DESCRIPTION = 2**20


class TorchZipItem(NamedTuple):
    """One chunk's data.

    Attributes:
        description: Dtype, shape and strides.
        data_offset: Where the storage's bytes start, counted from the item's start.
        data_length: Bytes of the storage.
        crc: CRC32 of those bytes, or None when the writer did not compute it.
    """

    description: TensorDescription
    data_offset: int
    data_length: int
    crc: int | None


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
