"""Rank 0 has the working tree. What another rank writes there itself goes to files that only this rank sees.

Rank 0 writes as plain Python does: nothing is replaced there. On another rank a file that is opened to be written
below the working folder is one of this rank's own, in a temporary folder, under the script's name for it: the rank
reads back what it wrote. Making a folder that exists is not an error, and removing or renaming what rank 0 has is
left to rank 0. What a rank has not written itself it reads in the tree, when nobody writes it any more.

Files that are opened by C code (a database, HDF5) or that are not ordinary ones (devices, pipes) are every rank's.
"""

import atexit
import builtins
import errno
import io
import itertools
import os
import shutil
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial, wraps
from pathlib import Path, PurePath
from typing import Any

from fsdplaunch.errors import CheckpointError
from fsdplaunch.run_dir import RUN_DIR
from fsdplaunch.runtime import messages
from fsdplaunch.runtime.auto.model.who_shards import Ownership, holds_a_sharder
from fsdplaunch.runtime.collectives.rank_group import from_rank_0
from fsdplaunch.runtime.device import joined_by_script
from fsdplaunch.runtime.messages import script_line
from fsdplaunch.runtime.patch import replaced
from fsdplaunch.runtime.state_dict.gather import are_files_of_ranks, files_of_ranks
from fsdplaunch.runtime.torch_internals.distributed import default_timeout

PATIENCE_SECONDS = 5.0
"""How late rank 0 may be with a file or folder; one that it does not make has a name of this rank's own."""
_REFUSED = {"os.remove": 0, "os.rmdir": 0, "os.link": 1, "os.symlink": 1, "os.truncate": 0}
"""Audit events of calls that are not replaced and would change rank 0's files, with the place of the path.

`os.remove` is the event of `os.unlink`, too, which alone is not replaced: scripts call the two others.
"""
_IN_FOLDER = ("os.remove", "os.rmdir")  # whose path may be a name in an open folder, as in `shutil.rmtree`
_CLOCK_SECONDS = 2.0  # by how much the clock of a file system may differ


class FilesOfRank0Error(CheckpointError, OSError):
    """A script changes rank 0's files on another rank; libraries that try such things pass over an OSError."""


