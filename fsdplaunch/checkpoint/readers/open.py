"""Find the checkpoint in a folder, whatever its format, and open it: what it holds, and where the bytes are."""

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fsdplaunch.checkpoint.chunks import ItemLocation
from fsdplaunch.checkpoint.manifest import INDEX_NAME, find_other, manifest_path, read_manifest
from fsdplaunch.checkpoint.model_weights import SHARD_FILE, SHARDS_ARE, SHARDS_HINT
from fsdplaunch.checkpoint.readers.data_files import (
    DataFiles,
    Identity,
    check_save,
    identity_of,
    open_data_files,
    read_items,
)
from fsdplaunch.checkpoint.readers.dcp_index import CheckpointIndex, StoredTensor, gc_pause, read_index
from fsdplaunch.checkpoint.readers.rank_files import RANK_FILE, read_rank_files
from fsdplaunch.checkpoint.readers.torch_zip import TorchZipItem
from fsdplaunch.checkpoint.readers.xla_files import XLA_FILE, read_xla_files
from fsdplaunch.checkpoint.untrusted_files import COPY_AGAIN, odd_kind, real_path, short
from fsdplaunch.display_text import listed
from fsdplaunch.errors import CheckpointError, LaunchError, UsageError

MAX_DEPTH = 3
MAX_FOLDERS = 5000
MAX_LISTED = 10
DATA_FILE = re.compile(r"__\d+_\d+\.distcp")


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
    (
        re.compile(r"(model|pytorch_model)(-\d{5}-of-\d{5})?\.(safetensors|bin)(\.index\.json)?"),
        "is merged already",
        "load it as it is",
    ),
    (
        re.compile(r".*rank[-_]?\d+.*\.(pt|pth|bin)"),
        "holds one pickled file per rank",
        "merge it with the tool that wrote it",
    ),
)


def several_models(given: Path, models: list[Path], unfinished: list[Path]) -> LaunchError:
    """Return the error for a folder with several models, or one and the rest of a save that did not finish."""
    if len(models) == 1:
        msg = f"{given} holds {models[0]} and a checkpoint whose save did not finish: {listed_paths(unfinished)}"
        return CheckpointError(msg, hint=f"give {models[0]} itself")
    msg = f"{given} holds {len(models)} models: {listed_paths(models)}"
    return AmbiguousError(msg, models)


def no_model(given: Path, folders: list[tuple[Path, list[str]]], sharded: list[Path]) -> LaunchError:
    """Return the error for a folder without a model, with what it holds instead.

    Args:
        given: What the user pointed at.
        folders: It, and those below it that were looked into, with the names of their files.
        sharded: Those of them that are checkpoints, of optimizers.
    """
    if sharded:
        msg = f"{given} holds only an optimizer: {listed_paths(sharded)}"
        return CheckpointError(msg, hint="the model is saved beside it as pytorch_model_fsdp_0")
    for path, names in folders:
        for pattern, title, hint in _OTHER_FORMATS:
            if any(map(pattern.fullmatch, names)):
                msg = f"{path} {title}"
                return CheckpointError(msg, hint=hint)
    here = sorted({*folders[0][1], *(path.relative_to(given).parts[0] + "/" for path, _ in folders[1:])})
    msg = f"{given} holds no sharded checkpoint: no {INDEX_NAME} in it or up to {MAX_DEPTH} folders below"
    return CheckpointError(msg, hint=f"it holds {listed_names(here)}")


def listed_paths(paths: list[Path]) -> str:
    """Return the first of some folders in words, checkpoint-900 before checkpoint-1000."""
    return listed(list(map(str, sorted(paths, key=_by_number))), MAX_LISTED)


def listed_names(names: list[str]) -> str:
    """Return the first of some names in words."""
    return listed(list(map(short, names)), MAX_LISTED) or "nothing"


_ODD = "put the real file there, or use an older checkpoint"
_OPTIMIZER = re.compile(r"optim(izer)?(_\d+)?")
_FILES = (RANK_FILE, XLA_FILE)


def find_model(given: Path) -> Path:
    """Return the model's checkpoint folder at or below `given`.

    Raises:
        UsageError: When `given` is not a folder.
        AmbiguousError: When it holds several models.
        CheckpointError: When it holds no model, or one in a format that is not merged from here.
    """
    _check_folder(given)
    if is_sharded(_entries(given, follow=False)[0]):
        return _checked(given)
    folders = list(_walk(given))
    sharded = [path for path, names in folders if is_sharded(names)]
    models = [path for path in sharded if not _OPTIMIZER.fullmatch(path.name)]
    unfinished = [
        path for path, names in folders if not is_sharded(names) and any(map(DATA_FILE.fullmatch, names))
    ]
    if len(models) == 1 and not unfinished:
        return _checked(models[0])
    if models:
        raise several_models(given, models, unfinished)
    raise no_model(given, folders, sharded)


