"""Checkpoint folders: a temporary one that is put in place in one move, the newest complete one, the old ones."""

import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

from fsdplaunch.checkpoint.manifest import (
    MANIFEST_NAME,
    find_gap,
    is_complete,
    looks_like_checkpoint,
    own_files,
    read_manifest,
    save_id,
    sequence_of,
)
from fsdplaunch.checkpoint.output_folder import NUMBERED, replace_folder, sync_folder
from fsdplaunch.checkpoint.untrusted_files import real_path
from fsdplaunch.errors import CheckpointError
from fsdplaunch.runtime import messages


def partial_of(target: Path) -> Path:
    """Return the temporary folder of a checkpoint that is being written."""
    return target.parent / f".{target.name}.partial"


def begin(target: Path) -> Path:
    """Make the temporary folder beside `target` that becomes it, removing what a killed save of it left."""
    if os.path.lexists(target) and not target.is_dir():
        msg = f"{target} is {'a link that leads nowhere' if not target.exists() else 'a file'}"
        raise CheckpointError(msg, hint="name a folder")
    if target.is_mount() or (target.exists() and Path.cwd().is_relative_to(real_path(target))):
        what = "a mounted disk" if target.is_mount() else "the folder the script runs in"
        msg = f"{target} is {what}, which cannot be replaced"
        raise CheckpointError(msg, hint="pass step=N to save into a folder inside it, or name such a folder")
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


def publish(partial: Path, target: Path) -> None:
    """Put the finished folder in the place of `target`, which holds either all of the old or all of the new.

    Files that are not part of the earlier checkpoint, such as a tokenizer beside it, are kept.
    """
    for folder in {path.parent for path in partial.rglob("*")}:
        sync_folder(folder)
    if target.exists():
        replaced = {name.split("/")[0] for name in own_files(read_manifest(target))} | {MANIFEST_NAME}
        replace_folder(partial, target, _aside(target), lambda name: name not in replaced)
    else:
        partial.rename(target)
    sync_folder(target.parent)


def _aside(target: Path) -> Path:
    """Return where the old folder waits for its removal on file systems that cannot exchange two folders."""
    return target.parent / f".{target.name}.old"


def numbered(root: Path) -> list[tuple[int, Path]]:
    """Return the folders `checkpoint-N` in `root`, highest N first, complete or not."""
    found = [
        (int(match[1]), path) for path in root.glob("checkpoint-*") if (match := NUMBERED.fullmatch(path.name))
    ]
    return sorted(found, reverse=True)


def find_checkpoint(root: Path) -> tuple[Path | None, list[str]]:
    """Find the checkpoint to load: `root` itself, else the newest complete `checkpoint-N` in it; None without one.

    A folder whose replacement was interrupted between two moves is found under its waiting name. Returns as well
    what was passed over, each with the reason.
    """
    if not root.exists() and is_complete(_aside(root)):
        return _aside(root), []
    skipped: list[str] = []
    since, taken = 0.0, None
    for path in [*([root] if looks_like_checkpoint(root) else []), *_newest_first(root)]:
        gap = find_gap(path)
        if gap is None:
            since, taken = path.stat().st_mtime, path
            break
        skipped.append(f"{path}: {gap}")
    if taken != root:  # saves into it that were interrupted, as far as they came after the one that is taken
        left = sorted(path for path in root.glob(".*.partial") if path.is_dir() and path.stat().st_mtime >= since)
        skipped += [f"{path}: its save did not finish" for path in left]
    return taken, skipped


def _newest_first(root: Path) -> Iterator[Path]:
    """Yield numbered folders, the one saved last first.

    Numbers go by what a run counted. After a return to an earlier checkpoint they do not say what is newest; our
    manifests do. Folders that have none come where their number puts them.
    """
    sequences = {path: sequence_of(read_manifest(path)) for _, path in numbered(root)}
    by_sequence = iter(sorted(filter(sequences.get, sequences), key=sequences.__getitem__, reverse=True))
    for path, sequence in sequences.items():
        yield next(by_sequence) if sequence else path


