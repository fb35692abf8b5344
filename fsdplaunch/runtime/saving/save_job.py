"""One save from what is to be written to its place on disk, in the foreground or beside the training.

One launch at a time writes into a folder of checkpoints, and all ranks must see the one folder that rank 0 made.
"""

import atexit
import os
import secrets
import shutil
import socket
import time
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fsdplaunch.checkpoint.manifest import crc_of, write_manifest
from fsdplaunch.checkpoint.output_folder import FolderLock, find_space_gap, save_locks
from fsdplaunch.config.schema.config import Config
from fsdplaunch.errors import CheckpointError
from fsdplaunch.files import durable_file
from fsdplaunch.run_dir import CHECKPOINTS, RUN_DIR
from fsdplaunch.runtime.collectives.rank_group import from_all, from_rank_0, raise_on_all_ranks
from fsdplaunch.runtime.collectives.waits import name_ranks
from fsdplaunch.runtime.rank import own_folder
from fsdplaunch.runtime.saving.checkpoint_dirs import (
    begin,
    next_sequence,
    partial_of,
    publish,
    remove_old,
    say_once,
)
from fsdplaunch.runtime.saving.model_and_optimizer import StateToSave
from fsdplaunch.runtime.torch_internals.distributed import ShardedTensor
from fsdplaunch.runtime.torch_internals.tensors import tree_leaves

_held: dict[Path, FolderLock] = {}
_LOCK_SECONDS = 2.0
"""How long a save waits for who deletes something there, or is about to end."""


def lock_for_run(target: Path) -> None:
    """Keep other runs from saving `target`, or beside a numbered checkpoint, from now on.

    The error of who comes second names the process that holds the lock, and its node.
    """
    for lock in save_locks(target):
        _held.setdefault(lock.path, lock).acquire(_LOCK_SECONDS)


def end_save(target: Path) -> None:
    """Let others save there again, unless this process is a worker of a launch, which may save again."""
    for lock in save_locks(target):
        if RUN_DIR not in os.environ or not is_locked(target):
            _held.pop(lock.path, lock).release()


def is_locked(target: Path) -> bool:
    """Return whether this process keeps others out."""
    return all(_held.get(lock.path, lock).is_held for lock in save_locks(target))


def _release_all() -> None:
    while _held:
        _held.popitem()[1].release()


def _leave_to_parent() -> None:
    while _held:
        _held.popitem()[1].forget()


atexit.register(_release_all)
os.register_at_fork(after_in_child=_leave_to_parent)


TOKEN = ".token"  # noqa: S105  (a file's name)
PATIENCE_SECONDS = 3.0
"""How long a network file system may take to show a new file."""


def _shows(path: Path, text: str) -> bool:
    end = time.monotonic() + PATIENCE_SECONDS
    while True:
        with suppress(OSError, ValueError):
            if path.read_text() == text:
                return True
        if time.monotonic() > end:
            return False
        time.sleep(0.05)


def check_shared(folder: Path, seen: Sequence[tuple[str, bool]]) -> None:
    """Raise for a folder that some ranks do not see, by each one's node and whether it does."""
    blind = [rank for rank, (_, sees) in enumerate(seen) if not sees]
    if blind:
        nodes = ", ".join(dict.fromkeys(seen[rank][0] for rank in blind))
        msg = f"{folder} of {seen[0][0]} (rank 0) is not visible on {nodes} ({name_ranks(blind)})"
        raise CheckpointError(msg, hint="use a folder on a file system that all nodes share")


