"""What torch.save wrote, a zip: its table of contents, description and data, read without torch.

Every number in it is checked against the others and against the file's length before it is used.
"""

import math
import os
import struct
import zlib
from collections.abc import Callable
from functools import lru_cache, partial
from typing import NamedTuple

from fsdplaunch.checkpoint.safe_pickle.tensor_classes import TensorDescription, read_description
from fsdplaunch.checkpoint.untrusted_files import read_exactly, refuse, short

Read = Callable[[int, int], bytes]
"""Takes an offset in the item and a number of bytes, and returns exactly those."""

_PIECE = 4096
_MAX_ORDER = 2**20
_END = struct.Struct("<4s4H2IH")
_END64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR = struct.Struct("<4sIQI")
_ENTRY = struct.Struct("<4s6H3I5H2I")
_LOCAL = struct.Struct("<4s5H3I2H")
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
            refuse(f"it refers to {count} bytes at {offset}, but the item has {self.length}")
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
    before = window.length - _END.size
    if before < 0:
        refuse(f"an item of {window.length} bytes is too short to be a tensor")
    magic, disk, first_disk, here, count, size, start, comment = _END.unpack(window.bytes_at(before, _END.size))
    if magic != b"PK\5\6" or comment:
        refuse("its end is not the end of a torch.save file")
    locator = before - _LOCATOR.size
    if locator >= 0 and window.bytes_at(locator, 4) == b"PK\6\7":
        _, _, before, _ = _LOCATOR.unpack(window.bytes_at(locator, _LOCATOR.size))
        record = _END64.unpack(window.bytes_at(before, _END64.size))
        if record[0] != b"PK\6\6":
            refuse("its zip64 record is invalid")
        disk, first_disk, here, count, size, start = record[4:]
    if size > limit:
        refuse(f"its table of contents has {size} bytes")
    if disk or first_disk or here != count or start + size > before:
        refuse(f"its table of contents of {size} bytes at {start} does not fit")
    members = _entries(window.bytes_at(start, size), count, start)
    prefix = next((name.removesuffix("/data.pkl") for name in members if name.endswith("/data.pkl")), None)
    if prefix is None:
        refuse("it has no tensor description")
    built = ZipDirectory(start, members, prefix)
    name = f"{prefix}/byteorder"
    if name in members and (order := member_bytes(window, name, built, _MAX_ORDER)) != b"little":
        refuse(f"its byte order is {short(order.decode(errors='replace'))}, not little")
    return built


def _entries(table: bytes, count: int, start: int) -> dict[str, ZipMember]:
    members: dict[str, ZipMember] = {}
    position = 0
    while position + _ENTRY.size <= len(table):
        fields = _ENTRY.unpack_from(table, position)
        magic, flags, method, crc = fields[0], fields[3], fields[4], fields[7]
        name_end = position + _ENTRY.size + fields[10]
        end = name_end + fields[11] + fields[12]
        name = table[position + _ENTRY.size : name_end].decode(errors="replace")
        if magic != b"PK\1\2" or end > len(table) or name in members or "\ufffd" in name:
            refuse("its table of contents is damaged")
        stored, size, header = _sizes(fields, table[name_end : name_end + fields[11]])
        if method or flags & _ENCRYPTED or stored != size:
            refuse(f"{short(name)} is compressed or encrypted")
        members[name] = ZipMember(header, size, crc, start + position)
        position = end
    if position != len(table) or len(members) != count:
        refuse(f"its table of contents lists {len(members)} files, its end record says {count}")
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
            wide = [*struct.unpack(f"<{len(body) // 8}Q", body[: len(body) // 8 * 8])]
        position += 4 + length
    if len(wide) < (size, stored, header).count(_NARROW):
        refuse("its zip64 sizes are missing")
    size, stored, header = (wide.pop(0) if value == _NARROW else value for value in (size, stored, header))
    return stored, size, header


def data_start(window: ReadWindow, name: str, member: ZipMember, limit: int) -> int:
    """Return where a member's bytes start, after its local header; `limit` is where they have to end."""
    fields = _LOCAL.unpack(window.bytes_at(member.header, _LOCAL.size))
    magic, method, name_length, extra_length = fields[0], fields[3], fields[9], fields[10]
    raw = window.bytes_at(member.header + _LOCAL.size, name_length)
    start = member.header + _LOCAL.size + name_length + extra_length
    if magic != b"PK\3\4" or method or raw != name.encode() or start + member.size > limit:
        refuse(f"the header of {short(name)} does not agree with the table of contents")
    return int(start)


def member_bytes(window: ReadWindow, name: str, built: ZipDirectory, limit: int) -> bytes:
    """Return the content of one small file of the zip, checked against its checksum."""
    member = built.members[name]
    if member.size > limit:
        refuse(f"{short(name)} has {member.size} bytes")
    raw = window.bytes_at(data_start(window, name, member, window.length), member.size)
    if member.crc and zlib.crc32(raw) != member.crc:
        refuse(f"{short(name)} does not match its checksum")
    return raw


MAX_FILE_DIRECTORY = 64 * 2**20
MAX_FILE_DESCRIPTION = 256 * 2**20


def file_window(fd: int) -> ReadWindow:
    """Return a view of an open file."""
    return ReadWindow(partial(read_exactly, fd), os.fstat(fd).st_size)


def read_whole(window: ReadWindow) -> tuple[ZipDirectory, bytes]:
    """Return how a file of torch.save is built, not an item in one, and its description.

    Raises:
        InvalidFileError: When it is something else.
    """
    built = read_zip(window, MAX_FILE_DIRECTORY)
    return built, member_bytes(window, f"{built.prefix}/data.pkl", built, MAX_FILE_DESCRIPTION)


_read_description = lru_cache(maxsize=4096)(read_description)
MAX_DIRECTORY = 2**20
MAX_DESCRIPTION = 2**20


class TorchZipItem(NamedTuple):
    """One chunk's data."""

    description: TensorDescription  # dtype, shape and strides
    data_offset: int  # where the storage's bytes start, counted from the item's start
    data_length: int  # bytes of the storage
    crc: int | None  # CRC32 of those bytes, or None when the writer did not compute it


def parse_item(window: ReadWindow) -> tuple[TorchZipItem, ZipDirectory]:
    """Return what the item in `window` holds, and how it is built.

    Raises:
        InvalidFileError: When it is not a tensor as torch.save writes it.
    """
    built = read_zip(window, MAX_DIRECTORY)
    description = _read_description(member_bytes(window, f"{built.prefix}/data.pkl", built, MAX_DESCRIPTION))
    return locate_data(window, built, description), built


def locate_data(window: ReadWindow, built: ZipDirectory, description: TensorDescription) -> TorchZipItem:
    """Return where the storage of a tensor is.

    Raises:
        InvalidFileError: When it is not there, or too short for the tensor.
    """
    members, name = built.members, f"{built.prefix}/data/{description.storage}"
    if name not in members:
        refuse(f"it has no {short(name)}")
    start, length = data_start(window, name, members[name], built.directory), members[name].size
    strides = zip(description.shape, description.strides, strict=True)
    reach = (description.start + sum((n - 1) * s for n, s in strides) + 1) * description.dtype.size
    if math.prod(description.shape) and reach > length:
        refuse(f"its elements reach {reach} bytes into {length} bytes of data")
    has_crc = members[name].crc or members[f"{built.prefix}/data.pkl"].crc
    return TorchZipItem(description, start, length, members[name].crc if has_crc else None)
