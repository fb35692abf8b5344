"""Paths at which a saving call of all ranks has written a file: rank 0 wrote it, for all of them."""

import os
import re
import shutil
import stat
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path, PurePath
from typing import Any

from fsdplaunch.runtime import messages
from fsdplaunch.runtime.collectives.rank_group import from_all
from fsdplaunch.runtime.script_line import script_line


class SavedPaths:
    """One rank's own names of what rank 0 has written.

    They are rank 0's own, but for names made by chance or by the clock. Absolute, as the script sees them.
    """

    def __init__(self) -> None:
        self._same: dict[str, bool] = {}
        self._told = False

    def tell_of_folders(self, names: Sequence[str | None]) -> None:
        """Say once that the ranks save to folders of different names: what else they write lies apart.

        Args:
            names: Each rank's, of one file or folder.
        """
        rank, other = next((each for each in enumerate(names) if each[1] != names[0]), (0, None))
        folders = _different_folders(names[0], other)
        if folders and not self._told:
            self._told = True
            messages.say(
                f"{script_line()}: rank 0 saves to {folders[0]} and rank {rank} to {folders[1]}, named by a clock,"
                " by chance or by what is there: rank 0 saves it, the others get a link; other files are in each"
                " rank's\n"
                "  try  give the folder's name to the script as an argument"
            )

    def note(self, path: str, *, same: bool) -> None:
        """Remember a file or a folder.

        Args:
            path: This rank's name of it.
            same: Whether all ranks call it so.
        """
        self._same[os.path.abspath(path)] = same  # noqa: PTH100  (links are kept)

    def touched(self, *paths: str) -> list[str]:
        """Return which of the remembered paths are these, lie in them, or hold them."""
        if not self._same:
            return []
        given = [os.path.abspath(path) for path in paths]  # noqa: PTH100
        return [known for known in self._same if any(_is_in(known, each) or _is_in(each, known) for each in given)]

    def same(self, *paths: str) -> bool:
        """Return whether all ranks call what these touch by the same names."""
        return all(self._same[known] for known in self.touched(*paths))

    def move(self, source: str, target: str, *, keep: bool = False) -> None:
        """Follow a file or folder that got another name.

        Args:
            source: What it was called.
            target: What it is called now.
            keep: Whether it still has the first name, too.
        """
        old, new = os.path.abspath(source), os.path.abspath(target)  # noqa: PTH100
        for known in [known for known in self._same if _is_in(known, old)]:
            same = self._same[known] if keep else self._same.pop(known)
            self._same[new + known.removeprefix(old)] = same

    def remove(self, path: str) -> None:
        """Forget a file, or a folder and what was in it."""
        gone = os.path.abspath(path)  # noqa: PTH100
        for known in [known for known in self._same if _is_in(known, gone)]:
            del self._same[known]


def named_by_rank(names: Sequence[str | None]) -> bool:
    """Return whether ranks call their files alike but for each one's own number: `rank0.pt` and `rank1.pt`.

    Args:
        names: Each rank's, in the order of ranks.
    """
    words = [re.findall(r"\d+|\D+", name or "") for name in names]
    if len({len(each) for each in words}) > 1 or len(set(names)) < len(names):
        return False
    places = zip(*words, strict=True)
    return all(len(set(place)) == 1 or _are_ranks(place) for place in places)


def _are_ranks(words: Sequence[str]) -> bool:
    return all(word.isdigit() and int(word) == rank for rank, word in enumerate(words))


def note_saved(saved: SavedPaths, path: str | None) -> None:
    """Remember a path that all ranks have just saved to. Collective."""
    sent = from_all((path, _stamp(path)))
    names = [name for name, _ in sent]
    if path is not None:
        saved.note(path, same=all(name == path for name in names))
        saved.tell_of_folders(names)
        written, stamp = sent[0]
        if written is not None and written != path and stamp is not None and _stamp(written) == stamp:
            with suppress(OSError):  # such as another file system's: what reads it finds none, and says so
                _link(written, path)


def _stamp(path: str | None) -> tuple[int, ...] | None:
    """Return what tells a file or folder from another one of its name; None for nothing.

    An earlier run may have left one on another machine. Of a folder it is its number alone: rank 0 may go on to
    write into it.
    """
    try:
        found = os.stat(path) if path is not None else None  # noqa: PTH116
    except OSError:
        return None
    if found is None:
        return None
    folder = stat.S_ISDIR(found.st_mode)
    return (found.st_ino,) if folder else (found.st_ino, found.st_size, found.st_mtime_ns)


def _link(written: str, name: str) -> None:
    """Give this rank what rank 0 has written by its own name of it, too: a script may read it there.

    So does one that keeps the best weights in a `tempfile.TemporaryDirectory()`.
    """
    if Path(written).is_dir():
        shutil.copytree(written, name, copy_function=_link, dirs_exist_ok=True)
        return
    part = f"{name}.{os.getpid()}.part"
    os.link(written, part)
    try:
        os.replace(part, name)  # noqa: PTH105  (at once: what reads the earlier file goes on)
    finally:
        with suppress(FileNotFoundError):  # still there where both were names of one file already
            os.unlink(part)  # noqa: PTH108


def _different_folders(name: str | None, other: str | None) -> tuple[str, str] | None:
    """Return the folders in which two names of a file lie, or which they are; None for one, or temporary ones."""
    if name is None or other is None:
        return None
    paths = [Path(each) if Path(each).is_dir() else Path(each).parent for each in (name, other)]
    parts = zip(*(path.absolute().parts for path in paths), strict=False)
    first = next((pair for pair in parts if pair[0] != pair[1]), None)
    if first is None or all(part.startswith(tempfile.gettempprefix()) for part in first):
        return None
    return str(paths[0]), str(paths[1])


def _is_in(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder + os.sep)


def path_of(f: Any) -> str | None:
    """Return the path of what a saving call was given: a path, or a file that has a name; None for another."""
    named = f if isinstance(f, str | PurePath) else getattr(f, "name", None)
    return os.fspath(named) if isinstance(named, str | PurePath) else None
