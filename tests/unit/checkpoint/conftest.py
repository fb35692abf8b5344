"""Sharded checkpoints written without torch, byte for byte in torch's layout, and open to being spoilt."""

import io
import itertools
import math
import pickle
import struct
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest

from fsdplaunch.checkpoint.merge.merge import MergeOptions, MergeResult, merge

METADATA = "torch.distributed.checkpoint.metadata"
SIZES = {"float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "bool": 1, "complex64": 8, "float8_e4m3fn": 1}
STORAGES = {
    "float32": "FloatStorage",
    "float16": "HalfStorage",
    "bfloat16": "BFloat16Storage",
    "int64": "LongStorage",
    "bool": "BoolStorage",
    "complex64": "ComplexFloatStorage",
    "complex128": "ComplexDoubleStorage",
}


@dataclass(frozen=True)
class Named:
    """A class or function, pickled by its name without being imported."""

    module: str
    name: str


@dataclass(eq=False)  # hashed by identity, so that it can be a key
class Made:
    """An object of a class, pickled as NEWOBJ and BUILD."""

    cls: Named
    state: object = None


@dataclass
class Called:
    """The result of a call, pickled as REDUCE."""

    callee: Named
    arguments: tuple


@dataclass
class Raw:
    """Opcodes as they are."""

    opcodes: bytes


@dataclass
class PersistentId:
    key: tuple


# One object per name and text, so that the memo finds it again.
KNOWN: dict[tuple[str, str], Named] = {}
TEXTS: dict[str, str] = {}


class Writer(pickle._Pickler):
    """A pickler that writes the stand-ins above."""

    def save(self, obj, save_persistent_id=True):
        if isinstance(obj, Made | Called) and id(obj) in self.memo:
            self.write(self.get(self.memo[id(obj)][0]))
        elif isinstance(obj, Named):
            self.save_name(obj)
        elif isinstance(obj, Made):
            self.save(obj.cls)
            self.write(b")\x81")
            self.memoize(obj)
            if obj.state is not None:
                self.save(obj.state)
                self.write(b"b")
        elif isinstance(obj, Called):
            self.save(obj.callee)
            self.save(obj.arguments)
            self.write(b"R")
            self.memoize(obj)
        elif isinstance(obj, PersistentId):
            self.save(obj.key)
            self.write(b"Q")
        elif isinstance(obj, Raw):
            self.write(obj.opcodes)
        else:
            super().save(obj, save_persistent_id)

    def save_name(self, obj):
        """Write a name as the C pickler does: by lines up to protocol 3, then by two texts."""
        obj = KNOWN.setdefault((obj.module, obj.name), obj)
        if id(obj) in self.memo:
            self.write(self.get(self.memo[id(obj)][0]))
            return
        if self.proto < 4:
            self.write(b"c" + obj.module.encode() + b"\n" + obj.name.encode() + b"\n")
        else:
            self.save(TEXTS.setdefault(obj.module, obj.module))
            self.save(TEXTS.setdefault(obj.name, obj.name))
            self.write(b"\x93")
        self.memoize(obj)


def dumps(obj, protocol=4) -> bytes:
    stream = io.BytesIO()
    Writer(stream, protocol).dump(obj)
    return stream.getvalue()


def size(*numbers) -> Called:
    return Called(Named("torch", "Size"), (tuple(numbers),))


def described(dtype, shape, strides=None, *, start=0, flags=None, key="0", count=None) -> object:
    """What `data.pkl` says of a tensor."""
    steps = strides if strides is not None else [math.prod(shape[at + 1 :]) for at in range(len(shape))]
    count = math.prod(shape) if count is None else count
    last = (flags,) if flags else ()
    hooks = Called(Named("collections", "OrderedDict"), ())
    if dtype in STORAGES:
        storage = PersistentId(("storage", Named("torch", STORAGES[dtype]), key, "cpu", count))
        arguments = (storage, start, tuple(shape), tuple(steps), False, hooks, *last)
        return Called(Named("torch._utils", "_rebuild_tensor_v2"), arguments)
    storage = PersistentId(("storage", Named("torch.storage", "UntypedStorage"), key, "cpu", count))
    arguments = (storage, start, tuple(shape), tuple(steps), False, hooks, Named("torch", dtype), *last)
    return Called(Named("torch._utils", "_rebuild_tensor_v3"), arguments)


def zipped(description, data: bytes, *, crc=True, byteorder=b"little", key="0", extra=()) -> bytes:
    """One item as torch.save writes it: stored members on 64-byte boundaries, sizes after them, zip64 end."""
    text = description if isinstance(description, bytes) else dumps(description, 2)
    members = [("data.pkl", text), ("byteorder", byteorder), (f"data/{key}", data), ("version", b"3\n"), *extra]
    body, table = bytearray(), bytearray()
    for name, content in members:
        full, start = f"archive/{name}".encode(), len(body)
        padding = -(start + 30 + len(full) + 4) % 64
        check = zlib.crc32(content) if crc else 0
        body += struct.pack("<4s5H3I2H", b"PK\3\4", 0, 0x808, 0, 0, 0, 0, 0, 0, len(full), 4 + padding)
        body += full + struct.pack("<2sH", b"FB", padding) + b"Z" * padding + content
        body += struct.pack("<4s3I", b"PK\7\x08", check, len(content), len(content))
        table += struct.pack(
            "<4s6H3I5H2I",
            *(b"PK\1\2", 0, 0, 0x808, 0, 0, 0, check, len(content), len(content)),
            *(len(full), 0, 0, 0, 0, 0, start),
        )
        table += full
    place, count = len(body), len(members)
    end64 = struct.pack("<4sQ2H2I4Q", b"PK\6\6", 44, 0, 45, 0, 0, count, count, len(table), place)
    locator = struct.pack("<4sIQI", b"PK\6\7", 0, place + len(table), 1)
    end = struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, count, count, len(table), place, 0)
    return bytes(body + table) + end64 + locator + end


