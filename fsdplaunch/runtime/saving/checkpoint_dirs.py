"""Checkpoint folders: a temporary one that is put in place in one move, the newest complete one, the old ones."""

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from fsdplaunch.checkpoint.manifest import (
    MANIFEST_NAME,
    find_gap,
    is_complete,
    looks_like_checkpoint,
    own_files,
    read_manifest,
    sequence_of,
)
from fsdplaunch.checkpoint.output_folder import keep_entries, swap_folders, sync_folder
from fsdplaunch.checkpoint.untrusted_files import real_path
from fsdplaunch.errors import CheckpointError
from fsdplaunch.runtime import messages

_NUMBERED = re.compile(r"checkpoint-([0-9]+)")


def partial_of(target: Path) -> Path:
    """Return the temporary folder of a checkpoint that is being written."""
    return target.parent / f".{target.name}.partial"


def begin(target: Path) -> Path:
    """Make the temporary folder beside `target` that becomes it, removing what a killed save of it left.

    Raises:
        CheckpointError: `target` cannot be put in place in one move.
    """
    if os.path.lexists(target):
        _check_replaceable(target)
    partial = partial_of(target)
    remove_path(partial)
    partial.mkdir(parents=True)
    return partial


def remove_path(path: Path) -> None:
    """Remove a folder with all that is in it, or a file; of a link the link alone. Nothing may be there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _check_replaceable(target: Path) -> None:
    if not target.is_dir():
        msg = f"{target} is {'a link that leads nowhere' if not target.exists() else 'a file'}"
        raise CheckpointError(msg, hint="name a folder")
    if target.is_mount() or Path.cwd().is_relative_to(real_path(target)):
        what = "a mounted disk" if target.is_mount() else "the folder the script runs in"
        msg = f"{target} is {what}, which cannot be replaced"
        raise CheckpointError(msg, hint="pass step=N to save into a folder inside it, or name such a folder")


def publish(partial: Path, target: Path) -> None:
    """Put the finished folder in the place of `target`, which holds either all of the old or all of the new.

    Files that are not part of the earlier checkpoint, such as a tokenizer beside it, are kept.
    """
    for folder in {path.parent for path in partial.rglob("*")}:
        sync_folder(folder)
    if target.exists():
        replaced = {name.split("/")[0] for name in own_files(target)} | {MANIFEST_NAME}
        keep_entries([path for path in target.iterdir() if path.name not in replaced], partial)
        swap_folders(partial, target, _aside(target))
    else:
        partial.rename(target)
    sync_folder(target.parent)


def _aside(target: Path) -> Path:
    """Return where the old folder waits for its removal on file systems that cannot exchange two folders."""
    return target.parent / f".{target.name}.old"


def numbered(root: Path) -> list[tuple[int, Path]]:
    """Return the folders `checkpoint-N` in `root`, highest N first, complete or not."""
    found = [
        (int(match[1]), path) for path in root.glob("checkpoint-*") if (match := _NUMBERED.fullmatch(path.name))
    ]
    return sorted(found, reverse=True)


def find_checkpoint(root: Path) -> tuple[Path | None, list[str]]:
    """Find the checkpoint to load: `root` itself, else the newest complete `checkpoint-N` in it.

    A folder whose replacement was interrupted between two moves is found under its waiting name.

    Returns:
        The checkpoint, or None, and what was passed over for it, each with the reason.
    """
    skipped: list[str] = []
    if looks_like_checkpoint(root):
        gap = find_gap(root)
        if gap is None:
            return root, []
        skipped.append(f"{root}: {gap}")
    if not root.exists() and is_complete(_aside(root)):
        return _aside(root), []
    for path in _newest_first(root):
        gap = find_gap(path)
        if gap is None:
            return path, [*skipped, *_unfinished(root, path)]
        skipped.append(f"{path}: {gap}")
    return None, [*skipped, *_unfinished(root, None)]


def _newest_first(root: Path) -> Iterator[Path]:
    """Yield numbered folders, the one saved last first.

    Numbers go by what a run counted. After a return to an earlier checkpoint they do not say what is newest; our
    manifests do. Folders that have none come where their number puts them.
    """
    sequences = {path: sequence_of(path) for _, path in numbered(root)}
    by_sequence = iter(sorted(filter(sequences.get, sequences), key=sequences.__getitem__, reverse=True))
    for path, sequence in sequences.items():
        yield next(by_sequence) if sequence else path


def _unfinished(root: Path, taken: Path | None) -> list[str]:
    """Return folders of saves that were interrupted, as far as they came after the checkpoint that is taken."""
    since = 0.0 if taken is None else taken.stat().st_mtime
    left = sorted(path for path in root.glob(".*.partial") if path.is_dir() and path.stat().st_mtime >= since)
    return [f"{path}: its save did not finish" for path in left]


def next_sequence(target: Path) -> int:
    """Return the number of a checkpoint that is about to be completed at `target`."""
    beside = [path for _, path in numbered(target.parent)]
    return 1 + max(map(sequence_of, [target, *beside]))


_REMOVED = ".removed"
_said: set[str] = set()


def remove_old(root: Path, keep: int) -> list[str]:
    """Delete all but the newest `keep` of our complete numbered checkpoints, and what killed saves left.

    Folders that another tool wrote, and incomplete ones in their final place, stay. Of a link to a checkpoint the
    link goes; what it leads to is somebody else's. So are files that no save put into a checkpoint.

    Returns:
        What stayed, each with the reason, in words.
    """
    try:
        ours = {path: sequence_of(path) for _, path in numbered(root) if read_manifest(path) and is_complete(path)}
    except CheckpointError as problem:  # which of them are old is not known then
        return [f"nothing is deleted: {problem.message}"]
    old = sorted(ours, key=ours.__getitem__, reverse=True)[keep:]
    notes = [note for path in old for note in _set_aside(path)]
    for left in root.glob(f".checkpoint-*{_REMOVED}"):
        notes += _remove(left)
    for left in root.glob(".checkpoint-*.partial"):
        try:
            remove_path(left)
        except OSError as problem:
            notes.append(_stays(left, problem.strerror))
    return notes


def say_once(notes: list[str]) -> None:
    """Print what stayed, each a single time."""
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
    """Remove a hidden checkpoint; one with files that are not part of it gets its name back, with these alone."""
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
    return f"{place} stays with what is not part of the checkpoint: {foreign[0]}{more}"
