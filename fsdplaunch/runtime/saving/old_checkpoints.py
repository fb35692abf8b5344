"""Remove old checkpoints, and of each only what a save wrote. No save fails of what cannot be removed."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from fsdplaunch.checkpoint.manifest import MANIFEST_NAME, is_complete, own_files, read_manifest, sequence_of
from fsdplaunch.runtime import messages
from fsdplaunch.runtime.saving.checkpoint_dirs import numbered, remove_path

_REMOVED = ".removed"
_said: set[str] = set()


def remove_old(root: Path, keep: int) -> list[str]:
    """Delete all but the newest `keep` of our complete numbered checkpoints, and what killed saves left.

    Folders that another tool wrote, and incomplete ones in their final place, stay. Of a link to a checkpoint the
    link goes; what it leads to is somebody else's. So are files that no save put into a checkpoint.

    Returns:
        What stayed, each with the reason, in words.
    """
    ours = [path for _, path in numbered(root) if read_manifest(path) is not None and is_complete(path)]
    notes = [note for path in sorted(ours, key=sequence_of, reverse=True)[keep:] for note in _set_aside(path)]
    for left in root.glob(f".checkpoint-*{_REMOVED}"):
        notes += _remove(left)
    for left in root.glob(".checkpoint-*.partial"):
        try:
            remove_path(left)
        except OSError as problem:
            notes.append(_stays(left, problem.strerror))
    return notes


def say_once(notes: list[str]) -> None:
    """Tell the user what stayed, each a single time."""
    for note in notes:
        if note not in _said:
            _said.add(note)
            messages.say(f"keep_last: {note}")


def _stays(path: Path, why: str | None) -> str:
    return f"{path} stays: {(why or 'it cannot be removed').lower()}"


def _set_aside(path: Path) -> Iterator[str]:
    """Hide a checkpoint in one step: there is no moment at which half of it is there. Yield why that cannot be."""
    if path.is_mount():
        yield _stays(path, "it is a mounted disk")
    elif not path.is_symlink() and not all(os.access(folder, os.W_OK) for folder, _, _ in os.walk(path)):
        yield _stays(path, "it is not writable")
    else:
        try:
            path.rename(path.with_name(f".{path.name}{_REMOVED}"))
        except OSError as problem:
            yield _stays(path, problem.strerror)


def _remove(hidden: Path) -> list[str]:
    """Remove a hidden checkpoint; one with files that are no part of it gets its name back, with these alone."""
    try:
        if hidden.is_symlink() or not hidden.is_dir():
            hidden.unlink()
            return []
        if not (foreign := _foreign_files(hidden)):
            shutil.rmtree(hidden)
            return []
        place = hidden.with_name(hidden.name[1:].removesuffix(_REMOVED))
        return [_keep_foreign(hidden, place, foreign)]
    except OSError as problem:
        return [_stays(hidden, problem.strerror)]


def _foreign_files(folder: Path) -> list[str]:
    """Return the files below a folder that its manifest does not name; all of them where it has none any more."""
    own = {*own_files(folder), MANIFEST_NAME}
    found = (os.path.relpath(Path(at, name), folder) for at, _, names in os.walk(folder) for name in names)
    links = (os.path.relpath(path, folder) for path in folder.rglob("*") if path.is_symlink())
    return sorted({*found, *links} - own)


def _keep_foreign(hidden: Path, place: Path, foreign: list[str]) -> str:
    """Delete everything but these files, the manifest last, and return what to say."""
    for at, folders, names in os.walk(hidden, topdown=False):
        paths = [Path(at, name) for name in (*names, *folders)]
        for path in paths:
            if path.is_dir() and not path.is_symlink():
                if not any(path.iterdir()):
                    path.rmdir()
            elif str(path.relative_to(hidden)) not in foreign and path.name != MANIFEST_NAME:
                path.unlink()
    (hidden / MANIFEST_NAME).unlink(missing_ok=True)
    hidden.rename(place)
    more = f" and {len(foreign) - 1} more" if len(foreign) > 1 else ""
    return f"{place} stays with what is no part of the checkpoint: {foreign[0]}{more}"
