"""Find the checkpoint in a folder, whatever its format, and open it: what it holds, and where the bytes are."""

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from fsdplaunch.checkpoint.chunks import ItemLocation
from fsdplaunch.checkpoint.manifest import INDEX_NAME, find_gap, manifest_path
from fsdplaunch.checkpoint.model_weights import SHARD_FILE, SHARDS_ARE, SHARDS_HINT
from fsdplaunch.checkpoint.output_folder import WEIGHTS
from fsdplaunch.checkpoint.readers.data_files import DataFiles, Identity, check_save, identity_of, read_items
from fsdplaunch.checkpoint.readers.dcp_index import CheckpointIndex, StoredTensor, gc_pause, read_index
from fsdplaunch.checkpoint.readers.rank_files import RANK_FILE, read_rank_files
from fsdplaunch.checkpoint.readers.torch_zip import TorchZipItem
from fsdplaunch.checkpoint.readers.xla_files import XLA_FILE, read_xla_files
from fsdplaunch.checkpoint.untrusted_files import COPY_AGAIN, odd_kind, real_path, short
from fsdplaunch.display_text import listed
from fsdplaunch.errors import CheckpointError, UsageError

_MAX_DEPTH = 3
MAX_FOLDERS = 5000
_MAX_LISTED = 10
DATA_FILE = re.compile(r"__\d+_\d+\.distcp")
_OPTIMIZER = re.compile(r"optim(izer)?(_\d+)?")
# Checkpoints that are not merged from here: names of their files, what they are, as the rest of a sentence that
# starts with the folder, and what to do. The first that matches a file of the folder names it.
_OTHER_FORMATS = (
    (
        re.compile(r"__\d+\.metadata"),
        "has an index per rank (saved with use_collectives=False)",
        "save it with the default use_collectives=True",
    ),
    (DATA_FILE, f"has data files but no {INDEX_NAME}: the save did not finish", "use an older checkpoint"),
    (SHARD_FILE, SHARDS_ARE, SHARDS_HINT),
    (WEIGHTS, "is merged already", "load it as it is"),
    (
        re.compile(r".*rank[-_]?\d+.*\.(pt|pth|bin)"),
        "holds one pickled file per rank",
        "merge it with the tool that wrote it",
    ),
)


class AmbiguousError(UsageError):
    """Several checkpoints stand where one was expected.

    Attributes:
        candidates: Their folders.
    """

    def __init__(self, message: str, candidates: Iterable[Path]) -> None:
        super().__init__(message, hint="give one of them")
        self.candidates = tuple(sorted(candidates, key=_by_number))


