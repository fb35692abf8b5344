"""`fsdplaunch.json`: what a checkpoint is made of. Written last, so its presence says that the rest is there.

It stands among the files of ranks, or beside the folder of a model. It binds every file to the save: by its size,
and by a checksum of all of an index, of what stands behind the data in each item of a data file, and of the end of
any other file. Torch's files end with the checksums of all that they hold, so that data are not read for it.
"""

import errno
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from zlib import crc32

from fsdplaunch.checkpoint.untrusted_files import (
    MissingFileError,
    UnreadableError,
    is_missing,
    open_regular,
    read_regular,
)
from fsdplaunch.errors import CheckpointError
from fsdplaunch.files import durable_file, parse_json

INDEX_NAME = ".metadata"
MAX_INDEX_BYTES = 256 * 2**20
"""Largest index that is read: room for a million chunks of tensors."""
MANIFEST_NAME = "fsdplaunch.json"
MAX_JSON = 64 * 2**20
_PAUSES = (0.05, 0.2, 0.75)
"""Seconds before a manifest that the system could not read is read again."""


def manifest_path(folder: Path) -> Path:
    """Return where the manifest of the model in `folder` is, if there is one."""
    inside = folder / MANIFEST_NAME
    return inside if inside.is_file() else folder.parent / MANIFEST_NAME


def model_entry(folder: Path, number: int) -> dict[str, Any]:
    """Return what the manifest says about the model with this number in `folder`; nothing without one."""
    models = (read_manifest(manifest_path(folder).parent) or {}).get("models")
    entry = models[number] if isinstance(models, list) and number < len(models) else None
    return entry if isinstance(entry, dict) else {}


_ITEM_END = 2048
_FILE_END = 2**20


def crc_of_items(fd: int, items: Iterable[tuple[int, int]]) -> int:
    """Return the checksum of how the items of an open data file end, by offset and length of each, in bytes."""
    crc = 0
    for offset, length in sorted(items):
        count = min(length, _ITEM_END)
        crc = crc32(os.pread(fd, count, offset + length - count), crc)
    return crc


def known_crcs(folder: Path) -> dict[str, int]:
    """Return the checksums that the manifest has of the files in a model's or an optimizer's folder, by name."""
    known = (read_manifest(folder.parent) or {}).get("crc32")
    listed = known.items() if isinstance(known, dict) else ()
    return {name.rpartition("/")[2]: crc for name, crc in listed if name.rpartition("/")[0] == folder.name}


