"""Which files hold a model's pretrained weights, and where each tensor's bytes are in them. No torch.

A safetensors header is 8 bytes of length and that much JSON: describing a model of any size takes milliseconds.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NoReturn

from fsdplaunch.checkpoint.dtypes import Dtype
from fsdplaunch.checkpoint.manifest import INDEX_NAME
from fsdplaunch.checkpoint.safetensors_format import check_data, read_header, read_weight_map
from fsdplaunch.checkpoint.untrusted_files import InvalidFileError, short
from fsdplaunch.errors import CheckpointError

SHARD_FILE = re.compile(r"shard-\d+-model-\d+-of-\d+\.safetensors")
"""One rank's, as torch's HuggingFaceStorageWriter(save_distributed=True) writes it."""
SHARDS_ARE = "holds the safetensors files of single ranks"
SHARDS_HINT = "write it with HuggingFaceStorageWriter(..., enable_consolidation=True)"
_INDEX = ".safetensors.index.json"
_PICKLED_INDEX = "pytorch_model.bin.index.json"
_NUMBERED = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.(safetensors|bin)")


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """One tensor of a file."""

    name: str  # what the file calls it
    file: int  # its file's place among all files
    code: str  # what safetensors calls its dtype, or torch for pickled files
    dtype: Dtype | None  # the dtype; None when its elements cannot be read one by one
    shape: tuple[int, ...]  # in elements
    start: int  # where its bytes begin in the file; 0 for pickled files


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """The weights of one model on disk."""

    where: Path  # what the user named: a folder or a file
    paths: tuple[Path, ...]
    sizes: tuple[int, ...]  # their sizes in bytes
    pickled: bool  # whether they are files of `torch.save`, which one rank has to read whole
    # What they hold, by the file's name; of pickled files only after somebody has read them.
    weights: Mapping[str, StoredWeight] = field(default_factory=dict)
    index: Mapping[str, str] | None = None  # file name by tensor name as an index says it, or None without one


def find_weight_files(where: Path) -> WeightFiles:
    """Find a model's weight files and read their headers.

    Safetensors files go before pickled ones, an index before single files, `model.safetensors` before others.

    Args:
        where: A model folder, or one file.

    Raises:
        CheckpointError: There are no weights, or not all of them; a file is damaged; it contradicts the index.
    """
    if where.is_file():
        pickled = where.suffix != ".safetensors"
        return _described(where, [where], None, pickled=pickled)
    if not where.is_dir():
        msg = f"no model folder {where}"
        raise CheckpointError(msg, hint="give a folder with *.safetensors files; the path must exist on this node")
    names = sorted(path.name for path in where.iterdir() if path.is_file())
    usual = f"model{_INDEX}"
    indexes = [name for name in names if name.endswith(_INDEX)]
    plain = [name for name in names if name.endswith(".safetensors") and not SHARD_FILE.fullmatch(name)]
    bins = [name for name in names if name.startswith("pytorch_model") and name.endswith(".bin")]
    if usual in indexes or len(indexes) == 1:
        return _indexed(where, where / (usual if usual in indexes else indexes[0]), pickled=False)
    if indexes:
        raise _ambiguous(where, indexes)
    if plain:
        return _described(where, [where / name for name in _model_files(where, plain)], None, pickled=False)
    if _PICKLED_INDEX in names:
        return _indexed(where, where / _PICKLED_INDEX, pickled=True)
    if bins:
        return _described(where, [where / name for name in _model_files(where, bins)], None, pickled=True)
    raise _nothing(where, names)


def _nothing(where: Path, names: list[str]) -> CheckpointError:
    if any(SHARD_FILE.fullmatch(name) for name in names):
        msg = f"{where} {SHARDS_ARE}"
        return CheckpointError(msg, hint=SHARDS_HINT)
    children = [path.name for path in where.iterdir()]
    if INDEX_NAME in names or any(name.startswith(("pytorch_model_fsdp", "checkpoint-")) for name in children):
        msg = f"{where} is a checkpoint of a training run, not a model folder"
        hint = "resume from it with fsdplaunch.load_checkpoint, or turn it into a model folder with merge-weights"
        return CheckpointError(msg, hint=hint)
    msg = f"{where} holds no weights: no *.safetensors and no pytorch_model*.bin"
    return CheckpointError(msg, hint="finish the download, or give the folder that has them")


def _ambiguous(where: Path, names: list[str]) -> CheckpointError:
    msg = f"{where} holds {' and '.join(names[:3])}, and nothing says which is the model"
    return CheckpointError(msg, hint="give the path of a file instead of the folder")


def _model_files(where: Path, names: list[str]) -> list[str]:
    """Return the file of the usual name, the only one, or all of a numbered set that is complete."""
    usual = [name for name in names if name in ("model.safetensors", "pytorch_model.bin")]
    if usual or len(names) == 1:
        chosen = usual or names
        numbered = _NUMBERED.fullmatch(chosen[0])
        if numbered is None:
            return chosen
    sets = {(match[1], match[3]) for match in map(_NUMBERED.fullmatch, names) if match}
    if len(sets) != 1 or not all(map(_NUMBERED.fullmatch, names)):
        raise _ambiguous(where, names)
    stem, total = sets.pop()
    wanted = [f"{stem}-{n:05d}-of-{total}{Path(names[0]).suffix}" for n in range(1, int(total) + 1)]
    _check_there(where, wanted, f"{names[0]} is one of {int(total)}")
    return wanted


def _check_there(where: Path, names: Iterable[str], claim: str) -> None:
    missing = [name for name in names if not (where / name).is_file()]
    if missing:
        more = f", nor are {len(missing) - 1} more" if len(missing) > 1 else ""
        msg = f"{claim}, but {where / missing[0]} is not there{more}"
        raise CheckpointError(msg, hint="finish the download, or give another folder")


def _indexed(where: Path, index: Path, *, pickled: bool) -> WeightFiles:
    try:
        listed = read_weight_map(index)
    except InvalidFileError as problem:
        _refuse(index, str(problem))
    files = sorted(set(listed.values()))
    odd = [name for name in files if "/" in name or "\\" in name or name in ("", "..")]
    if odd:
        _refuse(index, f"it names the file {short(odd[0])}")
    _check_there(where, files, f"{index.name} names {len(files)} files")
    return _described(where, [where / name for name in files], listed, pickled=pickled)


def _described(where: Path, paths: list[Path], index: dict[str, str] | None, *, pickled: bool) -> WeightFiles:
    weights: dict[str, StoredWeight] = {}
    for number, path in enumerate(paths):
        for weight in [] if pickled else _read_file(path, number):
            if weight.name in weights:
                msg = f"{path} and {paths[weights[weight.name].file]} both hold {short(weight.name)}"
                raise CheckpointError(msg, hint="give the path of one of them instead of the folder")
            weights[weight.name] = weight
    sizes = tuple(path.stat().st_size for path in paths)
    files = WeightFiles(where, tuple(paths), sizes, pickled, weights, index)
    if not pickled:
        check_index(files)
    return files


def check_index(files: WeightFiles) -> None:
    """Check that every tensor the index names is in the file it names.

    Raises:
        CheckpointError: One is not.
    """
    for name, file in (files.index or {}).items():
        weight = files.weights.get(name)
        if weight is None or files.paths[weight.file].name != file:
            there = "is in none" if weight is None else f"is in {files.paths[weight.file].name}"
            msg = f"the index of {files.where} says {short(name)} is in {short(file)}, but it {there}"
            raise CheckpointError(msg, hint="the files are from different versions; download them again")


def _read_file(path: Path, number: int) -> list[StoredWeight]:
    try:
        header = read_header(path)
        check_data(header)
    except OSError as error:
        msg = f"cannot read {path}: {error.strerror}"
        raise CheckpointError(msg) from None
    except InvalidFileError as problem:
        _refuse(path, str(problem))
    weights = {}
    for name, (code, known, shape, first, _) in header.entries.items():
        dtype = known if known and known.lanes == 1 else None
        weights[name] = StoredWeight(name, number, code, dtype, shape, first)
    # Names that safetensors' save_model left out, each with the one the tensor is kept under.
    aliases = ((name, kept) for name, kept in header.metadata.items() if type(kept) is str and name not in weights)
    return [*weights.values(), *(replace(weights[kept], name=name) for name, kept in aliases if kept in weights)]


def _refuse(path: Path, reason: str) -> NoReturn:
    msg = f"{path} cannot be read: {reason}"
    raise CheckpointError(msg, hint="download or copy it again") from None
