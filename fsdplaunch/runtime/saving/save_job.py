"""One save from what is to be written to its place on disk, in the foreground or beside the training."""

import atexit
import os
import shutil
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fsdplaunch.byte_sizes import size_words
from fsdplaunch.checkpoint.atomic_output import find_space_gap
from fsdplaunch.checkpoint.manifest import write_manifest
from fsdplaunch.errors import CheckpointError
from fsdplaunch.runtime import messages
from fsdplaunch.runtime.collectives.rank_group import raise_on_all_ranks
from fsdplaunch.runtime.late_modules import GROUP_IS_ABANDONED, call_if_imported
from fsdplaunch.runtime.saving.checkpoint_dirs import begin, next_sequence, partial_of, publish
from fsdplaunch.runtime.saving.host_buffer import HostBuffer
from fsdplaunch.runtime.saving.model_and_optimizer import StateToSave
from fsdplaunch.runtime.saving.old_checkpoints import remove_old, say_once
from fsdplaunch.runtime.saving.run_locks import end_save, is_locked, lock_for_run
from fsdplaunch.runtime.saving.shared_storage import check_same
from fsdplaunch.runtime.saving.small_files import write_bytes
from fsdplaunch.runtime.torch_internals.sharded_tensor import ShardedTensor
from fsdplaunch.terminal_text import printable, shortened, text_of

LARGE_BYTES = 10 * 2**30
"""From here on, gathering a full model through one rank takes so long that it is worth a word."""
EXIT_SECONDS = 25.0
"""How long a script that failed waits at exit for a save that is under way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveJob:
    """Everything one save writes, as this rank sees it.

    Attributes:
        target: The checkpoint's folder.
        states: Models and optimizers.
        files: This rank's small files, by name.
        manifest: What the manifest says beside its files; rank 0's counts.
        keep_last: How many numbered checkpoints stay, None for all.
        root: The folder it is in, which other runs are kept out of; or the target itself.
    """

    target: Path
    states: tuple[StateToSave, ...]
    files: Mapping[str, bytes]
    manifest: Mapping[str, Any]
    keep_last: int | None
    root: Path

    @property
    def doing(self) -> str:
        """Return what is done, as messages say it: "cannot ..."."""
        return f"save {self.target}"

    def open(self) -> None:
        """Make the temporary folder, and check that there is room and that every rank sees it.

        Raises:
            CheckpointError: On all ranks.
        """
        try:
            with raise_on_all_ranks(self.doing):
                if dist.get_rank() == 0:
                    self._warn_if_large()
                    self._lock()
                    begin(self.target)
                    self._check_space()
            check_same(partial_of(self.target), self.target)
        except CheckpointError:
            self._discard()
            raise
        except BaseException:
            end_save(self.target, self.root)
            raise

    def _lock(self) -> None:
        """Keep other runs out of the same folder from now on."""
        self.target.parent.mkdir(parents=True, exist_ok=True)
        lock_for_run(self.target, self.root)

    def _check_space(self) -> None:
        if gap := find_space_gap(self.target, sum(_nbytes(state) for state in self.states)):
            msg = f"the checkpoint needs {gap[0]}, {gap[1]} has {gap[2]} free"
            raise CheckpointError(msg, hint="free some space, set checkpoint.keep_last, or choose another disk")

    def _warn_if_large(self) -> None:
        gathered = sum(_nbytes(state, once=True) for state in self.states if state.kind == "FULL_STATE_DICT")
        if gathered >= LARGE_BYTES:
            messages.say(
                f"FULL_STATE_DICT sends {size_words(gathered)} through rank 0, one tensor at a time:"
                " SHARDED_STATE_DICT is written by all ranks at once, and merge-weights makes one file of it"
            )

    def write(self, group: dist.ProcessGroup | None = None) -> None:
        """Write everything and put it in place; every rank calls this.

        Args:
            group: All ranks over gloo, in a group of its own when another thread uses theirs meanwhile.

        Raises:
            CheckpointError: On all ranks, and nothing has changed.
        """
        try:
            self._write(group)
        except CheckpointError:
            self._discard()
            raise
        finally:
            end_save(self.target, self.root)

    def _write(self, group: dist.ProcessGroup | None) -> None:
        partial = partial_of(self.target)
        for state in self.states:
            with raise_on_all_ranks(self.doing, group):
                state.write(partial, group)
        with raise_on_all_ranks(self.doing, group):
            for name, data in self.files.items():
                write_bytes(partial / name, data)
        with raise_on_all_ranks(self.doing, group):
            if dist.get_rank() == 0:
                write_manifest(partial, self.manifest, next_sequence(self.target))
                publish(partial, self.target)
                if self.keep_last is not None:
                    say_once(remove_old(self.target.parent, self.keep_last))

    def _discard(self) -> None:
        """Give the disk back what an unfinished save took of it; of another run's save nothing."""
        if dist.get_rank() == 0 and is_locked(self.target, self.root):
            shutil.rmtree(partial_of(self.target), ignore_errors=True)
        end_save(self.target, self.root)