def _by_number(path: Path) -> list[tuple[int, str]]:
    """Sort checkpoint-900 before checkpoint-1000."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", str(path))]


def _listed_paths(paths: list[Path]) -> str:
    return listed(list(map(str, sorted(paths, key=_by_number))), _MAX_LISTED)


def _listed_names(names: Iterable[str]) -> str:
    return listed(list(map(short, sorted(names))), _MAX_LISTED) or "nothing"


def find_model(given: Path) -> Path:
    """Return the model's checkpoint folder at or below `given`.

    Raises:
        UsageError: When `given` is not a folder.
        AmbiguousError: When it holds several models.
        CheckpointError: When it holds no model, or one in a format that is not merged from here.
    """
    _check_folder(given)
    folders = list(_walk(given))
    sharded = [path for path, names in folders if _is_sharded(names)]
    if given in sharded:
        return _checked(given)
    models = [path for path in sharded if not _OPTIMIZER.fullmatch(path.name)]
    unfinished = [
        path for path, names in folders if not _is_sharded(names) and any(map(DATA_FILE.fullmatch, names))
    ]
    if len(models) == 1 and not unfinished:
        return _checked(models[0])
    if len(models) == 1:
        msg = f"{given} holds {models[0]} and a checkpoint whose save did not finish: {_listed_paths(unfinished)}"
        raise CheckpointError(msg, hint=f"give {models[0]} itself")
    if models:
        msg = f"{given} holds {len(models)} models: {_listed_paths(models)}"
        raise AmbiguousError(msg, models)
    if sharded:
        msg = f"{given} holds only an optimizer: {_listed_paths(sharded)}"
        raise CheckpointError(msg, hint="the model is saved beside it as pytorch_model_fsdp_0")
    for path, names in folders:
        for pattern, title, hint in _OTHER_FORMATS:
            if any(map(pattern.fullmatch, names)):
                msg = f"{path} {title}"
                raise CheckpointError(msg, hint=hint)
    here = {*folders[0][1], *(path.relative_to(given).parts[0] + "/" for path, _ in folders[1:])}
    msg = f"{given} holds no sharded checkpoint: no {INDEX_NAME} in it or up to {_MAX_DEPTH} folders below"
    raise CheckpointError(msg, hint=f"it holds {_listed_names(here)}")


def _is_sharded(files: Iterable[str]) -> bool:
    return any(name == INDEX_NAME or RANK_FILE.fullmatch(name) or XLA_FILE.fullmatch(name) for name in files)


def _check_folder(given: Path) -> None:
    try:
        if given.is_dir():
            os.scandir(given).close()
            return
        exists = os.path.lexists(given)
    except PermissionError:
        msg = f"{given} cannot be read: permission denied"
        raise UsageError(msg) from None
    if exists:
        msg = f"{given} is not a folder"
        raise UsageError(msg, hint=f"give the checkpoint's folder, perhaps {given.parent}")
    parent = next((path for path in given.parents if path.is_dir()), Path())
    msg = f"{given} does not exist"
    raise UsageError(msg, hint=f"{parent} holds {_listed_names(path.name for path in parent.iterdir())}")


def _walk(top: Path) -> Iterator[tuple[Path, list[str]]]:
    """Yield each folder from `top` down with the names of its files, nearest first, not below a checkpoint."""
    level, seen = [top], set[Path]()
    for depth in range(_MAX_DEPTH + 1):
        below: list[Path] = []
        for folder in level:
            real = real_path(folder)  # a link to a checkpoint beside it is the same checkpoint
            if real in seen:
                continue
            seen.add(real)
            if len(seen) > MAX_FOLDERS:
                msg = f"{top} holds more than {MAX_FOLDERS} folders"
                raise CheckpointError(msg, hint="give the checkpoint's own folder")
            files, folders = _entries(folder)
            yield folder, files
            if depth < _MAX_DEPTH and not _is_sharded(files):
                below.extend(sorted(folders, key=lambda path: (path.is_symlink(), path)))
        level = below


def _entries(folder: Path) -> tuple[list[str], list[Path]]:
    """Return a folder's files and visible folders; nothing else may have a checkpoint file's name."""
    files, folders = [], []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                path = folder / entry.name
                kind = odd_kind(path)
                if kind is not None and (_is_sharded([path.name]) or DATA_FILE.fullmatch(path.name)):
                    msg = f"{path} is not a regular file but {kind}"
                    raise CheckpointError(msg, hint="put the real file there, or use an older checkpoint")
                if kind is None:
                    files.append(path.name)
                elif kind == "a folder" and not path.name.startswith("."):
                    folders.append(path)
    except PermissionError:
        msg = f"{folder} cannot be read: permission denied"
        raise CheckpointError(msg) from None
    return sorted(files), folders


def _checked(folder: Path) -> Path:
    """Return a folder that agrees with the manifest beside it, if our own save wrote one."""
    path = manifest_path(folder)
    if path.exists() and (gap := find_gap(path.parent, "" if path.parent == folder else f"{folder.name}/")):
        msg = f"{path.parent}: {gap}"
        raise CheckpointError(msg, hint=COPY_AGAIN)
    return folder


@dataclass(frozen=True, slots=True)
class OpenCheckpoint:
    """An open checkpoint."""

    folder: Path  # where it stands
    index: CheckpointIndex  # what it says it holds
    sources: DataFiles
    # Where each chunk's bytes are when the headers had it already; None: its items have to be read.
    known: dict[ItemLocation, TorchZipItem] | None
    descriptor: int  # the open folder
    files: Mapping[str, Identity]  # which file each of its own was when it was read

    def items(self, tensors: Iterable[StoredTensor]) -> dict[ItemLocation, TorchZipItem]:
        """Return where each chunk's bytes of `tensors` are, by its place."""
        if self.known is not None:
            return self.known
        with gc_pause():
            return read_items(self.sources, tensors)


@contextmanager
def open_checkpoint(folder: Path) -> Iterator[OpenCheckpoint]:
    """Read what a checkpoint folder holds and open its files.

    Raises:
        CheckpointError: When it is damaged, incomplete or hostile.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        files: dict[str, Identity] = {}
        with gc_pause():
            if (folder / INDEX_NAME).is_file():
                files[INDEX_NAME] = identity_of((folder / INDEX_NAME).stat())
                index, known = read_index(folder), None
            elif any(RANK_FILE.fullmatch(path.name) for path in folder.iterdir()):
                index, known = read_rank_files(folder)
            else:
                index, known = read_xla_files(folder)
        names = os.listdir(descriptor)  # noqa: PTH208  (it may have no path any more)
        for name in names:  # those of ranks that had nothing to write are in no index
            if DATA_FILE.fullmatch(name) and name not in index.files:
                files[name] = identity_of(os.stat(name, dir_fd=descriptor))
        with DataFiles(folder, index.files) as sources:
            check_save(sources, index.places.values())
            yield OpenCheckpoint(folder, index, sources, known, descriptor, files | sources.identity)
    finally:
        with suppress(OSError):
            os.close(descriptor)
