"""Run what a script starts as its ranks in the workers that the launcher has started for them. Rule 7.

`mp.spawn(train, args, nprocs=2)` in a script for DistributedDataParallel starts a process per rank, and each of
the launcher's workers would do so: these know nothing of the launch, and wait for each other at one port. Ranks
that are started in another way are refused where they would join a group.
"""

import functools
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from types import ModuleType
from typing import Any

import torch.distributed as dist
import torch.multiprocessing

from fsdplaunch.errors import ShardingError
from fsdplaunch.runtime import messages
from fsdplaunch.runtime.patch import replaced
from fsdplaunch.runtime.script_line import is_user_file, script_line
from fsdplaunch.standard_streams import flush_both

_HINT = "leave the processes to fsdplaunch launch: call in the script what each of them would run"
_REFUSED = 76
"""Status of a process that would have joined ranks; no shell or interpreter gives it by itself."""

_started: dict[BaseProcess, str] = {}
"""What is to be said of a process of the script's, if it would have joined ranks."""


@contextmanager
def running_spawned_ranks() -> Iterator[None]:
    """Let `mp.spawn` of a script's ranks run this worker's; refuse a group in processes started in another way."""
    with (
        replaced(torch.multiprocessing, "spawn", _spawn),
        replaced(sys.modules["torch.multiprocessing.spawn"], "spawn", _spawn),
        replaced(BaseProcess, "start", _start),
        replaced(BaseProcess, "join", _join),
    ):
        yield


def raise_refused() -> None:
    """Wait for the processes that the ended script has started, as the interpreter does: not for daemons.

    Raises:
        ShardingError: One of them would have joined ranks.
    """
    for process in list(_started):
        process.join(0 if process.daemon else None)


def _may_join_ranks(function: Any) -> bool:
    """Return whether a function is of the user's own module, and that holds torch's distributed package."""
    function = getattr(function, "func", function)
    names = getattr(function, "__globals__", {})
    file = str(names.get("__file__", "<"))
    return dist.is_initialized() and is_user_file(file) and any(map(_is_distributed, list(names.values())))


def _is_distributed(value: Any) -> bool:
    name = value.__dict__.get("__name__") if isinstance(value, ModuleType) else None
    home = getattr(value, "__module__", None) if isinstance(value, type) or callable(value) else name
    return str(home).startswith(("torch.distributed", "torch.nn.parallel"))


class _Ended:
    """What `mp.spawn(..., join=False)` returns here: its function has returned."""

    processes: tuple[()] = ()

    def join(self, *_: Any, **__: Any) -> bool:
        return True


def _spawn(original: Any) -> Any:
    @functools.wraps(original)
    def spawn(fn: Any, args: Any = (), nprocs: int = 1, join: bool = True, *more: Any, **kwargs: Any) -> Any:
        if not _may_join_ranks(fn):
            return original(fn, args, nprocs, join, *more, **kwargs)
        here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        if nprocs != here:
            msg = f"{script_line()}: mp.spawn starts {nprocs} ranks here, and the launch has {here}"
            hint = f"launch with --workers-per-node {nprocs}, or have the script start {here}"
            raise ShardingError(msg, hint=hint)
        fn(int(os.environ.get("LOCAL_RANK", "0")), *args)
        return None if join else _Ended()

    return spawn


def _start(original: Any) -> Any:
    @functools.wraps(original)
    def start(self: Any) -> None:
        target = getattr(self, "_target", None)
        if _may_join_ranks(target):
            what = "starts a process that calls init_process_group: the launch has started the ranks"
            _started[self] = message = f"{script_line()} {what}"
            self._target = _WithoutGroup(target, message)
        original(self)

    return start


def _join(original: Any) -> Any:
    @functools.wraps(original)
    def join(self: Any, timeout: float | None = None) -> None:
        original(self, timeout)
        message = None if self.exitcode is None else _started.pop(self, None)
        if message is not None and self.exitcode == _REFUSED:
            raise ShardingError(message, hint=_HINT)

    return join


class _WithoutGroup:
    """What a process that the script has started runs: it may do anything but join ranks."""

    def __init__(self, target: Any, message: str) -> None:
        self.target, self.message = target, message

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        dist.init_process_group = dist.distributed_c10d.init_process_group = self._leave
        return self.target(*args, **kwargs)

    def _leave(self, *_: Any, **__: Any) -> None:
        """End this process: scripts catch an error here, and go on to train a copy in each process."""
        messages.say_anywhere(f"{self.message}; this process ends")
        flush_both()
        os._exit(_REFUSED)