def _nbytes(state: StateToSave, *, once: bool = False) -> int:
    """Return the bytes of a state over all ranks, as often as they are written, or each tensor's once."""
    copies = 2 if state.safe_name is not None and not once else 1
    copies *= dist.get_world_size() if state.kind == "LOCAL_STATE_DICT" else 1
    sizes = ((torch.Size(tensor.size()).numel(), tensor.dtype.itemsize) for tensor in _tensors(state.state))
    return copies * sum(int(count * size) for count, size in sizes)


def _tensors(state: Any) -> Iterator[Any]:
    if isinstance(state, torch.Tensor | ShardedTensor):
        yield state
    elif isinstance(state, dict | list | tuple):
        for value in state.values() if isinstance(state, dict) else state:
            yield from _tensors(value)


class BackgroundSave:
    """At most one save that is written while training goes on.

    It talks to the other ranks over a process group of its own, so that it never waits in line with training's.
    """

    def __init__(self) -> None:
        self._buffer = HostBuffer()
        self._group: tuple[Any, dist.ProcessGroup] | None = None
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._exit_waits = False

    def start(self, save: SaveJob) -> None:
        """Copy everything to host memory and begin to write it; every rank calls this, and `finish` before."""
        if not self._exit_waits:
            atexit.register(_at_exit)  # not sooner: it must come before the one that ends the process group
            self._exit_waits = True
        group = self._own_group()
        try:
            with raise_on_all_ranks(save.doing):
                copies = self._buffer.copy([each.state for each in save.states])
        except BaseException:
            end_save(save.target, save.root)
            raise
        copied = tuple(replace(each, state=copy) for each, copy in zip(save.states, copies, strict=True))
        staged = replace(save, states=copied)
        self._thread = threading.Thread(
            target=self._run, args=(staged, group), name="fsdplaunch-save", daemon=True
        )
        self._thread.start()

    def _run(self, save: SaveJob, group: dist.ProcessGroup) -> None:
        try:
            save.write(group)
        except BaseException as failure:
            self._failure = failure

    def _own_group(self) -> dist.ProcessGroup:
        default = dist.group.WORLD
        if self._group is None or self._group[0] is not default:
            self._group = (default, dist.new_group(backend="gloo"))
        return self._group[1]

    def finish(self, seconds: float | None = None) -> None:
        """Wait for the save under way, if there is one.

        Raises:
            CheckpointError: It failed.
        """
        if self._thread is None:
            return
        self._thread.join(seconds)
        self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure


background = BackgroundSave()


def finish_saves() -> None:
    """Wait for a save that is still being written; its failure is raised here.

    Raises:
        CheckpointError: It failed.
    """
    background.finish()


def _at_exit() -> None:
    """Finish the save under way, for runs that no launcher's bootstrap ends."""
    failed = bool(call_if_imported(GROUP_IS_ABANDONED))
    try:
        background.finish(EXIT_SECONDS if failed else None)
    except BaseException as failure:
        sys.stderr.write(f"error: {printable(shortened(text_of(failure)))}\n")
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        if not failed:
            os._exit(1)  # an exit handler has no other way to change the status
