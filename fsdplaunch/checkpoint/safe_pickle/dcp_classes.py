"""The stand-ins for the classes that torch 2.1 to 2.15 names in `.metadata`. Inert: they check and keep fields."""

from collections.abc import Callable, Iterable
from typing import Any

from fsdplaunch.checkpoint.checked_ints import LARGEST, check_count, check_counts
from fsdplaunch.checkpoint.dtypes import DTYPES, Dtype
from fsdplaunch.checkpoint.invalid_file import InvalidFileError
from fsdplaunch.checkpoint.regions import Region
from fsdplaunch.checkpoint.safe_pickle.interpreter import Fuse, PickledCallable, PickledRecord
from fsdplaunch.checkpoint.safe_pickle.record_patterns import METADATA, fuse_chunks, fuse_items

# torch has one extension; more than a few for one item are none of its.
MAX_TRANSFORMS = 4
_SHARDED_TENSOR = "torch.distributed._shard.sharded_tensor.metadata"


def _fields(state: Any, known: tuple[str, ...], owner: str) -> dict[str, Any]:
    if type(state) is not dict or not all(key in known for key in state):
        msg = f"{owner} has a state that is not its own"
        raise InvalidFileError(msg)
    return state


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

    def __init__(self) -> None:
        self.box: Region | None = None

    def __setstate__(self, state: Any) -> None:
        fields = _fields(state, ("offsets", "sizes"), "ChunkStorageMetadata")
        self.box = Region(
            check_counts(fields.get("offsets"), "a chunk's offset"),
            check_counts(fields.get("sizes"), "a chunk's size"),
        )


class TensorEntry(PickledRecord):
    """One tensor: dtype, global shape, chunks."""

    __slots__ = ("chunks", "dtype", "layout", "shape")
    takes_state = True

    def __init__(self) -> None:
        self.dtype: Dtype | None = None
        self.layout = ""
        self.shape: tuple[int, ...] = ()
        self.chunks: list[Region] = []

    def __setstate__(self, state: Any) -> None:
        fields = _fields(state, ("properties", "size", "chunks"), "TensorStorageMetadata")
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
        entries: All entries; those that are no tensors are passed over.
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

    def __setstate__(self, state: Any) -> None:
        _fields(state, (), "BytesStorageMetadata")


class ItemIndex(PickledRecord):
    """The key of one stored item: a name, and a chunk's offset when it is part of a tensor."""

    __slots__ = ("fqn", "offset")
    takes_state = True

    def __init__(self) -> None:
        self.fqn = ""
        self.offset: tuple[int, ...] | None = None

    def __hash__(self) -> int:
        return hash((self.fqn, self.offset))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ItemIndex) and self.fqn == other.fqn and self.offset == other.offset

    def __setstate__(self, state: Any) -> None:
        fields = _fields(state, ("fqn", "offset", "index"), "MetadataIndex")
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

    def __init__(self) -> None:
        self.relative_path = ""
        self.offset = self.length = 0
        self.transforms: tuple[str, ...] = ()

    def __setstate__(self, state: Any) -> None:
        fields = _fields(state, ("relative_path", "offset", "length", "transform_descriptors"), "_StorageInfo")
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

    def __setstate__(self, state: Any) -> None:
        _fields(state, ("checkpoint_id", "save_id", "load_id", "modules"), "StorageMeta")


class Metadata(PickledRecord):
    """The whole index."""

    __slots__ = ("planner_data", "state_dict_metadata", "storage_data")

    def __init__(self) -> None:
        self.state_dict_metadata: dict[Any, Any] = {}
        self.planner_data: Any = None
        self.storage_data: dict[Any, Any] = {}

    def __setstate__(self, state: Any) -> None:
        known = ("state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version")
        fields = _fields(state, known, "Metadata")
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
