"""Checkpoint folders: a temporary one that is put in place in one move, and the newest complete one."""

import os
import re
import shutil
from pathlib import Path

from fsdplaunch.checkpoint.exchange import exchange
from fsdplaunch.errors import CheckpointError
from fsdplaunch.runtime.manifest import MANIFEST, is_complete, looks_like_checkpoint, own_files

_NUMBERED = re.compile(r"checkpoint-(\d+)")


def begin(target: Path) -> Path:
    """Make the temporary folder beside `target` that becomes it, removing what a killed save of it left.

    Raises:
        CheckpointError: `target` cannot be put in place in one move.
    """
    if target.exists():
        _check_replaceable(target)
    partial = target.parent / f".{target.name}.partial"
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    return partial


def _check_replaceable(target: Path) -> None:
    if not target.is_dir():
        msg = f"{target} is a file"
        raise CheckpointError(msg, hint="name a folder")
    if target.is_mount() or Path.cwd().is_relative_to(target.resolve()):
        what = "a mounted disk" if target.is_mount() else "the folder the script runs in"
        msg = f"{target} is {what}, which cannot be replaced as a whole"
        raise CheckpointError(msg, hint="pass step=N to save into a folder inside it, or name such a folder")


def publish(partial: Path, target: Path) -> None:
    """Put the finished folder in the place of `target`, which holds either all of the old or all of the new.

    Files that are no part of the earlier checkpoint, such as a tokenizer beside it, are kept.
    """
    if target.exists():
        _carry_over(target, partial)
        _exchange(partial, target)
        shutil.rmtree(_aside(target) if _aside(target).exists() else partial)
    else:
        partial.rename(target)
    _sync(target.parent)


def _aside(target: Path) -> Path:
    """Where the old folder waits for its removal on file systems that cannot exchange two folders."""
    return target.parent / f".{target.name}.old"


def _exchange(partial: Path, target: Path) -> None:
    if exchange(partial, target):
        return
    aside = _aside(target)
    if aside.exists():
        shutil.rmtree(aside)
    target.rename(aside)
    partial.rename(target)


def _carry_over(old: Path, new: Path) -> None:
    """Link into `new` what `old` holds beside the checkpoint itself."""
    mine = {name.split("/")[0] for name in own_files(old)} | {MANIFEST}
    for entry in old.iterdir():
        place = new / entry.name
        if entry.name in mine or place.exists():
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.copytree(entry, place, symlinks=True, copy_function=_link)
        else:
            _link(str(entry), str(place))


def _link(source: str, place: str) -> None:
    try:
        os.link(source, place, follow_symlinks=False)
    except OSError:  # a file system without links
        shutil.copy2(source, place, follow_symlinks=False)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def numbered(root: Path) -> list[tuple[int, Path]]:
    """The folders `checkpoint-N` in `root`, highest N first, complete or not."""
    found = [
        (int(match[1]), path) for path in root.glob("checkpoint-*") if (match := _NUMBERED.fullmatch(path.name))
    ]
    return sorted(found, reverse=True)


def find_checkpoint(root: Path) -> Path | None:
    """The checkpoint to load: `root` itself, else the newest complete `checkpoint-N` in it; None if there is none.

    A folder whose replacement was interrupted between two moves is found under its waiting name.
    """
    if looks_like_checkpoint(root) and is_complete(root):
        return root
    if not root.exists() and is_complete(_aside(root)):
        return _aside(root)
    return next((path for _, path in numbered(root) if is_complete(path)), None)
