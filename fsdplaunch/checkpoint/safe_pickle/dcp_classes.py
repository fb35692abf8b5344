"""The index that torch 2.1 to 2.15 writes into `.metadata`, read as inert objects and then checked field by field.

The three records that make up nearly all of a large index are read by the row instead of opcode by opcode.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import starmap
from typing import Any, TypeVar

from fsdplaunch.checkpoint.chunks import ItemKey, ItemLocation, Region
from fsdplaunch.checkpoint.dtypes import DTYPES, Dtype
from fsdplaunch.checkpoint.safe_pickle import Interpreter, PickledCallable, PickledObject, unpickle
from fsdplaunch.checkpoint.untrusted_files import (
    LARGEST,
    InvalidFileError,
    check_count,
    check_counts,
    refuse,
    short,
)

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
_MAX_STATES = 2
# Bytes of an index for one chunk of a tensor, at the least.
_BYTES_PER_CHUNK = 16


@dataclass(slots=True)
class KnownPatterns:
    """What one index repeats: patterns with its own references in place, and what stretches of bytes mean."""

    forms: dict[bytes, re.Pattern[bytes]] = field(default_factory=dict)
    records: dict[bytes, tuple[Region, tuple[Any, ...]]] = field(default_factory=dict)
    sizes: dict[bytes, tuple[tuple[int, ...], tuple[Any, ...]]] = field(default_factory=dict)
    numbers: dict[bytes, int] = field(default_factory=dict)
    texts: dict[bytes, str] = field(default_factory=dict)


def fuse_chunks(m: Interpreter, width: int) -> int:
    """Read ChunkStorageMetadata records, as boxes, and return how many.

    The reference to the class, of `width` bytes, was just read.
    """
    known: KnownPatterns = m.known or KnownPatterns()
    m.known = known
    pattern = _pattern(m, known, width, _FIRST_CHUNK, _CHUNK, _CHUNK_TERMS)
    if pattern is None:
        return 0
    data, position, boxes, match, before = m.data, m.position - width, known.records, pattern.match, len(m.stack)
    while found := match(data, position):
        read = boxes.get(found[0])
        if read is None:
            start, size, ref = found.groups()
            offsets = _spelled_size(known, start)
            try:
                sizes = (check_counts(m.fetch(ref), "a size"), ()) if ref else _spelled_size(known, size)
            except InvalidFileError:
                break
            if offsets is None or sizes is None:
                break
            box = Region(offsets[0], sizes[0])
            # References keep their meaning: equal bytes are equal.
            read = _keep(boxes, found[0], (box, (box, _SPENT, *offsets[1], *sizes[1])))
        m.stack.append(read[0])
        m.memo += read[1]
        m.position = position = found.end()
    return len(m.stack) - before


def fuse_items(m: Interpreter, width: int) -> int:
    """Read pairs of a tensor chunk's MetadataIndex and its _StorageInfo, without transforms, and return how many.

    The reference to the first class, of `width` bytes, was just read.
    """
    known: KnownPatterns = m.known or KnownPatterns()
    m.known = known
    pattern = _pattern(m, known, width, _FIRST_ITEM, _ITEM, _ITEM_TERMS)
    if pattern is None:
        return 0
    data, position, stack, memo, match = m.data, m.position - width, m.stack, m.memo, pattern.match
    sizes, numbers, new, new_key, before = known.sizes, known.numbers, tuple.__new__, ItemKey, len(m.stack)
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
        m.position = position = found.end()
    return (len(stack) - before) // 2


def _pattern(
    m: Interpreter, known: KnownPatterns, width: int, first: re.Pattern[bytes], text: bytes, terms: tuple[str, ...]
) -> re.Pattern[bytes] | None:
    """Return the pattern of a record with this index's own references for the names in it; None: step by step."""
    start = m.position - width
    token = m.data[start : m.position]
    if token in known.forms:
        return known.forms[token]
    found = first.match(m.data, start)
    if found is None or len(known.forms) >= _MAX_FORMS:
        return None
    # What stood for each %b of `text` in the first record, which has groups of its own between them.
    tokens: list[bytes] = []
    for group, place in enumerate(re.finditer(rb"%b|(?<!\\)\((?!\?)", text), 1):
        if place[0] == b"%b":
            # A chunk that refers to its size names torch.Size only once.
            tokens.append(found[group] or tokens[2])
    for ref, term in zip(tokens, terms, strict=True):
        value = m.fetch(ref)
        is_class = type(value) is PickledCallable  # its name has a dot, that of a field has none
        if is_class != ("." in term) or (value.name if is_class else value) != term:
            return None
    pattern = known.forms[token] = re.compile(text % tuple(map(re.escape, tokens)), re.DOTALL)
    return pattern


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
    number = token[2:] if token[0] == _LONG1 else token[1:]
    signed = token[0] in (_LONG1, _BININT)
    return _keep(known.numbers, token, int.from_bytes(number, "little", signed=signed))


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