def find_optimizer(given: Path) -> Path:
    """Return the optimizer's checkpoint folder at or below `given`.

    Raises:
        UsageError: When `given` is not a folder.
        AmbiguousError: When it holds several optimizers.
        CheckpointError: When it holds no optimizer's checkpoint.
    """
    _check_folder(given)
    if INDEX_NAME in _entries(given, follow=False)[0]:
        return _checked(given)
    folders = list(_walk(given, lambda names: INDEX_NAME in names))
    found = [path for path, names in folders if INDEX_NAME in names and _OPTIMIZER.fullmatch(path.name)]
    if not found:
        msg = f"{given} holds no optimizer's checkpoint: no folder optimizer_0 with a {INDEX_NAME}"
        raise CheckpointError(msg, hint="an optimizer.bin beside the model is merged already")
    if len(found) > 1:
        msg = f"{given} holds {len(found)} optimizers: {listed_paths(found)}"
        raise AmbiguousError(msg, found)
    return _checked(found[0])


def is_sharded(files: Iterable[str]) -> bool:
    """Say whether a folder with these files is a checkpoint: an index, or files of ranks."""
    return any(name == INDEX_NAME or any(one.fullmatch(name) for one in _FILES) for name in files)


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
    raise UsageError(msg, hint=f"{parent} holds {listed_names(sorted(path.name for path in parent.iterdir()))}")


def _walk(top: Path, ends: Callable[[list[str]], bool] = is_sharded) -> Iterator[tuple[Path, list[str]]]:
    """Yield each folder from `top` down with the names of its files, nearest first, not below one that `ends`."""
    level, seen = [top], set[Path]()
    for depth in range(MAX_DEPTH + 1):
        below: list[Path] = []
        for folder in level:
            real = real_path(folder)  # a link to a checkpoint beside it is the same checkpoint
            if real in seen:
                continue
            seen.add(real)
            if len(seen) > MAX_FOLDERS:
                msg = f"{top} holds more than {MAX_FOLDERS} folders"
                raise CheckpointError(msg, hint="give the checkpoint's own folder")
            files, folders = _entries(folder, follow=depth < MAX_DEPTH)
            yield folder, files
            if not ends(files):
                below.extend(folders)
        level = below


def _entries(folder: Path, *, follow: bool) -> tuple[list[str], list[Path]]:
    files, folders = [], []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if _is_folder(folder / entry.name):
                    folders.append(folder / entry.name)
                elif _is_file(folder / entry.name):
                    files.append(entry.name)
    except PermissionError:
        msg = f"{folder} cannot be read: permission denied"
        raise CheckpointError(msg) from None
    visible = sorted(path for path in folders if not path.name.startswith("."))
    visible.sort(key=Path.is_symlink)
    return sorted(files), visible if follow else []


def _is_folder(path: Path) -> bool:
    if not path.is_dir():
        return False
    if is_sharded([path.name]):
        msg = f"{path} is not a regular file but a folder"
        raise CheckpointError(msg, hint=_ODD)
    return True


def _is_file(path: Path) -> bool:
    """Say whether it is a regular file; refuse anything else with a checkpoint's file name."""
    kind = odd_kind(path)
    if kind is not None and (is_sharded([path.name]) or DATA_FILE.fullmatch(path.name)):
        msg = f"{path} is not a regular file but {kind}"
        raise CheckpointError(msg, hint=_ODD)
    return kind is None


def _checked(folder: Path) -> Path:
    """Return a folder that agrees with the manifest beside it, if our own save wrote one."""
    path = manifest_path(folder)
    if not path.exists():
        return folder
    parent, manifest = path.parent, read_manifest(path.parent) or {}
    files = manifest.get("files", {})
    if not manifest or not isinstance(files, dict):
        msg = f"{path} is not readable as a manifest"
        raise CheckpointError(msg, hint="the save did not finish, or the file is damaged")
    if manifest.get("complete") is not True:
        msg = f"{parent} is not complete: its save did not finish"
        raise CheckpointError(msg, hint="use an older checkpoint")
    for name, size in files.items():
        if name.rpartition("/")[0] == ("" if parent == folder else folder.name):
            _check_listed(folder / name.rpartition("/")[2], size)
    other = find_other(parent, manifest, "" if parent == folder else f"{folder.name}/")
    if other is not None:
        msg = f"{parent}: {other}"
        raise CheckpointError(msg, hint=COPY_AGAIN)
    return folder


def _check_listed(path: Path, size: object) -> None:
    """Check one file of the model against its size in the manifest."""
    try:
        found = path.stat().st_size
    except (OSError, ValueError):  # or its name cannot be a file's: NUL, halves of characters
        msg = f"{path} is missing, the checkpoint was written with it"
        raise CheckpointError(msg, hint=COPY_AGAIN) from None
    if found != size:
        msg = f"{path} has {found} bytes, it was written with {size}"
        raise CheckpointError(msg, hint=COPY_AGAIN)


@dataclass(frozen=True, slots=True)
class OpenCheckpoint:
    """An open checkpoint.

    Attributes:
        folder: Where it stands.
        index: What it says it holds.
        sources: Its data files.
        known: Where each chunk's bytes are when the headers had it already; None: its items have to be read.
        descriptor: The open folder.
        files: Which file each of its own was when it was read.
    """

    folder: Path
    index: CheckpointIndex
    sources: DataFiles
    known: dict[ItemLocation, TorchZipItem] | None
    descriptor: int
    files: Mapping[str, Identity]

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
        with open_data_files(folder, index) as sources:
            check_save(sources, index.places)
            yield OpenCheckpoint(folder, index, sources, known, descriptor, files | sources.identity)
    finally:
        os.close(descriptor)
