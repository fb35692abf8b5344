"""At most one save that is made while training goes on: copied, written, put in place by a thread of its own."""

import atexit
import os
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.optim import optimizer as optimizers

from fsdplaunch.runtime import messages
from fsdplaunch.runtime.collectives.rank_group import from_all, raise_on_all_ranks
from fsdplaunch.runtime.late_modules import GROUP_IS_ABANDONED, call_if_imported
from fsdplaunch.runtime.saving.background.host_buffer import HostBuffer
from fsdplaunch.runtime.saving.background.host_copies import HostCopies
from fsdplaunch.runtime.saving.background.trained_tensors import TrainedTensors
from fsdplaunch.runtime.saving.save_job import SaveJob
from fsdplaunch.standard_streams import flush_both, write_error
from fsdplaunch.terminal_text import printable, shortened, text_of

EXIT_SECONDS = 25.0
"""How long a script that failed waits at exit for a save that is under way."""
NOTABLE_SECONDS = 0.02


class BackgroundSave:
    """At most one save that is made while training goes on.

    It talks to the other ranks over a process group of its own, so that it never waits in line with training's.
    """

    def __init__(self) -> None:
        self._buffer = HostBuffer()
        self._group: tuple[Any, dist.ProcessGroup] | None = None
        self._folders: set[Path] = set()
        self._thread: threading.Thread | None = None
        self._copies: HostCopies | None = None
        self._hooks: list[Any] = []
        self._failure: BaseException | None = None
        self._is_set_up = self._told = False

    def start(self, save: SaveJob, trained: TrainedTensors) -> None:
        """Begin to copy everything to host memory and to write it; every rank calls this, and `finish` before.

        What is wrong with a folder is found before the first save into it returns, and later beside the training.

        Args:
            save: What is written.
            trained: What only an optimizer's step changes; that step waits for its copy.
        """
        self._set_up()
        group = self._own_group()
        # The script may change to another folder meanwhile.
        save = replace(save, target=save.target.absolute(), root=save.root.absolute())
        is_open = self._open_first(save)
        try:
            with raise_on_all_ranks(save.doing):
                copies = HostCopies([each.state for each in save.states], self._buffer, trained)
        except BaseException:
            save.discard()
            raise
        copied = tuple(replace(each, state=copy) for each, copy in zip(save.states, copies.states, strict=True))
        self._copies = copies
        self._hooks = [model.register_load_state_dict_pre_hook(_before_loading) for model in trained.models]
        arguments = (replace(save, states=copied), copies, group, is_open)
        self._thread = threading.Thread(target=self._run, args=arguments, name="fsdplaunch-save", daemon=True)
        self._thread.start()

    def _set_up(self) -> None:
        """Register what stays to the end of the process."""
        if not self._is_set_up:
            atexit.register(_at_exit)  # not sooner: it must come before the one that ends the process group
            optimizers.register_optimizer_step_pre_hook(self._before_step)
            self._is_set_up = True

    def _open_first(self, save: SaveJob) -> bool:
        """Open a save into a folder that some rank has not saved into yet, and return whether that was so."""
        if not any(from_all(save.root not in self._folders)):
            return False
        save.open()
        self._folders.add(save.root)
        return True

    def _run(self, save: SaveJob, copies: HostCopies, group: dist.ProcessGroup, is_open: bool) -> None:
        try:
            save.write(group, prepare=copies.make, is_open=is_open)
        except BaseException as failure:
            self._failure = failure

    def _own_group(self) -> dist.ProcessGroup:
        default = dist.group.WORLD
        if self._group is None or self._group[0] is not default:
            self._group = (default, dist.new_group(backend="gloo"))
        return self._group[1]

    def _before_step(self, *_: Any) -> None:
        self.wait_for_copies()
        self._remove_hooks()

    def _remove_hooks(self) -> None:
        """Take the hooks out of the models, so that nothing that pickles or copies one meets them for long."""
        while self._hooks:
            self._hooks.pop().remove()

    def wait_for_copies(self) -> None:
        """Wait until all that is trained has been copied, before it changes; say the first time how long."""
        if self._copies is None:
            return
        begin = time.monotonic()
        self._copies.wait()
        self._copies = None
        waited = time.monotonic() - begin
        if waited > NOTABLE_SECONDS and not self._told:
            self._told = True
            messages.say(
                f"checkpoint.async: the optimizer's step waited {waited:.2f} s for the copy to host memory"
            )

    def finish(self, seconds: float | None = None) -> None:
        """Wait for the save under way, if there is one.

        Raises:
            CheckpointError: It failed.
        """
        if self._thread is None:
            return
        self._thread.join(seconds)
        self._thread = self._copies = None
        self._remove_hooks()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure


background = BackgroundSave()


def _before_loading(*_: Any) -> None:
    """Wait before a model's `load_state_dict`; found by its name when the model is pickled."""
    background.wait_for_copies()


def wait_for_copies() -> None:
    """Wait until a save under way has copied what is about to be changed."""
    background.wait_for_copies()


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
        write_error(f"error: {printable(shortened(text_of(failure)))}\n")
        with suppress(OSError, ValueError):
            flush_both()
        if not failed:
            os._exit(1)  # an exit handler has no other way to change the status
