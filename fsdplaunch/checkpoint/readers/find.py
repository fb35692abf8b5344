"""What a folder is, without torch: which kind of checkpoint, and where the model inside it stands."""

import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from fsdplaunch.checkpoint.index_file import INDEX_NAME
from fsdplaunch.checkpoint.invalid_file import COPY_AGAIN
from fsdplaunch.checkpoint.manifest import manifest_path, read_json
from fsdplaunch.checkpoint.readers.hf_shards import SHARD_FILE
from fsdplaunch.checkpoint.readers.not_found import (
    DATA_FILE,
    MAX_DEPTH,
    AmbiguousError,
    listed_names,
    listed_paths,
    no_model,
    several_models,
)
from fsdplaunch.checkpoint.readers.rank_files import RANK_FILE
from fsdplaunch.checkpoint.readers.xla_files import XLA_FILE
from fsdplaunch.checkpoint.regular_file import odd_kind, real_path
from fsdplaunch.errors import CheckpointError, UsageError

MAX_FOLDERS = 5000

_ODD = "put the real file there, or use an older checkpoint"
_OPTIMIZER = re.compile(r"optim(izer)?(_\d+)?")
_FILES = (SHARD_FILE, RANK_FILE, XLA_FILE)


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundModel:
    """A sharded checkpoint.

    Attributes:
        given: What the user pointed at.
        folder: The folder with the index, or with the sharded safetensors.
    """

    given: Path
    folder: Path


def find_model(given: Path) -> FoundModel:
    """Return the model's checkpoint folder at or below `given`.

    Raises:
        UsageError: When `given` is no folder.
        AmbiguousError: When it holds several models.
        CheckpointError: When it holds no model, or one in a format that is not merged from here.
    """
    _check_folder(given)
    if is_sharded(_entries(given, follow=False)[0]):
        _check_manifest(given)
        return FoundModel(given=given, folder=given)
    folders = list(_walk(given))
    sharded = [path for path, names in folders if is_sharded(names)]
    models = [path for path in sharded if not _OPTIMIZER.fullmatch(path.name)]
    unfinished = [
        path for path, names in folders if not is_sharded(names) and any(map(DATA_FILE.fullmatch, names))
    ]
    if len(models) == 1 and not unfinished:
        _check_manifest(models[0])
        return FoundModel(given=given, folder=models[0])
    if models:
        raise several_models(given, models, unfinished)
    raise no_model(given, folders, sharded)


def find_optimizer(given: Path) -> FoundModel:
    """Return the optimizer's checkpoint folder at or below `given`.

    Raises:
        UsageError: When `given` is no folder.
        AmbiguousError: When it holds several optimizers.
        CheckpointError: When it holds no optimizer's checkpoint.
    """
    _check_folder(given)
    if INDEX_NAME in _entries(given, follow=False)[0]:
        _check_manifest(given)
        return FoundModel(given=given, folder=given)
    folders = list(_walk(given, lambda names: INDEX_NAME in names))
    found = [path for path, names in folders if INDEX_NAME in names and _OPTIMIZER.fullmatch(path.name)]
    if not found:
        msg = f"{given} holds no optimizer's checkpoint: no folder optimizer_0 with a {INDEX_NAME}"
        raise CheckpointError(msg, hint="an optimizer.bin beside the model is merged already")
    if len(found) > 1:
        msg = f"{given} holds {len(found)} optimizers: {listed_paths(found)}"
        raise AmbiguousError(msg, found)
    _check_manifest(found[0])
    return FoundModel(given=given, folder=found[0])


def is_sharded(files: Iterable[str]) -> bool:
    """Say whether a folder with these files is a checkpoint: an index, sharded safetensors, or files of ranks."""
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
    """Say whether it is a regular file; refuse what has a checkpoint's file name and is none."""
    kind = odd_kind(path)
    if kind is not None and (is_sharded([path.name]) or DATA_FILE.fullmatch(path.name)):
        msg = f"{path} is not a regular file but {kind}"
        raise CheckpointError(msg, hint=_ODD)
    return kind is None


def _check_manifest(folder: Path) -> None:
    """Check the model's folder against the manifest beside it, if our own save wrote one."""
    path = manifest_path(folder)
    if not path.exists():
        return
    parent, manifest = path.parent, read_json(path)
    files = manifest.get("files", {}) if isinstance(manifest, dict) else None
    if not isinstance(manifest, dict) or not isinstance(files, dict):
        msg = f"{path} is not readable as a manifest"
        raise CheckpointError(msg, hint="the save did not finish, or the file is damaged")
    if manifest.get("complete") is not True:
        msg = f"{parent} is not complete: its save did not finish"
        raise CheckpointError(msg, hint="use an older checkpoint")
    for name, size in files.items():
        if name.rpartition("/")[0] == ("" if parent == folder else folder.name):
            _check_listed(folder / name.rpartition("/")[2], size)


def _check_listed(path: Path, size: object) -> None:
    """Check one file of the model against its size in the manifest."""
    try:
        found = path.stat().st_size
    except (OSError, ValueError):  # or its name can be none of a file: NUL, halves of characters
        msg = f"{path} is missing, the checkpoint was written with it"
        raise CheckpointError(msg, hint=COPY_AGAIN) from None
    if found != size:
        msg = f"{path} has {found} bytes, it was written with {size}"
        raise CheckpointError(msg, hint=COPY_AGAIN)