FileContent = bytes | Callable[[], bytes]
"""What a small file holds, or what makes it of values that nothing changes any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveJob:
    """Everything one save writes, as this rank sees it."""

    target: Path  # the checkpoint's folder
    states: tuple[StateToSave, ...]  # models and optimizers
    files: Mapping[str, FileContent]  # this rank's small files, by name
    manifest: Mapping[str, Any]  # what the manifest says beside its files and the configuration; rank 0's counts
    config: Config  # the worker's configuration, which the manifest says, too
    keep_last: int | None  # how many numbered checkpoints stay, None for all

    @property
    def doing(self) -> str:
        """Return what is done, as messages say it: "cannot ..."."""
        return f"save {self.target}"

    def open(self, group: dist.ProcessGroup | None = None) -> None:
        """Make the temporary folder, and check that there is room and that every rank sees it; raise on all."""
        token = secrets.token_hex(8)
        try:
            with raise_on_all_ranks(self.doing, group):
                if dist.get_rank() == 0:
                    self.target.parent.mkdir(parents=True, exist_ok=True)
                    lock_for_run(self.target)
                    partial = begin(self.target)
                    if gap := find_space_gap(self.target, sum(map(_nbytes, self.states))):
                        msg = f"the checkpoint needs {gap[0]}, {gap[1]} has {gap[2]} free"
                        hint = "free some space, set checkpoint.keep_last, or choose another disk"
                        raise CheckpointError(msg, hint=hint)
                    (partial / TOKEN).write_text(token)
            # Check that every rank means the same folder and sees the token that rank 0 has put there. Collective.
            sent, wanted = from_rank_0((token, str(self.target)), group)
            answers = from_all(
                (socket.gethostname(), str(self.target) == wanted, _shows(partial_of(self.target) / TOKEN, sent)),
                group,
            )
            elsewhere = [rank for rank, (_, same, _) in enumerate(answers) if not same]
            if elsewhere:
                msg = f"rank 0 saves to {wanted}, {name_ranks(elsewhere)} elsewhere"
                raise CheckpointError(msg, hint="give all ranks the same folder and step")
            check_shared(self.target, [(host, sees) for host, _, sees in answers])
        except BaseException:
            self.discard()
            raise

    def write(
        self,
        group: dist.ProcessGroup | None = None,
        prepare: Callable[[], None] | None = None,
        *,
        is_open: bool = True,
    ) -> None:
        """Write everything and put it in place; every rank calls this. A failure of one is an error on all.

        The group is one of its own over gloo when another thread uses theirs meanwhile. `prepare` is called before
        anything else; `is_open` says whether `open` was.
        """
        try:
            if prepare is not None:
                with raise_on_all_ranks(self.doing, group):
                    prepare()
            if not is_open:
                self.open(group)
            partial = partial_of(self.target)
            crcs: dict[str, int] = {}
            for state in self.states:
                with raise_on_all_ranks(self.doing, group):
                    written = state.write(partial, group)
                    crcs |= {f"{state.name}/{name}": crc for name, crc in written.items()}
            own: dict[str, int] = {}
            with raise_on_all_ranks(self.doing, group):
                for name, data in self.files.items():
                    with durable_file(partial / name) as file:
                        file.write(data if isinstance(data, bytes) else data())
                    own[name] = crc_of(partial, name)
            crcs = dict(ChainMap(crcs, *from_all(own, group)))
            with raise_on_all_ranks(self.doing, group):
                if dist.get_rank() == 0:
                    (partial / TOKEN).unlink()
                    about = {**self.manifest, "id": secrets.token_hex(8), "config": asdict(self.config)}
                    write_manifest(partial, about, next_sequence(self.target), crcs)
                    publish(partial, self.target)
                    _note(self.target)
                    if self.keep_last is not None:
                        say_once(remove_old(self.target.parent, self.keep_last))
        except CheckpointError:
            self.discard()
            raise
        finally:
            end_save(self.target)

    def discard(self) -> None:
        """Give the disk back what an unfinished save took of it; of another run's save nothing."""
        if dist.get_rank() == 0 and is_locked(self.target):
            shutil.rmtree(partial_of(self.target), ignore_errors=True)
        end_save(self.target)


def _note(target: Path) -> None:
    """Note a checkpoint in the run's folder, for `fsdplaunch runs show`."""
    with suppress(OSError):
        if (folder := own_folder()) is not None:
            with (folder / CHECKPOINTS).open("a", encoding="utf-8", errors="surrogateescape") as file:
                file.write(f"{os.path.abspath(target)}\n")  # noqa: PTH100  (not where links lead)


def _nbytes(state: StateToSave) -> int:
    """Return the bytes of a state over all ranks, as often as they are written."""
    copies = {"FULL_STATE_DICT": 2, "LOCAL_STATE_DICT": dist.get_world_size()}.get(state.kind, 1)
    sizes = (torch.Size(tensor.size()).numel() * tensor.dtype.itemsize for tensor in tensors_of(state.state))
    return copies * int(sum(sizes))


def tensors_of(state: Any) -> Iterator[Any]:
    """Yield the tensors of a state, sharded or not, in its order."""
    return (leaf for leaf in tree_leaves(state) if isinstance(leaf, torch.Tensor | ShardedTensor))
