"""What a model consists of: how many tensors of which shape, in which unit. Read from headers, or from names."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

from fsdplaunch.checkpoint.safetensors_format import FileHeader
from fsdplaunch.errors import UsageError
from fsdplaunch.probe.model_folder import file_header, read_index, weight_files
from fsdplaunch.probe.repeated_blocks import find_blocks

_FLOATS = ("F64", "F32", "F16", "BF16", "F8", "F4")


@dataclass(frozen=True, slots=True)
class TensorSize:
    """One kind of tensor: its shape and its bytes per element."""

    shape: tuple[int, ...]
    itemsize: int

    @property
    def numel(self) -> int:
        """Return number of elements."""
        return prod(self.shape)

    def split(self, ranks: int) -> "TensorSize":
        """Return what one of the ranks that split a layer has: a part of a matrix, all of a vector."""
        for dim, size in enumerate(self.shape) if len(self.shape) > 1 else ():
            if size % ranks == 0:
                shape = (*self.shape[:dim], size // ranks, *self.shape[dim + 1 :])
                return TensorSize(shape=shape, itemsize=self.itemsize)
        return self

    def share(self, ranks: int) -> int:
        """Return elements that the first of `ranks` ranks holds: whole rows of the first dimension, rounded up."""
        rows = self.shape[0] if self.shape else 1
        return -(-rows // ranks) * (self.numel // rows if rows else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitSize:
    """Tensors that are gathered together, as often as the model repeats them.

    Attributes:
        name: Prefix of the tensors' names; empty for the model itself.
        count: How many such units there are.
        tensors: The tensors of one of them, and how many there are of each kind.
    """

    name: str
    count: int
    tensors: tuple[tuple[TensorSize, int], ...]

    @property
    def parameters(self) -> int:
        """Return elements of one unit."""
        return sum(tensor.numel * number for tensor, number in self.tensors)

    @property
    def rows(self) -> int:
        """Return the longest first dimension: more ranks than this leave some without a shard."""
        return max((tensor.shape[0] for tensor, _ in self.tensors if tensor.shape), default=1)

    def split(self, ranks: int) -> "UnitSize":
        """Return what one of the ranks that split its layers has of it."""
        tensors = tuple((tensor.split(ranks), number) for tensor, number in self.tensors)
        return self if ranks == 1 else UnitSize(name=self.name, count=self.count, tensors=tensors)

    def share(self, ranks: int, *, flat: bool = False) -> int:
        """Return elements of one unit that a rank holds; flat: cut anywhere, as FSDP1 does."""
        if flat:
            return -(-self.parameters // ranks)
        return sum(tensor.share(ranks) * number for tensor, number in self.tensors)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """A model.

    Attributes:
        source: Where the sizes come from, in words.
        root: What belongs to no repeated block: embeddings, head, last norm.
        blocks: The repeated blocks, one entry per kind.
        itemsize: Bytes per element of most parameters.
        names: Every tensor by its full name; needed where units are found by size.
    """

    source: str
    root: UnitSize
    blocks: tuple[UnitSize, ...]
    itemsize: int
    names: Mapping[str, TensorSize]

    @property
    def parameters(self) -> int:
        """Return the elements of the full model."""
        return self.root.parameters + sum(unit.parameters * unit.count for unit in self.blocks)

    @property
    def depth(self) -> int:
        """Return repeated blocks of all kinds."""
        return sum(unit.count for unit in self.blocks)

    @property
    def stored(self) -> int:
        """Return bytes of all tensors in their own dtypes."""
        return sum(tensor.numel * tensor.itemsize for tensor in self.names.values())


def model_sizes(
    tensors: Mapping[str, TensorSize], source: str, *, prefixes: tuple[str, ...] | None = None
) -> ModelSizes:
    """Sort tensors into the model's repeated blocks and the rest.

    Args:
        tensors: By full name.
        source: Where they come from, in words.
        prefixes: Names of the blocks; found by repetition when left out.
    """
    if prefixes is None:
        groups = find_blocks({name: tensor.numel for name, tensor in tensors.items()})
        prefixes = tuple(f"{group.prefix}.{number}" for group in groups for number in range(group.count))
    members: dict[str, Counter[TensorSize]] = {prefix: Counter() for prefix in prefixes}
    root: Counter[TensorSize] = Counter()
    for name, tensor in tensors.items():
        home = next((prefix for prefix in _parents(name) if prefix in members), None)
        (root if home is None else members[home])[tensor] += 1
    kinds: dict[tuple[tuple[TensorSize, int], ...], list[str]] = {}
    for prefix, content in members.items():
        kinds.setdefault(_ordered(content), []).append(prefix)
    widths: Counter[int] = Counter()
    for tensor in tensors.values():
        widths[tensor.itemsize] += tensor.numel
    return ModelSizes(
        source=source,
        root=UnitSize(name="", count=1, tensors=_ordered(root)),
        blocks=tuple(
            UnitSize(name=found[0], count=len(found), tensors=kind) for kind, found in kinds.items() if kind
        ),
        itemsize=widths.most_common(1)[0][0] if widths else 4,
        names=dict(tensors),
    )


def read_sizes(folder: Path) -> ModelSizes:
    """Read the sizes from the headers of a model folder's safetensors files; no tensor is read.

    Args:
        folder: With `*.safetensors` files, with or without an index.

    Raises:
        UsageError: A file is missing, cut short or not readable, or there is none.
    """
    files = weight_files(folder)
    if not files:
        msg = f"{folder} holds no *.safetensors file"
        raise UsageError(msg, hint="give a folder with safetensors weights, or a config.json")
    tensors: dict[str, TensorSize] = {}
    homes: dict[str, str] = {}
    for path in files:
        header = file_header(path)
        _check_length(path, header)
        homes |= dict.fromkeys(header.entries, path.name)
        for name, entry in header.entries.items():
            if entry.code.startswith(_FLOATS):
                if entry.dtype is None:
                    msg = f"{path}: {name} has the unknown dtype {entry.code}"
                    raise UsageError(msg)
                tensors[name] = TensorSize(entry.shape, entry.dtype.size)
    for name, file in read_index(folder).items():
        if homes.get(name) != file:
            msg = f"the index of {folder} says that {file} holds {name}, and it does not"
            raise UsageError(msg, hint="download or copy the folder again")
    return model_sizes(tensors, f"headers of {len(files)} file{'s' if len(files) > 1 else ''} in {folder}")


def _parents(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:length]) for length in range(1, len(parts))]


def _ordered(content: Counter[TensorSize]) -> tuple[tuple[TensorSize, int], ...]:
    return tuple(sorted(content.items(), key=lambda item: (item[0].shape, item[0].itemsize)))


def _check_length(path: Path, header: FileHeader) -> None:
    """Raise when a file ends before its last tensor: it was cut short."""
    end = max((entry.last for entry in header.entries.values()), default=header.start)
    if header.size != end:
        msg = f"{path} is no complete safetensors file: it has {header.size} bytes, its header says {end}"
        raise UsageError(msg, hint="download or copy it again")
