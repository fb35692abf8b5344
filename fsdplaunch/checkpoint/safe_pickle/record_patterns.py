"""The three records that make up nearly all of a large index, read by the row instead of opcode by opcode.

A checkpoint of a thousand ranks holds a million of them in the same few bytes each. Every function here takes the
interpreter just after it recalled a record's class. It does exactly what the opcodes of the records that follow
would do, and leaves the first one that looks otherwise to run step by step.
"""

import re
from typing import Any, TypeVar

from fsdplaunch.checkpoint.checked_ints import LARGEST, check_counts
from fsdplaunch.checkpoint.invalid_file import InvalidFileError
from fsdplaunch.checkpoint.item_location import ItemKey, ItemLocation
from fsdplaunch.checkpoint.regions import Region
from fsdplaunch.checkpoint.safe_pickle.interpreter import Interpreter, PickledCallable

T = TypeVar("T")
METADATA = "torch.distributed.checkpoint.metadata"
STORAGE_INFO = "torch.distributed.checkpoint.filesystem._StorageInfo"
SIZE = "torch.Size"
# Every opcode announces by its first byte how long it is, so that a match cuts the bytes as the interpreter would.
_INT = rb"(?:K.|M..|J.{4}|\x8a(?:\x05.{5}|\x06.{6}|\x07.{7}|\x08.{8}))"
_REF = rb"(?:h.|j.{4})"
_ANY = rb"(h.|j.{4})"
# torch.Size(tuple): after the class the numbers, the tuple's opcode, then the call, each memoized.
_NUMBERS = rb"((?:%b){1,3}[\x85-\x87])\x94\x85\x94R\x94" % _INT
_TEXT = rb"(?:(%b)|\x8c(.)([^\x94]*)\x94)" % _REF  # a text met before, or a new one and its length
# Both start with the record's class. %b: the keys of its fields and the classes of their values.
_CHUNK = rb"%%b\)\x81\x94\}\x94\(%%b%%b%b%%b(?:%%b%b|(%b))ub" % (_NUMBERS, _NUMBERS, _REF)
_ITEM = rb"%%b\)\x81\x94\}\x94\(%%b%b%%b(?:%b|N)%%b%%b%bub" % (_TEXT, _INT, _NUMBERS)
_ITEM += rb"%%b\)\x81\x94\}\x94\(%%b%b%%b(%b)%%b(%b)ub" % (_TEXT, _INT, _INT)
_FIRST_CHUNK = re.compile(_CHUNK % ((_ANY,) * 5), re.DOTALL)
_FIRST_ITEM = re.compile(_ITEM % ((_ANY,) * 9), re.DOTALL)
_CHUNK_TERMS = (f"{METADATA}.ChunkStorageMetadata", "offsets", SIZE, "sizes", SIZE)
_ITEM_TERMS = (
    *(f"{METADATA}.MetadataIndex", "fqn", "index", "offset", SIZE),
    *(STORAGE_INFO, "relative_path", "offset", "length"),
)
_INTS = re.compile(_INT, re.DOTALL)
_LONG1, _TUPLE1, _BININT = 0x8A, 0x85, ord("J")
# Nothing that torch writes refers to the state of a record again, or to an item's key and place.
_SPENT = object()
_MAX_KNOWN = 2**16
_MAX_FORMS = 16


class KnownPatterns:
    """What one index repeats: patterns with its own references in place, and what stretches of bytes mean."""

    __slots__ = ("chunk_forms", "item_forms", "numbers", "records", "sizes", "texts")

    def __init__(self) -> None:
        self.chunk_forms: dict[bytes, re.Pattern[bytes]] = {}
        self.item_forms: dict[bytes, re.Pattern[bytes]] = {}
        self.records: dict[bytes, tuple[Region, tuple[Any, ...]]] = {}
        self.sizes: dict[bytes, tuple[tuple[int, ...], tuple[Any, ...]]] = {}
        self.numbers: dict[bytes, int] = {}
        self.texts: dict[bytes, str] = {}


def fuse_chunks(m: Interpreter, width: int) -> int:
    """Read ChunkStorageMetadata records, as boxes, and return how many.

    Args:
        m: The interpreter.
        width: Bytes of the reference to the class, which was just read.
    """
    known, data, position = _known(m), m.data, m.position - width
    pattern = _pattern(m, known.chunk_forms, width, _FIRST_CHUNK, _CHUNK, _CHUNK_TERMS)
    if pattern is None:
        return 0
    boxes, stack, memo, match, before = known.records, m.stack, m.memo, pattern.match, len(m.stack)
    while found := match(data, position):
        raw = found[0]
        read = boxes.get(raw) or _box(m, known, found, raw)
        if read is None:
            break
        stack.append(read[0])
        memo += read[1]
        position = found.end()
        m.position = position
    return len(stack) - before