def write_manifest(
    folder: Path, content: Mapping[str, Any], sequence: int, crcs: Mapping[str, int] | None = None
) -> None:
    """Write the manifest of a folder whose other files are all there, and force it to disk.

    `content` says who wrote it, and how; `sequence` counts the checkpoints that were completed in its place and
    beside it, this one included; `crcs` are the checksums of data files, as `crc_of_items` returns them, and of
    what each rank has of its own.
    """
    files = {str(path.relative_to(folder)): path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    known = {name: crc_of(folder, name) for name in sorted(files) if _is_checked(name)} | dict(crcs or {})
    data = {**content, "sequence": sequence, "files": dict(sorted(files.items())), "crc32": known}
    data["complete"] = True
    data["checksum"] = _own_checksum(json.loads(json.dumps(data)))
    with durable_file(folder / MANIFEST_NAME) as file:
        file.write(json.dumps(data, indent=1).encode())


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """Return the manifest of a folder; None if it has none, {} if what is there is not a manifest.

    Raises:
        CheckpointError: It is there, and the system could not read it, a few times.
    """
    path = folder / MANIFEST_NAME
    try:
        data = _read_patiently(path, lambda: parse_json(read_regular(path, MAX_JSON)))
    except MissingFileError:
        return None
    except ValueError:
        return {}
    is_sound = isinstance(data, dict) and data.get("checksum") in (None, _own_checksum(data))
    return data if is_sound else {}


def _read_patiently(path: Path, read: Callable[[], Any]) -> Any:
    """Return what `read` makes of a file; where the system could not read it, try again a few times.

    Raises:
        CheckpointError: It could not all the time: the file is neither missing nor damaged.
    """
    for pause in _PAUSES:
        with suppress(UnreadableError):
            return read()
        time.sleep(pause)
    try:
        return read()
    except UnreadableError as problem:
        msg = f"{path} cannot be read: {str(problem).partition(': ')[2].lower()}"
        hint = "check the disk or the file server, and try again; or name an older checkpoint"
        raise CheckpointError(msg, hint=hint) from None


def _own_checksum(data: Mapping[str, Any]) -> int:
    """Return the checksum of what a manifest says; those of older versions have none in them."""
    return crc32(json.dumps({**data, "checksum": None}, sort_keys=True).encode(), 0)


def save_id(manifest: Mapping[str, Any] | None) -> Any:
    """Return what tells a save from another one in its place, by its manifest; None without one."""
    return None if manifest is None else manifest.get("id", _own_checksum(manifest))


def own_files(manifest: Mapping[str, Any] | None) -> list[str]:
    """Return the files that a manifest names."""
    files = (manifest or {}).get("files", {})
    return list(files) if isinstance(files, dict) else []


def sequence_of(manifest: Mapping[str, Any] | None) -> int:
    """Return the number a manifest gives its checkpoint among those beside it; 0 without one."""
    number = (manifest or {}).get("sequence", 0)
    return number if isinstance(number, int) else 0


def is_complete(folder: Path) -> bool:
    """Say whether nothing of a checkpoint is missing."""
    return _find_gap(folder, read_manifest(folder)) is None


def find_gap(folder: Path, only: str = "") -> str | None:
    """Return what a checkpoint lacks, or which file in it is damaged or of another save, or None.

    Looked at are the files whose names begin with `only`. The manifest must call it complete, every file have its
    size and its checksum; those of data files are for who reads them. A folder without manifest was written by
    another tool: it counts as complete if it has a model in it and each sharded folder its index, which is written
    last, because that tool leaves no other way to tell.
    """
    manifest = read_manifest(folder)
    gap = _find_gap(folder, manifest, only) or find_other(folder, manifest or {}, only)
    if gap is not None and read_manifest(folder) != manifest:  # another save has come meanwhile
        return find_gap(folder, only)
    return gap


def _find_gap(folder: Path, manifest: Mapping[str, Any] | None, only: str = "") -> str | None:
    if manifest is None:
        sharded = [*folder.glob("pytorch_model_fsdp_*/"), *folder.glob("optimizer_*/")]
        unfinished = sorted(path.name for path in sharded if not (path / INDEX_NAME).exists())
        if unfinished:
            return f"{unfinished[0]} has no index: its save did not finish"
        return None if looks_like_checkpoint(folder) else "there is no model in it"
    files = manifest.get("files")
    if manifest.get("complete") is not True or not isinstance(files, dict):
        return "its save did not finish" if manifest else "its manifest cannot be read"
    for name, size in files.items():
        if not name.startswith(only):
            continue
        try:
            found = _read_patiently(folder / name, partial(_size_of, folder / name))
        except ValueError:  # or its name cannot be a file's: NUL, halves of characters
            return f"{name} is missing"
        if found != size:
            return f"{name} has {found} bytes instead of {size}"
    return None


def _size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as problem:
        is_no_name = problem.errno == errno.ENAMETOOLONG
        kind = MissingFileError if is_missing(problem) or is_no_name else UnreadableError
        msg = f"it cannot be accessed: {problem.strerror}"
        raise kind(msg) from None


def _is_index(name: str) -> bool:
    folder, _, file = name.partition("/")
    return file == INDEX_NAME and folder not in ("", "..")


def _is_checked(name: str) -> bool:
    """Say whether a file is looked at before anything is read: not data, and not each rank's generators."""
    return _is_index(name) or ("/" not in name and not name.startswith("random_states_"))


def crc_of(folder: Path, name: str) -> int:
    """Return the checksum of all of an index, or of the end of another file."""
    path = folder / name
    if _is_index(name):
        return crc32(read_regular(path, MAX_INDEX_BYTES), 0)
    fd = open_regular(path)
    try:
        return crc32(os.pread(fd, _FILE_END, max(0, os.fstat(fd).st_size - _FILE_END)), 0)
    except OSError as problem:
        msg = f"it cannot be read: {problem.strerror}"
        raise UnreadableError(msg) from None
    finally:
        os.close(fd)


def find_other(folder: Path, manifest: Mapping[str, Any], only: str = "") -> str | None:
    """Return which file of a checkpoint is not the one that was saved, data files left out; None when all are.

    Looked at are the files whose names begin with `only`; a rank's generators only by their whole name.
    """
    known = manifest.get("crc32")
    listed = known.items() if isinstance(known, dict) else ()
    for name, crc in listed:
        if not name.startswith(only) or not (_is_checked(name) or name == only) or name not in manifest["files"]:
            continue
        try:
            if _read_patiently(folder / name, partial(crc_of, folder, name)) != crc:
                return f"{name} does not match its checksum: it is damaged, or from another save"
        except ValueError as problem:  # also a name that cannot be a file's
            return f"{name}: {problem}"
    return None


def looks_like_checkpoint(folder: Path) -> bool:
    """Say whether a folder itself, not one below it, holds a model in one of the layouts accelerate writes."""
    if (folder / MANIFEST_NAME).exists() or (folder / "pytorch_model_fsdp.bin").exists():
        return True
    return (folder / "pytorch_model_fsdp_0" / INDEX_NAME).exists() or any(
        folder.glob("pytorch_model_fsdp_rank*.bin")
    )