def next_sequence(target: Path) -> int:
    """Return the number of a checkpoint that is about to be completed at `target`."""
    beside = [path for _, path in numbered(target.parent)]
    return 1 + max(sequence_of(read_manifest(path)) for path in (target, *beside))


_REMOVED = ".removed"
_said: set[str] = set()


def remove_old(root: Path, keep: int) -> list[str]:
    """Delete all but the newest `keep` of our complete numbered checkpoints, and what killed saves left.

    Folders that another tool wrote, and incomplete ones in their final place, stay. Of a link to a checkpoint the
    link goes; what it leads to is somebody else's. So are files that no save put into a checkpoint, and what has
    come into the place of an old one meanwhile. Returns what stayed, each with the reason, in words.
    """
    try:
        found = {path: read_manifest(path) for _, path in numbered(root) if is_complete(path)}
    except CheckpointError as problem:  # which of them are old is not known then
        return [f"nothing is deleted: {problem.message}"]
    ours = sorted(filter(found.get, found), key=lambda path: sequence_of(found[path]), reverse=True)
    notes = [_stays_unless(partial(_set_aside, known=save_id(found[path])), path) for path in ours[keep:]]
    notes += [_stays_unless(_remove, left) for left in root.glob(f".checkpoint-*{_REMOVED}")]
    notes += [_stays_unless(remove_path, left) for left in root.glob(".checkpoint-*.partial")]
    return [note for note in notes if note is not None]


def say_once(notes: list[str]) -> None:
    """Print what stayed, each a single time."""
    for note in notes:
        if note not in _said:
            _said.add(note)
            messages.say(f"keep_last: {note}")


def _stays_unless(remove: Callable[[Path], str | None], path: Path) -> str | None:
    """Remove a path; return what to say where that cannot be, or not wholly."""
    try:
        return remove(path)
    except OSError as problem:
        return f"{path} is not deleted: {(problem.strerror or 'it cannot be removed').lower()}"
    except CheckpointError as problem:
        return f"{path} is not deleted: {problem.message}"


def _set_aside(path: Path, known: object) -> str | None:
    """Hide the checkpoint of a save in one step: there is no moment at which half of it is there."""
    if path.is_mount():
        return f"{path} is not deleted: it is a mounted disk"
    if not path.is_symlink() and not all(os.access(folder, os.W_OK) for folder, _, _ in os.walk(path)):
        return f"{path} is not deleted: it is not writable"
    hidden = path.rename(path.with_name(f".{path.name}{_REMOVED}"))
    try:
        if save_id(read_manifest(hidden)) == known:
            return None
    except CheckpointError:
        hidden.rename(path)
        raise
    hidden.rename(path)
    return f"{path} is not deleted: another save has taken its place"


def _remove(hidden: Path) -> str | None:
    """Remove a hidden checkpoint; one with files that are not part of it gets its name back, with these alone."""
    if hidden.is_symlink() or not hidden.is_dir():
        hidden.unlink()
        return None
    own = {*own_files(read_manifest(hidden))}  # none where the manifest, which goes last, has gone already
    foreign: list[str] = []
    for at, folders, names, folder in os.fwalk(hidden, topdown=False):
        for name in (*names, *folders):
            path = os.path.relpath(os.path.join(at, name), hidden)  # noqa: PTH118
            if path in own:
                os.unlink(name, dir_fd=folder)
            elif name in names or not stat.S_ISDIR(os.lstat(name, dir_fd=folder).st_mode):
                foreign += [path] if path != MANIFEST_NAME else []
            else:
                with suppress(OSError):  # not empty
                    os.rmdir(name, dir_fd=folder)
    (hidden / MANIFEST_NAME).unlink(missing_ok=True)
    if not foreign:
        hidden.rmdir()
        return None
    place = hidden.with_name(hidden.name[1:].removesuffix(_REMOVED))
    hidden.rename(place)
    more = f" and {len(foreign) - 1} more" if len(foreign) > 1 else ""
    return f"{place} is kept for what is not part of the checkpoint: {min(foreign)}{more}"
