"""The folder a trial runs in: the user's files as links, so that reading works and nothing of theirs is written.

Small files are copies, which scripts that resolve their own path do not leave. A folder with very many files, and
one that begins with a dot, is one link; the worker's write guard refuses what would be written through it.
"""

import os
import re
import shutil
from collections.abc import Collection
from pathlib import Path

_COPIED_BYTES = 1 << 20
"""Size up to which a file is copied."""
_ALL_COPIED_BYTES = 64 << 20
"""What the copies may take together; the files that come after them are links."""
_MOST_FILES = 20_000
_MOST_IN_FOLDER = 2_000


def make_scratch(source: Path, target: Path, *, leave_out: Collection[Path]) -> None:
    """Make a folder that reads as another one.

    Args:
        source: The user's folder.
        target: To be made.
        leave_out: Folders that are not shown: those of trials.
    """
    target.mkdir(parents=True)
    count, room = 0, _ALL_COPIED_BYTES
    pending = [(source, target)]
    while pending:
        folder, place = pending.pop()
        entries = _entries(folder, leave_out)
        count += len(entries)
        for entry in entries:
            if _is_opened(entry, count):
                (place / entry.name).mkdir()
                pending.append((Path(entry.path), place / entry.name))
            else:
                room -= _show(entry, place / entry.name, room)


def _entries(folder: Path, leave_out: Collection[Path]) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as found:
            return sorted(
                (entry for entry in found if Path(entry.path) not in leave_out), key=lambda entry: entry.name
            )
    except PermissionError:
        return []


def _is_opened(entry: os.DirEntry[str], count: int) -> bool:
    """Return whether a folder is shown file by file."""
    if not entry.is_dir(follow_symlinks=False) or entry.name.startswith("."):
        return False
    if count > _MOST_FILES or not os.access(entry.path, os.R_OK | os.X_OK):
        return False
    with os.scandir(entry.path) as inside:
        return sum(1 for _ in inside) <= _MOST_IN_FOLDER


def _show(entry: os.DirEntry[str], place: Path, room: int) -> int:
    """Copy or link a file, or link a folder; return the bytes that were copied."""
    size = entry.stat().st_size if entry.is_file() and os.access(entry.path, os.R_OK) else None
    if size is not None and size <= min(_COPIED_BYTES, room):
        shutil.copy2(entry.path, place)
        return size
    place.symlink_to(os.path.realpath(entry.path))
    return 0


def moved(text: str, source: Path, target: Path) -> str:
    """Return a script's argument with paths in the user's folder leading into the scratch folder."""
    if len(source.parts) < 2:  # noqa: PLR2004  (the root is in every path)
        return text
    return re.sub(rf"(^|[=:,]){re.escape(str(source))}(?=/|$)", lambda found: f"{found[1]}{target}", text)
