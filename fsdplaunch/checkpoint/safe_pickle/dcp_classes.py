"""The stand-ins for the classes that torch 2.1 to 2.15 names in `.metadata`. Inert: they check and keep fields.

The three records that make up nearly all of a large index are read by the row instead of opcode by opcode.
"""

import re
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from fsdplaunch.checkpoint.chunks import ItemKey, ItemLocation, Region
from fsdplaunch.checkpoint.dtypes import DTYPES, Dtype
from fsdplaunch.checkpoint.safe_pickle.unpickle import Fuse, Interpreter, PickledCallable, PickledRecord
from fsdplaunch.checkpoint.untrusted_files import LARGEST, InvalidFileError, check_count, check_counts

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


# torch has one extension; more than a few for one item cannot be its.
MAX_TRANSFORMS = 4
_SHARDED_TENSOR = "torch.distributed._shard.sharded_tensor.metadata"


class TensorProperties(PickledRecord):
    """Dtype and layout of a tensor. Torch 2.15 adds strides as a sixth field; items carry their own."""

    __slots__ = ("dtype", "layout")

    def __init__(self) -> None:
        self.dtype: Dtype | None = None
        self.layout = ""

    def __setstate__(self, state: Any) -> None:
        if type(state) is not tuple or len(state) not in {5, 6} or not isinstance(state[0], Dtype):
            msg = "TensorProperties has a state that is not its own"
            raise InvalidFileError(msg)
        if type(state[1]) is not str:
            msg = "a tensor's layout is not a layout"
            raise InvalidFileError(msg)
        self.dtype, self.layout = state[0], state[1]


class ChunkEntry(PickledRecord):
    """One chunk of a tensor."""

    __slots__ = ("box",)
    takes_state = True
    stands_for, known = "ChunkStorageMetadata", ("offsets", "sizes")

    def __init__(self) -> None:
        self.box: Region | None = None

    def fill(self, fields: dict[str, Any]) -> None:
        """Keep the rectangle."""
        self.box = Region(
            check_counts(fields.get("offsets"), "a chunk's offset"),
            check_counts(fields.get("sizes"), "a chunk's size"),
        )


class TensorEntry(PickledRecord):
    """One tensor: dtype, global shape, chunks."""

    __slots__ = ("chunks", "dtype", "layout", "shape")
    takes_state = True
    stands_for, known = "TensorStorageMetadata", ("properties", "size", "chunks")

    def __init__(self) -> None:
        self.dtype: Dtype | None = None
        self.layout = ""
        self.shape: tuple[int, ...] = ()
        self.chunks: list[Any] = []

    def fill(self, fields: dict[str, Any]) -> None:
        """Keep what describes the tensor."""
        properties, chunks = fields.get("properties"), fields.get("chunks")
        if not isinstance(properties, TensorProperties):
            msg = "a tensor has no properties"
            raise InvalidFileError(msg)
        if type(chunks) is not list:
            msg = "a tensor's chunks are not a list of chunks"
            raise InvalidFileError(msg)
        self.dtype, self.layout = properties.dtype, properties.layout
        self.shape = check_counts(fields.get("size"), "a tensor's size")
        self.chunks = chunks  # looked into when all has been read: until then a file could still change it


def resolve_chunks(entries: Iterable[Any], most: int) -> None:
    """Have every tensor's chunks be boxes.

    Args:
        entries: All entries; those that are not tensors are passed over.
        most: The most chunks that they may name together: a list can be named by many of them.

    Raises:
        InvalidFileError: Something else is among them, or there are more.
    """
    named, resolved = 0, set[int]()
    for entry in entries:
        if not isinstance(entry, TensorEntry):
            continue
        named += len(entry.chunks)
        if named > most:
            msg = f"its tensors name more than the {most} chunks that a file of its size can describe"
            raise InvalidFileError(msg)
        if id(entry.chunks) not in resolved:
            _resolve(entry.chunks)
            resolved.add(id(entry.chunks))


def _resolve(chunks: list[Any]) -> None:
    """Put the box in the place of each record of a chunk."""
    if not set(map(type, chunks)) <= {Region, ChunkEntry}:
        msg = "a tensor's chunks are not a list of chunks"
        raise InvalidFileError(msg)
    chunks[:] = [box for item in chunks if (box := item if type(item) is Region else item.box) is not None]


class ValueEntry(PickledRecord):
    """An entry that is not a tensor."""

    __slots__ = ()
    stands_for = "BytesStorageMetadata"


class ItemIndex(PickledRecord):
    """The key of one stored item: a name, and a chunk's offset when it is part of a tensor."""

    __slots__ = ("fqn", "offset")
    takes_state = True
    stands_for, known = "MetadataIndex", ("fqn", "offset", "index")

    def __init__(self) -> None:
        self.fqn = ""
        self.offset: tuple[int, ...] | None = None

    def __hash__(self) -> int:
        return hash((self.fqn, self.offset))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ItemIndex) and self.fqn == other.fqn and self.offset == other.offset

    def fill(self, fields: dict[str, Any]) -> None:
        """Keep name and offset."""
        if type(fields.get("fqn")) is not str:
            msg = "an item's name is not text"
            raise InvalidFileError(msg)
        self.fqn = fields["fqn"]
        offset = fields.get("offset")
        self.offset = None if offset is None else check_counts(offset, "an item's offset")