def _box(
    m: Interpreter, known: KnownPatterns, found: re.Match[bytes], raw: bytes
) -> tuple[Region, tuple[Any, ...]] | None:
    """Return a chunk's box and what reading it memoizes. References keep their meaning: equal bytes are equal."""
    start, size, ref = found.groups()
    offsets = _spelled_size(known, start)
    if offsets is None:
        return None
    if ref:
        try:
            box = Region(offsets[0], check_counts(m.fetch(ref), "a size"))
        except InvalidFileError:
            return None
        return _keep(known.records, raw, (box, (box, _SPENT, *offsets[1])))
    sizes = _spelled_size(known, size)
    if sizes is None:
        return None
    box = Region(offsets[0], sizes[0])
    return _keep(known.records, raw, (box, (box, _SPENT, *offsets[1], *sizes[1])))


def fuse_items(m: Interpreter, width: int) -> int:
    """Read pairs of a tensor chunk's MetadataIndex and its _StorageInfo, without transforms, and return how many.

    Args:
        m: The interpreter.
        width: Bytes of the reference to the first class, which was just read.
    """
    known, data, position = _known(m), m.data, m.position - width
    pattern = _pattern(m, known.item_forms, width, _FIRST_ITEM, _ITEM, _ITEM_TERMS)
    if pattern is None:
        return 0
    stack, memo, match, before = m.stack, m.memo, pattern.match, len(m.stack)
    sizes, numbers, new, new_key = known.sizes, known.numbers, tuple.__new__, ItemKey
    while found := match(data, position):
        name_ref, name_length, name, place, path_ref, path_length, path, first, count = found.groups()
        size = sizes.get(place) or _spelled_size(known, place)
        offset, length = numbers.get(first), numbers.get(count)
        if offset is None or length is None:
            offset, length = _number(known, first), _number(known, count)
        fqn = m.fetch(name_ref) if name_ref else _text(known, name_length, name)
        file = m.fetch(path_ref) if path_ref else _text(known, path_length, path)
        if size is None or type(fqn) is not str or type(file) is not str:
            break
        if offset < 0 or length < 0 or offset + length > LARGEST:
            break
        stack += (new(new_key, (fqn, size[0])), new(ItemLocation, (file, offset, length)))
        memo += (_SPENT, _SPENT) if name_ref else (_SPENT, _SPENT, fqn)
        memo += size[1]
        memo += (_SPENT, _SPENT) if path_ref else (_SPENT, _SPENT, file)
        position = found.end()
        m.position = position
    return (len(stack) - before) // 2


def _known(m: Interpreter) -> KnownPatterns:
    known: KnownPatterns = m.known or KnownPatterns()
    m.known = known
    return known


def _pattern(
    m: Interpreter,
    made: dict[bytes, re.Pattern[bytes]],
    width: int,
    first: re.Pattern[bytes],
    text: bytes,
    terms: tuple[str, ...],
) -> re.Pattern[bytes] | None:
    """Return the pattern of a record with this index's own references for the names in it; None: step by step."""
    start = m.position - width
    token = m.data[start : m.position]
    if token in made:
        return made[token]
    found = first.match(m.data, start)
    if found is None or len(made) >= _MAX_FORMS:
        return None
    tokens = _references(found, text)
    if not all(_is_term(m.fetch(ref), term) for ref, term in zip(tokens, terms, strict=True)):
        return None
    pattern = re.compile(text % tuple(map(re.escape, tokens)), re.DOTALL)
    made[token] = pattern
    return pattern


def _references(found: re.Match[bytes], text: bytes) -> list[bytes]:
    """Return what stood for each %b of `text` in the first record, which has groups of its own between them."""
    tokens: list[bytes] = []
    for group, place in enumerate(re.finditer(rb"%b|(?<!\\)\((?!\?)", text), 1):
        if place[0] == b"%b":
            # A chunk that refers to its size names torch.Size only once.
            tokens.append(found[group] or tokens[2])
    return tokens


def _is_term(value: Any, term: str) -> bool:
    """Say whether a reference is to a class (whose name has a dot) or to the name of a field."""
    if "." in term:
        return type(value) is PickledCallable and value.name == term
    return type(value) is str and value == term


def _spelled_size(known: KnownPatterns, raw: bytes) -> tuple[tuple[int, ...], tuple[Any, ...]] | None:
    """Return the size that the bytes spell and what reading it memoizes; None when it needs a closer look."""
    found = known.sizes.get(raw)
    if found is not None:
        return found
    values = tuple(_number(known, part) for part in _INTS.findall(raw[:-1]))
    if len(values) != raw[-1] - _TUPLE1 + 1 or min(values) < 0:
        return None
    return _keep(known.sizes, raw, (values, (values, (values,), values)))


def _number(known: KnownPatterns, token: bytes) -> int:
    """Return the number of one integer opcode with its argument."""
    if token[0] == _LONG1:
        return _keep(known.numbers, token, int.from_bytes(token[2:], "little", signed=True))
    return _keep(known.numbers, token, int.from_bytes(token[1:], "little", signed=token[0] == _BININT))


def _text(known: KnownPatterns, length: bytes, raw: bytes) -> str | None:
    """Return a new text, None when it is not as long as it is said to be."""
    if len(raw) != length[0]:
        return None
    return known.texts.get(raw) or _keep(known.texts, raw, raw.decode())


def _keep(table: dict[bytes, T], raw: bytes, value: T) -> T:
    """Remember what some bytes mean, in a table of bounded size."""
    if len(table) >= _MAX_KNOWN:
        table.clear()
    table[raw] = value
    return value
