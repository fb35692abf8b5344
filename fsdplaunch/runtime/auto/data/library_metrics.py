"""Count each row once in metrics that a library adds up over ranks by itself: torchmetrics', pytorch-ignite's.

Needed because they do so wherever a process group is. Rows that a loader divides are to be added up; those that
the script evaluates by are complete on every rank, and counts of them would be too large by the number of ranks.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fsdplaunch.runtime.auto.context import HookContext
from fsdplaunch.runtime.compat.import_hook import once_imported

_COMPLETE = "fsdplaunch_complete"


@contextmanager
def counting_rows_once(hook_context: HookContext) -> Iterator[None]:
    """Have metrics of rows that every rank has computed on each rank."""
    running = [True]

    def complete() -> bool:
        batches = hook_context.batches
        return bool(running and hook_context.ownership.ours and batches.complete and hook_context.evaluating())

    once_imported("torchmetrics.metric", lambda module: _note_updates(module.Metric, complete))
    once_imported("ignite.distributed", lambda module: _compute_alone(module, complete))
    try:
        yield
    finally:
        running.clear()


def _note_updates(kind: Any, complete: Any) -> None:
    """Let torchmetrics' metrics leave out their exchange where every rank was given the same rows."""
    wrap, sync = kind._wrap_update, kind.sync

    @functools.wraps(wrap)
    def wrap_noting(self: Any, update: Any) -> Any:
        inner = wrap(self, update)

        @functools.wraps(inner)
        def noting(*args: Any, **kwargs: Any) -> None:
            self.__dict__[_COMPLETE] = complete()
            inner(*args, **kwargs)

        return noting

    @functools.wraps(sync)
    def sync_divided(self: Any, *args: Any, **kwargs: Any) -> None:
        if not self.__dict__.get(_COMPLETE):
            sync(self, *args, **kwargs)

    kind._wrap_update, kind.sync = wrap_noting, sync_divided


def _compute_alone(module: Any, complete: Any) -> None:
    """Let pytorch-ignite's metrics find one process where every rank was given the same rows."""
    original = module.get_world_size

    @functools.wraps(original)
    def get_world_size() -> int:
        return 1 if complete() else int(original())

    module.get_world_size = get_world_size