def cut(data: bytes, shape, offsets, sizes, width: int) -> bytes:
    """The bytes of a rectangle of a row-major tensor."""
    steps = [math.prod(shape[at + 1 :]) for at in range(len(shape))]
    out = bytearray()
    run = sizes[-1] * width if sizes else width
    ranges = [range(o, o + n) for o, n in zip(offsets, sizes, strict=True)]
    for place in itertools.product(*ranges[:-1], *(part[:1] for part in ranges[-1:])):
        at = sum(i * s for i, s in zip(place, steps, strict=True)) * width
        out += data[at : at + run]
    return bytes(out)


def pattern(count: int, seed: int = 1) -> bytes:
    """Bytes that differ from place to place."""
    return bytes((at * 131 + seed * 17 + (at >> 8)) % 251 for at in range(count))


@dataclass
class Draft:
    """A checkpoint in the making. Tests change its parts before `save`."""

    entries: dict = field(default_factory=dict)
    planner: dict = field(default_factory=dict)
    storage: list = field(default_factory=list)
    files: dict = field(default_factory=dict)
    expected: dict = field(default_factory=dict)
    extra: dict = field(default_factory=dict)

    def add(
        self, name, shape, boxes=None, *, dtype="float32", top="model", data=None, item=None, **kind
    ) -> "Draft":
        """Add a tensor cut into `boxes`, box `i` stored in file `i % 2`."""
        full = f"{top}.{name}" if top else name
        data = pattern(math.prod(shape) * SIZES[dtype], len(self.entries)) if data is None else data
        boxes = [((0,) * len(shape), tuple(shape))] if boxes is None else boxes
        self.entries[full] = tensor_entry(dtype, shape, boxes)
        self.planner[full] = (top, name) if top else (name,)
        self.expected[name] = data
        for number, (offsets, sizes) in enumerate(boxes):
            part = cut(data, shape, offsets, sizes, SIZES[dtype])
            content = zipped(described(dtype, sizes), part, **kind) if item is None else item(part, sizes)
            self.put(full, offsets, content, f"__{number % 2}_0.distcp")
        return self

    def add_value(self, name, content=b"\x80\x02K\x01.", top="model") -> "Draft":
        full = f"{top}.{name}" if top else name
        self.entries[full] = Made(Named(METADATA, "BytesStorageMetadata"), {})
        self.planner[full] = (top, name) if top else (name,)
        self.put(full, None, zipped(content, b""), "__0_0.distcp")
        return self

    def put(self, name, offsets, content: bytes, file: str) -> None:
        start = len(self.files.setdefault(file, b""))
        self.files[file] += content
        self.storage.append((index_key(name, offsets), info(file, start, len(content))))

    def metadata(self) -> Made:
        state = {
            "state_dict_metadata": self.entries,
            "planner_data": self.planner,
            "storage_data": dict(self.storage),
            "storage_meta": Made(Named(METADATA, "StorageMeta"), {"checkpoint_id": None, "modules": []}),
            "version": "1.0.0",
            **self.extra,
        }
        return Made(Named(METADATA, "Metadata"), state)

    def index(self) -> bytes:
        return dumps(self.metadata())

    def save(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in self.files.items():
            (folder / name).write_bytes(content)
        (folder / ".metadata").write_bytes(self.index())
        return folder

    def merged(self, folder: Path, **options) -> MergeResult:
        """Save as `folder/ckpt`, merge into `folder/out`, and compare every byte of it."""
        result = merge(self.save(folder / "ckpt"), folder / "out", options=MergeOptions(**options))
        found = safetensors(folder / "out" / "model.safetensors")
        assert {name: data for name, (_, _, data) in found.items()} == self.expected
        return result


def tensor_entry(dtype, shape, boxes) -> Made:
    layout = Called(Named("torch.serialization", "_get_layout"), ("torch.strided",))
    memory = Called(Named(METADATA, "_MEM_FORMAT_ENCODING"), (0,))
    properties = Made(Named(METADATA, "TensorProperties"), (Named("torch", dtype), layout, False, memory, False))
    chunks = [
        Made(Named(METADATA, "ChunkStorageMetadata"), {"offsets": size(*offsets), "sizes": size(*sizes)})
        for offsets, sizes in boxes
    ]
    state = {"properties": properties, "size": size(*shape), "chunks": chunks}
    return Made(Named(METADATA, "TensorStorageMetadata"), state)


def index_key(name, offsets, index=None) -> Made:
    state = {"fqn": name, "index": index}
    return Made(
        Named(METADATA, "MetadataIndex"), state if offsets is None else {**state, "offset": size(*offsets)}
    )


def info(file, offset, length, **more) -> Made:
    state = {"relative_path": file, "offset": offset, "length": length, **more}
    return Made(Named("torch.distributed.checkpoint.filesystem", "_StorageInfo"), state)


def safetensors(path: Path) -> dict:
    """Name -> (dtype, shape, bytes) of a safetensors file, read without the library."""
    import json

    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    header.pop("__metadata__")
    data = raw[8 + length :]
    return {n: (e["dtype"], e["shape"], data[slice(*e["data_offsets"])]) for n, e in header.items()}


def tree(folder: Path) -> dict:
    """Every file below a folder with its content, to see that nothing changed."""
    return {
        str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()
    }


def names(folder: Path) -> list[str]:
    """What stands in a folder."""
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def dcp() -> SimpleNamespace:
    """What makes checkpoints: the functions and classes of this file."""
    return SimpleNamespace(**globals())


@pytest.fixture
def rows(dcp) -> Draft:
    """A small sound checkpoint: two row shards, a whole tensor, a scalar, an empty one, a value."""
    draft = Draft()
    draft.add("layer.weight", (6, 4), [((0, 0), (3, 4)), ((3, 0), (3, 4))])
    draft.add("layer.bias", (5,), dtype="bfloat16").add("scale", ()).add("none", (0, 4), [])
    return draft.add_value("step")