class StorageInfo(PickledRecord):
    """Where one item stands. Fields that are None are not written."""

    __slots__ = ("length", "offset", "relative_path", "transforms")
    takes_state = True
    stands_for, known = "_StorageInfo", ("relative_path", "offset", "length", "transform_descriptors")

    def __init__(self) -> None:
        self.relative_path = ""
        self.offset = self.length = 0
        self.transforms: tuple[str, ...] = ()

    def fill(self, fields: dict[str, Any]) -> None:
        """Keep the place."""
        if type(fields.get("relative_path")) is not str:
            msg = "a file name is not text"
            raise InvalidFileError(msg)
        self.relative_path = fields["relative_path"]
        self.offset = check_count(fields.get("offset"), "an item's place")
        self.length = check_count(fields.get("length"), "an item's length")
        if self.offset + self.length > LARGEST:
            msg = "an item ends beyond any file"
            raise InvalidFileError(msg)
        transforms = fields.get("transform_descriptors") or ()
        if (
            type(transforms) not in {list, tuple}
            or len(transforms) > MAX_TRANSFORMS
            or not all(type(item) is str for item in transforms)
        ):
            msg = "an item's transforms are not a short list of names"
            raise InvalidFileError(msg)
        self.transforms = tuple(transforms)


class StorageNote(PickledRecord):
    """Identifiers of the save; nothing here is needed."""

    __slots__ = ()
    stands_for, known = "StorageMeta", ("checkpoint_id", "save_id", "load_id", "modules")


class Metadata(PickledRecord):
    """The whole index."""

    __slots__ = ("planner_data", "state_dict_metadata", "storage_data")
    stands_for = "Metadata"
    known = ("state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version")

    def __init__(self) -> None:
        self.state_dict_metadata: dict[Any, Any] = {}
        self.planner_data: Any = None
        self.storage_data: dict[Any, Any] = {}

    def fill(self, fields: dict[str, Any]) -> None:
        """Keep the tables."""
        if type(fields.get("state_dict_metadata")) is not dict or type(fields.get("storage_data")) is not dict:
            msg = "Metadata lacks its tables"
            raise InvalidFileError(msg)
        self.state_dict_metadata = fields["state_dict_metadata"]
        self.storage_data = fields["storage_data"]
        self.planner_data = fields.get("planner_data")


def _size(arguments: tuple[Any, ...]) -> tuple[int, ...]:
    if len(arguments) != 1:
        msg = "torch.Size is called with several values"
        raise InvalidFileError(msg)
    return check_counts(arguments[0], "a size")


def _one(kind: type, what: str) -> Callable[[tuple[Any, ...]], Any]:
    def take(arguments: tuple[Any, ...]) -> Any:
        if len(arguments) != 1 or type(arguments[0]) is not kind:
            msg = f"{what} is called with something else than one {kind.__name__}"
            raise InvalidFileError(msg)
        return arguments[0]

    return take


def _layout(arguments: tuple[Any, ...]) -> str:
    name: str = _one(str, "a layout")(arguments)
    return name.removeprefix("torch.")


def _folder(arguments: tuple[Any, ...]) -> None:
    if not all(type(part) is str for part in arguments):
        msg = "a path is made of something else than text"
        raise InvalidFileError(msg)


_MEMORY_FORMATS = ("TORCH_CONTIGUOUS_FORMAT", "TORCH_CHANNELS_LAST", "TORCH_PRESERVE_FORMAT")
"""Members of torch's enumeration, in the order of their values."""


def memory_format(arguments: tuple[Any, ...]) -> int | None:
    """Read a member as Python 3.11.2 writes it: `getattr(_MEM_FORMAT_ENCODING, name)`, which is not called.

    Args:
        arguments: What the pickle gives to `getattr`.

    Returns:
        The member's value; None where they ask for anything else.
    """
    match arguments:
        case (PickledCallable(name=owner), str(name)) if owner.endswith("MEM_FORMAT_ENCODING"):
            return _MEMORY_FORMATS.index(name) if name in _MEMORY_FORMATS else None
    return None


def _attribute(arguments: tuple[Any, ...]) -> int:
    found = memory_format(arguments)
    if found is None:
        msg = "it asks for an attribute"
        raise InvalidFileError(msg)
    return found


SIZE_NAMES: dict[tuple[str, str], Any] = {
    ("torch", "Size"): PickledCallable("torch.Size", call=_size),
    ("torch.serialization", "_get_layout"): PickledCallable("torch.serialization._get_layout", call=_layout),
    **{("torch", name): dtype for name, dtype in DTYPES.items()},
}


_FUSED: dict[Callable[[], PickledRecord], Fuse] = {ChunkEntry: fuse_chunks, ItemIndex: fuse_items}


def _records(module: str, makers: dict[str, Callable[[], PickledRecord]]) -> dict[tuple[str, str], Any]:
    return {
        (module, name): PickledCallable(f"{module}.{name}", new=make, fuse=_FUSED.get(make))
        for name, make in makers.items()
    }


INDEX_NAMES: dict[tuple[str, str], Any] = {
    **SIZE_NAMES,
    **_records(
        METADATA,
        {
            "Metadata": Metadata,
            "MetadataIndex": ItemIndex,
            "TensorStorageMetadata": TensorEntry,
            "BytesStorageMetadata": ValueEntry,
            "ChunkStorageMetadata": ChunkEntry,
            "TensorProperties": TensorProperties,
            "StorageMeta": StorageNote,
        },
    ),
    **_records("torch.distributed.checkpoint.filesystem", {"_StorageInfo": StorageInfo}),
    **_records(_SHARDED_TENSOR, {"TensorProperties": TensorProperties}),
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