_SHARDED_TENSOR = "torch.distributed._shard.sharded_tensor.metadata"


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor: dtype, layout, global shape, chunks. Tensors may share the list of these."""

    dtype: Dtype
    layout: str
    shape: tuple[int, ...]
    chunks: list[Region]


@dataclass(frozen=True, slots=True)
class Metadata:
    """The whole index, not yet compared with itself."""

    entries: dict[str, TensorEntry | None]  # tensors by name; None for a value that is not a tensor
    paths: Any  # where each was before it was flattened; it may be anything
    places: dict[ItemKey, ItemLocation]  # where each item stands


def read_records(data: bytes, where: str) -> Metadata:
    """Return what the pickle of an index says.

    Raises:
        CheckpointError: It is damaged, or hostile.
        InvalidFileError: It is something else, or its parts are not those of an index.
    """
    found = unpickle(data, INDEX_NAMES, where=where)
    meta = _fields(found, "Metadata")
    if meta is None:
        refuse(f"it holds a {_kind(found)}, not a checkpoint's metadata")
    entries, storage = meta.get("state_dict_metadata"), meta.get("storage_data")
    if type(entries) is not dict or type(storage) is not dict:
        refuse("Metadata lacks its tables")
    # Many tensors may name one list of chunks, but not more chunks together than such a file can describe.
    most = left = len(data) // _BYTES_PER_CHUNK
    lists: dict[int, list[Region]] = {}
    tensors: dict[str, TensorEntry | None] = {}
    for name, entry in entries.items():
        if type(name) is not str:
            refuse(f"an entry is named by a {type(name).__name__}")
        tensors[name] = None if _is_a(entry, "BytesStorageMetadata") else _tensor_entry(name, entry, lists)
        left -= len(found.chunks) if (found := tensors[name]) else 0
        if left < 0:
            refuse(f"its tensors name more than the {most} chunks that a file of its size can describe")
    return Metadata(tensors, meta.get("planner_data"), dict(starmap(_item, storage.items())))


_KNOWN = {
    "Metadata": {"state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version"},
    "TensorStorageMetadata": {"properties", "size", "chunks"},
    "ChunkStorageMetadata": {"offsets", "sizes"},
    "MetadataIndex": {"fqn", "offset", "index"},
    "_StorageInfo": {"relative_path", "offset", "length", "transform_descriptors"},
}
"""The fields that a record may have."""


def _is_a(value: Any, kind: str) -> bool:
    return type(value) is PickledObject and value.name.rpartition(".")[2] == kind


def _fields(record: Any, kind: str) -> dict[str, Any] | None:
    """Return the fields of a record; None where it is another one, or has others."""
    state = record.states[0] if _is_a(record, kind) and record.states else None
    return state if type(state) is dict and state.keys() <= _KNOWN[kind] else None


def _kind(value: Any) -> str:
    return short(value.name) if type(value) is PickledObject else type(value).__name__


def _tensor_entry(name: str, entry: Any, lists: dict[int, list[Region]]) -> TensorEntry:
    fields = _fields(entry, "TensorStorageMetadata")
    if fields is None:
        refuse(f"{short(name)} is a {_kind(entry)}, not a tensor or a value")
    properties: Any = fields.get("properties")
    # Dtype and layout come first; torch 2.15 adds strides as a sixth, which items carry themselves.
    state: tuple[Any, ...] = properties.states if _is_a(properties, "TensorProperties") else ()
    if len(state) != _MAX_STATES or not isinstance(state[0], Dtype) or type(state[1]) is not str:
        refuse(f"{short(name)} has no dtype and layout")
    chunks = fields.get("chunks")
    if type(chunks) is not list:
        refuse("a tensor's chunks are not a list of chunks")
    if id(chunks) not in lists:
        lists[id(chunks)] = list(map(_region, chunks))
    return TensorEntry(state[0], state[1], check_counts(fields.get("size"), "a tensor's size"), lists[id(chunks)])


def _region(chunk: Any) -> Region:
    if type(chunk) is Region:
        return chunk
    fields = _fields(chunk, "ChunkStorageMetadata")
    if fields is None:
        refuse("a tensor's chunks are not a list of chunks")
    offsets, sizes = fields.get("offsets"), fields.get("sizes")
    return Region(check_counts(offsets, "a chunk's offset"), check_counts(sizes, "a chunk's size"))


def _item(key: Any, place: Any) -> tuple[ItemKey, ItemLocation]:
    """Return the key of an item and where it stands; fields that are None are not written."""
    if type(key) is not ItemKey:
        fields = _fields(key, "MetadataIndex") or {}
        name, offset = fields.get("fqn"), fields.get("offset")
        if type(name) is not str:
            refuse(f"its storage table has a {_kind(key)} without a name as a key")
        key = ItemKey(name, None if offset is None else check_counts(offset, "an item's offset"))
    if type(place) is not ItemLocation:
        fields = _fields(place, "_StorageInfo") or {}
        file = fields.get("relative_path")
        if type(file) is not str:
            refuse(f"an entry of its storage table is a {_kind(place)} without the name of a file")
        if fields.get("transform_descriptors"):
            what = f"{short(key.fqn)} is stored through torch's extensions"
            refuse(f"{what}: load it with torch, and save it again without them")
        start = check_count(fields.get("offset"), "an item's place")
        length = check_count(fields.get("length"), "an item's length")
        if start + length > LARGEST:
            refuse("an item ends beyond any file")
        place = ItemLocation(file, start, length)
    return key, place


def _size(arguments: tuple[Any, ...]) -> tuple[int, ...]:
    if len(arguments) != 1:
        refuse("torch.Size is called with several values")
    return check_counts(arguments[0], "a size")


def _one(kind: type, what: str) -> Callable[[tuple[Any, ...]], Any]:
    def take(arguments: tuple[Any, ...]) -> Any:
        if len(arguments) != 1 or type(arguments[0]) is not kind:
            refuse(f"{what} is called with something other than one {kind.__name__}")
        return arguments[0]

    return take


def _layout(arguments: tuple[Any, ...]) -> str:
    name: str = _one(str, "a layout")(arguments)
    return name.removeprefix("torch.")


def _folder(arguments: tuple[Any, ...]) -> None:
    if not all(type(part) is str for part in arguments):
        refuse("a path holds something other than text")


def is_memory_format(arguments: tuple[Any, ...]) -> bool:
    """Say whether a call of `getattr`, which is not called, asks for a memory format.

    Python 3.11.2 writes members of torch's enumeration that way: `getattr(_MEM_FORMAT_ENCODING, name)`.
    """
    match arguments:
        case (PickledCallable(name=owner), str(name)) if owner.endswith("MEM_FORMAT_ENCODING"):
            return name in ("TORCH_CONTIGUOUS_FORMAT", "TORCH_CHANNELS_LAST", "TORCH_PRESERVE_FORMAT")
    return False


def _attribute(arguments: tuple[Any, ...]) -> None:
    if not is_memory_format(arguments):
        refuse("it looks up an attribute")


SIZE_NAMES: dict[tuple[str, str], Any] = {
    ("torch", "Size"): PickledCallable("torch.Size", call=_size),
    ("torch.serialization", "_get_layout"): PickledCallable("torch.serialization._get_layout", call=_layout),
    **{("torch", name): dtype for name, dtype in DTYPES.items()},
}


_RECORDS = {
    METADATA: ("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties", "StorageMeta"),
    _SHARDED_TENSOR: ("TensorProperties",),
}
INDEX_NAMES: dict[tuple[str, str], Any] = {
    **SIZE_NAMES,
    **{
        (home, kind): PickledCallable(f"{home}.{kind}", new=True)
        for home, kinds in _RECORDS.items()
        for kind in kinds
    },
    (METADATA, "ChunkStorageMetadata"): PickledCallable(_CHUNK_TERMS[0], new=True, fuse=fuse_chunks),
    (METADATA, "MetadataIndex"): PickledCallable(_ITEM_TERMS[0], new=True, fuse=fuse_items),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): PickledCallable(STORAGE_INFO, new=True),
    (METADATA, "_MEM_FORMAT_ENCODING"): PickledCallable("_MEM_FORMAT_ENCODING", call=_one(int, "a memory format")),
    ("builtins", "getattr"): PickledCallable("builtins.getattr", call=_attribute),
    (_SHARDED_TENSOR, "MEM_FORMAT_ENCODING"): PickledCallable(
        "MEM_FORMAT_ENCODING", call=_one(int, "a memory format")
    ),
    **{
        (module, name): PickledCallable(f"{module}.{name}", call=_folder)
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
    },
}
