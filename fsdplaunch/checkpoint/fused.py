"""The three records that make up nearly all of a large index, each read in one step.

A checkpoint of a thousand ranks holds a million of them in the same few bytes each. Every function here takes
the machine just after it recalled the record's class, and either does exactly what the opcodes that follow would
do, or does nothing and lets them run one by one.
"""

import re
from typing import Any

from fsdplaunch.checkpoint.boxes import Box
from fsdplaunch.checkpoint.counts import LARGEST, check_counts
from fsdplaunch.checkpoint.machine import Machine

_INT = rb"(?:K.|M..|J.{4}|\x8a(?:\x05.{5}|\x06.{6}|\x07.{7}|\x08.{8}))"
_REF = rb"(?:h.|j.{4})"
# torch.Size(tuple): the class, the numbers, the tuple's opcode, then the call, each memoized.
_SIZE = rb"(%b)((?:%b){1,3})([\x85-\x87])\x94\x85\x94R\x94" % (_REF, _INT)
_START = rb"\)\x81\x94\}\x94\((%b)" % _REF
_CHUNK = re.compile(_START + _SIZE + rb"(%b)(?:%b|(%b))ub" % (_REF, _SIZE, _REF), re.DOTALL)
_NAMED = re.compile(_START + rb"(?:(%b)|\x8c(.))" % _REF, re.DOTALL)
_INDEX = re.compile(rb"(%b)(?:%b|N)(%b)%bub" % (_REF, _INT, _REF, _SIZE), re.DOTALL)
_INFO = re.compile(rb"(%b)(%b)(%b)(%b)ub" % (_REF, _INT, _REF, _INT), re.DOTALL)
_LONG1, _TUPLE1, _BININT = 0x8A, 0x85, ord("J")
_FIRST_INT = re.compile(_INT, re.DOTALL)
# Nothing that torch writes refers to the state of a record again.
_STATE = object()


def fuse_chunk(m: Machine, record: Any) -> bool:
    """Read a ChunkStorageMetadata: two sizes, the second perhaps one that was met before."""
    found = _CHUNK.match(m.data, m.position)
    if found is None:
        return False
    key, cls, numbers, arity, other_key, other_cls, other_numbers, other_arity, ref = found.groups()
    offsets = _size(m, cls, numbers, arity)
    sizes = check_counts(m.fetch(ref), "a size") if ref else _size(m, other_cls, other_numbers, other_arity)
    if offsets is None or sizes is None:
        return False
    if m.fetch(key) != "offsets" or m.fetch(other_key) != "sizes":
        return False
    record.box = Box(offsets, sizes)
    m.memo += [record, _STATE, offsets, (offsets,), offsets]
    if not ref:
        m.memo += [sizes, (sizes,), sizes]
    m.position = found.end()
    return True


def fuse_index(m: Machine, record: Any) -> bool:
    """Read a MetadataIndex of a tensor chunk: name, hint, offset."""
    name = _named(m, "fqn")
    if name is None:
        return False
    fqn, fresh, position = name
    found = _INDEX.match(m.data, position)
    if found is None:
        return False
    hint_key, key, cls, numbers, arity = found.groups()
    offset = _size(m, cls, numbers, arity)
    if offset is None or m.fetch(hint_key) != "index" or m.fetch(key) != "offset":
        return False
    record.fqn, record.offset = fqn, offset
    m.memo += [record, _STATE, *fresh, offset, (offset,), offset]
    m.position = found.end()
    return True


def fuse_info(m: Machine, record: Any) -> bool:
    """Read a _StorageInfo without transforms: file, offset, length."""
    name = _named(m, "relative_path")
    if name is None:
        return False
    path, fresh, position = name
    found = _INFO.match(m.data, position)
    if found is None:
        return False
    key, first, other_key, second = found.groups()
    offset, length = _number(first), _number(second)
    if m.fetch(key) != "offset" or m.fetch(other_key) != "length":
        return False
    if offset < 0 or length < 0 or offset + length > LARGEST:
        return False
    record.relative_path, record.offset, record.length = path, offset, length
    m.memo += [record, _STATE, *fresh]
    m.position = found.end()
    return True


def _named(m: Machine, wanted: str) -> tuple[str, list[str], int] | None:
    """Read a record's start up to its first field, a text: the text, what of it is memoized, and where it ends."""
    found = _NAMED.match(m.data, m.position)
    if found is None or m.fetch(found[1]) != wanted:
        return None
    if found[2]:
        text = m.fetch(found[2])
        return (text, [], found.end()) if type(text) is str else None
    start = found.end()
    end = start + found[3][0]
    if m.data[end : end + 1] != b"\x94":
        return None
    text = m.data[start:end].decode()
    return text, [text], end + 1


def _size(m: Machine, cls: bytes, numbers: bytes, arity: bytes) -> tuple[int, ...] | None:
    """Return the size that the bytes spell, or None when it has to be looked at closely."""
    known = m.sizes.get((cls, numbers, arity))
    if known is None:
        values = tuple(_number(part) for part in _FIRST_INT.findall(numbers))
        if (
            getattr(m.fetch(cls), "name", None) != "torch.Size"
            or len(values) != arity[0] - _TUPLE1 + 1
            or min(values) < 0
        ):
            return None
        known = m.sizes[cls, numbers, arity] = values
    return known


def _number(token: bytes) -> int:
    """Return the number of one integer opcode with its argument."""
    if token[0] == _LONG1:
        return int.from_bytes(token[2:], "little", signed=True)
    return int.from_bytes(token[1:], "little", signed=token[0] == _BININT)