class WorkingTree:
    """One rank's files."""

    def __init__(self, ownership: Ownership, rank: int) -> None:
        self.rank = rank
        self._ownership = ownership
        self._process = os.getpid()
        self._earliest, self._began = time.time(), time.monotonic()
        self._start = os.getcwd()  # noqa: PTH109
        self._named = [arg.rpartition("=")[2] for arg in sys.argv[1:]]
        self._own: dict[str, str] = {}  # this rank's own files, by the script's names for them
        self._removed: set[str] = set()
        # What `tempfile` has made on this rank, and the run's folder: each rank's own by name.
        self._temporary = {os.path.abspath(os.environ[RUN_DIR])} if RUN_DIR in os.environ else set[str]()  # noqa: PTH100
        # Folders in which this rank waited in vain for rank 0, or that it has made: it has other names there.
        self._apart: set[str] = set()
        self._folder = ""
        self._numbers = itertools.count()
        self._said = self._looking = False

    def is_rank_0s(self) -> bool:
        """Return whether rank 0 has the tree, and this is not it: nor its own process's child, nor a thread."""
        if self.rank == 0 or os.getpid() != self._process or are_files_of_ranks():
            return False
        if threading.current_thread() is not threading.main_thread() or self._ownership.ranked:
            return False
        if self._ownership.ours is not None or self._looking:
            return bool(self._ownership.ours)
        self._looking = True  # opening the source, to read it, asks again
        # A script that imports its trainer in a function holds no name of one, and its ranks write files of their
        # own before the trainer is built, but after accelerate's state: caches of datasets.
        state: Any = sys.modules.get("accelerate.state")
        try:
            return not (holds_a_sharder() or joined_by_script() or (state and state.PartialState._shared_state))
        finally:
            self._looking = False

    def open(self, original: Any, file: Any, mode: Any = "r", *args: Any, **kwargs: Any) -> Any:
        """Stand for `open`."""
        place = self._place(file) if kwargs.get("opener") is None and isinstance(mode, str) else None
        if place is None:
            return original(file, mode, *args, **kwargs)
        if set(mode).isdisjoint("wax+"):
            if place not in self._own:
                self._await_writer(place)
            return original(self._own.get(place, file), mode, *args, **kwargs)
        if place in self._own and "x" in mode:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), place)
        if place not in self._own and not self._begin(place, mode, original):
            return original(file, mode, *args, **kwargs)
        opened = original(self._own[place], mode.replace("x", "w"), *args, **kwargs)
        buffer = getattr(opened, "buffer", opened)
        getattr(buffer, "raw", buffer).name = os.fspath(file)
        return opened

    def _begin(self, place: str, mode: str, original: Any) -> bool:
        """Give this rank a file of its own for a name; False where one process would find nothing to open."""
        there = os.path.isfile(place)  # noqa: PTH113
        if not os.path.isdir(os.path.dirname(place)) or ("r" in mode and not there):  # noqa: PTH112, PTH120
            return False
        if not there and not self._await(place) and self.rank == 1 and not self._said:
            self._said = True
            where = f"{script_line()}: only this rank writes {place}"
            messages.say_anywhere(f"{where}: its file is discarded, only rank 0's are kept")
        own = self._new_file()
        # A log that has changed in this run already has this rank's lines in it: rank 0 has been here before.
        begins = "r" in mode or ("a" in mode and there and os.stat(place).st_mtime < self._beginning())  # noqa: PTH116
        if there and begins and not any(is_below(place, each) for each in self._removed):
            with original(place, "rb") as source, original(own, "wb") as target:
                shutil.copyfileobj(source, target)
        self._own[place] = own
        return True

    def mkdir(self, original: Any, path: Any, *args: Any, **kwargs: Any) -> None:
        """Stand for `os.mkdir`: rank 0 makes the folder, or this rank where the name is its own."""
        place = None if kwargs.get("dir_fd") is not None else self._place(path, folder=True)
        if place is None:
            original(path, *args, **kwargs)
        elif not os.path.isdir(place) and not self._await(place):  # noqa: PTH112
            self._apart.add(place)
            with suppress(FileExistsError):  # of a rank that came at the same time
                original(path, *args, **kwargs)

    def rename(self, original: Any, src: Any, dst: Any, **kwargs: Any) -> None:
        """Stand for `os.rename` and `os.replace`."""
        inside = not any(value is not None for value in kwargs.values())
        source, target = (self._place(each, folder=True) if inside else None for each in (src, dst))
        own = [each for each in self._own if source is not None and is_below(each, source)]
        if source is None and target is None:
            original(src, dst, **kwargs)
        elif own and target is not None and source is not None:
            self._forget(target)
            for each in own:
                self._own[target + each.removeprefix(source)] = self._own.pop(each)
        elif own and source is not None:
            original(self._own.pop(source, src), dst)
        elif source is None and target is not None:
            self._take(src, target)
        elif source is not None and not os.path.lexists(source) and not os.path.lexists(target or dst):
            original(src, dst, **kwargs)  # raises what one process would
        elif source is not None:
            self._wait_until(lambda: not os.path.lexists(source), PATIENCE_SECONDS)
            self._removed.add(source)

    def remove(self, original: Any, path: Any, *args: Any, **kwargs: Any) -> None:
        """Stand for `os.remove`, `Path.unlink` and `shutil.rmtree`: rank 0's files are left to it."""
        place = None if kwargs.get("dir_fd") is not None else self._place(path, folder=True)
        if place is None:
            original(path, *args, **kwargs)
        else:
            self._forget(place)
            self._removed.add(place)

    def adopt(self, path: str | os.PathLike[str]) -> None:
        """Count the folder of a file that the script saves to the tree, wherever it is."""
        place = os.path.abspath(path)  # noqa: PTH100
        if self._root(place) is None and not self._is_temporary(place):
            self._named.append(os.path.dirname(place))  # noqa: PTH120

    def leaves_to_rank_0(self, path: Any) -> bool:
        """Wait until rank 0 has written a file that C code writes; False where it is not rank 0's to write."""
        if self.is_rank_0s():
            self.adopt(path)
        place = self._place(path)
        return place is not None and (self._await(place) or True)

    def share(self, path: str | None) -> None:
        """Have what all ranks saved and rank 0 wrote be there under this rank's name of it. Collective.

        Names differ where they are made by a clock or by chance, as in a `tempfile.TemporaryDirectory()`.
        """
        written, mark = from_rank_0((path and os.path.abspath(path), _mark(path)))  # noqa: PTH100
        if path is None or self.rank == 0:
            return
        place = os.path.abspath(path)  # noqa: PTH100
        self._forget(place)
        if written is not None and written != place and mark is not None and _mark(written) == mark:
            # On another file system there is none: what reads it finds none, and says so.
            with suppress(OSError), files_of_ranks():
                _link(written, place)

    def _place(self, path: Any, *, folder: bool = False) -> str | None:
        """Return the name of an ordinary file in rank 0's tree; None for what is this rank's business."""
        if not isinstance(path, str | bytes | os.PathLike):
            return None
        place = os.path.abspath(os.fsdecode(path))  # noqa: PTH100
        if place in self._own:
            return place if self.is_rank_0s() else None
        root = self._root(place)
        if root is None or "/." in place.removeprefix(root) or self._is_temporary(place):
            return None
        with suppress(OSError):
            kind = os.stat(place).st_mode  # noqa: PTH116
            if not stat.S_ISREG(kind) and not (folder and stat.S_ISDIR(kind)):
                return None
        return place if self.is_rank_0s() else None

    def _is_temporary(self, place: str) -> bool:
        return any(is_below(place, each) for each in self._temporary)

    def _root(self, place: str) -> str | None:
        """Return the folder of the tree that a path is in: where the run began, where it is, or of an argument."""
        roots = (self._start, os.getcwd(), *filter(os.path.isabs, self._named))  # noqa: PTH109
        return next((each for each in map(os.path.normpath, roots) if each != "/" and is_below(place, each)), None)

    def _await(self, place: str) -> bool:
        """Wait until rank 0 has made a file or folder, unless it has other names here; return whether it has."""
        parent = os.path.dirname(place)  # noqa: PTH120
        if parent not in self._apart and not self._wait_until(lambda: os.path.lexists(place), PATIENCE_SECONDS):
            self._apart.add(parent)
        return os.path.lexists(place)

    def _beginning(self) -> float:
        """Return a time of day before which no file of this run is: the clock may have been set back meanwhile."""
        self._earliest = min(self._earliest, time.time() - (time.monotonic() - self._began))
        return self._earliest

    def _await_writer(self, place: str) -> None:
        """Wait until no rank of this node writes a file that has changed in this run."""
        try:
            if os.stat(place).st_mtime < self._beginning() - _CLOCK_SECONDS:  # noqa: PTH116
                return
        except OSError:
            return
        if not self._wait_until(lambda: not _is_being_written(place), default_timeout()):
            msg = f"{script_line()} reads {place}, which another rank has had open for writing all the time"
            raise CheckpointError(msg, hint="close the file before it is read")

    @staticmethod
    def _wait_until(condition: Callable[[], bool], seconds: float) -> bool:
        end = time.monotonic() + seconds
        while not (done := condition()) and time.monotonic() < end:
            time.sleep(0.005)
        return done

    def _take(self, src: Any, target: str) -> None:
        """Make what this rank has elsewhere its own file of a name in the tree."""
        if os.path.isdir(src):  # noqa: PTH112  (rank 0 moves one of its own there)
            shutil.rmtree(src)
            return
        self._forget(target)
        own = self._new_file()
        shutil.copyfile(src, own)
        os.unlink(src)  # noqa: PTH108
        self._own[target] = own

    def _forget(self, place: str) -> None:
        for each in [each for each in self._own if is_below(each, place)]:
            with suppress(FileNotFoundError):  # never written
                os.unlink(self._own.pop(each))  # noqa: PTH108
        self._removed.discard(place)

    def _new_file(self) -> str:
        if not self._folder:
            self._folder = tempfile.mkdtemp(prefix="fsdplaunch-")
            atexit.register(shutil.rmtree, self._folder, ignore_errors=True)
        return f"{self._folder}/{next(self._numbers)}"

    def see(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Note what `tempfile` makes, and refuse what changes rank 0's files otherwise: an audit hook."""
        if not _trees:  # none is installed; or the interpreter ends, and has taken away what the names here mean
            return
        if event in ("tempfile.mkstemp", "tempfile.mkdtemp"):
            made = os.path.abspath(arguments[0])  # noqa: PTH100
            if event == "tempfile.mkdtemp" or self._root(made) is not None:
                self._temporary.add(made)
        elif event in _REFUSED and self in _trees:
            path = arguments[_REFUSED[event]]
            in_folder = event in _IN_FOLDER and arguments[1] != -1
            if not in_folder and self._place(path, folder=True) is not None:
                called = "os.unlink" if event == "os.remove" else event
                msg = f"{script_line()}: {called} of {os.fsdecode(path)} on rank {self.rank}: rank 0 has the files"
                hint = "put it under `if rank == 0:`; os.remove, Path.unlink, rmtree and copyfile need no guard"
                raise FilesOfRank0Error(msg, hint=hint)


_trees: list[WorkingTree] = []


def tree() -> WorkingTree:
    """Return this rank's."""
    return _trees[-1]


@contextmanager
def rank_0_having_the_tree(files: WorkingTree) -> Iterator[None]:
    """Rule 5: let ordinary writes of other ranks than 0 go where only they see them."""
    _trees.append(files)
    with ExitStack() as stack:
        stack.callback(_trees.remove, files)
        if files.rank:
            sys.addaudithook(files.see)
            for owner, name, method in (
                (builtins, "open", files.open),
                (io, "open", files.open),
                (os, "mkdir", files.mkdir),
                (os, "rename", files.rename),
                (os, "replace", files.rename),
                (os, "remove", files.remove),
                (shutil, "rmtree", files.remove),
                (Path, "unlink", files.remove),
            ):
                stack.enter_context(replaced(owner, name, partial(_standing, method)))
        yield


def _standing(method: Any, original: Any) -> Any:
    @wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return method(original, *args, **kwargs)

    return call


def is_below(path: str, folder: str) -> bool:
    """Return whether a path is a folder, or of something in it."""
    return path == folder or path.startswith(folder + os.sep)


def path_of(f: Any) -> str | None:
    """Return the path of what a saving call was given: a path, or a file that has a name; None for another."""
    named = f if isinstance(f, str | PurePath) else getattr(f, "name", None)
    return os.fspath(named) if isinstance(named, str | PurePath) else None


def _mark(path: str | None) -> tuple[int, ...] | None:
    """Return what identifies a file: another machine may have another of its name; None for no file."""
    with suppress(OSError, TypeError):
        found = os.stat(path)  # type: ignore[arg-type]  # noqa: PTH116
        # Of a folder its number alone: rank 0 may go on to write into it.
        return (found.st_ino,) if stat.S_ISDIR(found.st_mode) else (found.st_ino, found.st_size, found.st_mtime_ns)
    return None


def _link(written: str, name: str) -> None:
    if Path(written).is_dir():
        shutil.copytree(written, name, copy_function=_link, dirs_exist_ok=True)
        return
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    part = f"{name}.{os.getpid()}.part"
    os.link(written, part)
    os.replace(part, name)  # noqa: PTH105


def _is_being_written(path: str) -> bool:
    """Return whether a process beside this one, with the same parent, has a file open for writing."""
    with suppress(OSError):
        wanted = os.stat(path)  # noqa: PTH116
        for children in Path(f"/proc/{os.getppid()}/task").glob("*/children"):
            for process in children.read_text().split():
                if int(process) != os.getpid() and _has_open(Path("/proc", process), wanted):
                    return True
    return False


def _has_open(process: Path, wanted: os.stat_result) -> bool:
    with suppress(OSError):
        for number in (process / "fd").iterdir():
            with suppress(FileNotFoundError):  # it has been closed
                found = number.stat()
                if (found.st_dev, found.st_ino) == (wanted.st_dev, wanted.st_ino):
                    flags = (process / "fdinfo" / number.name).read_text().partition("flags:")[2].split()[0]
                    if int(flags, 8) & os.O_ACCMODE != os.O_RDONLY:
                        return True
    return False
