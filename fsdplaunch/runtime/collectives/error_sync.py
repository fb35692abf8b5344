"""Let all ranks learn that one of them failed, so that none waits for it in the next collective."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from fsdplaunch.errors import CheckpointError


class SharedError(CheckpointError):
    """A failure that every rank has raised already."""


@contextmanager
def raise_on_all_ranks(doing: str, group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Run a block on every rank and raise on all of them if it failed on any.

    Torch's checkpoint functions raise an exception that is no `Exception`; it counts, too.

    Args:
        doing: What the block does, to complete "cannot ...".
        group: All ranks, in a group of its own when another thread uses theirs meanwhile.

    Raises:
        CheckpointError: With the first failing rank's words.
    """
    failure: BaseException | None = None
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        failure = error
    outcomes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(outcomes, None if failure is None else _words(failure), group=group)
    if isinstance(failure, SharedError):
        raise failure  # from a block inside this one, with the rank that failed and what it did in its words
    for rank, words in enumerate(outcomes):
        if words is not None:
            msg = f"cannot {doing}: rank {rank}: {words[0]}"
            raise SharedError(msg, hint=words[1]) from failure


def _words(failure: BaseException) -> tuple[str, str | None]:
    """What happened, in one line, and the hint if the error has one."""
    if isinstance(failure, CheckpointError):
        return failure.message, failure.hint
    inner = getattr(failure, "failures", None)  # CheckpointException: rank -> (error, traceback)
    if inner:
        failure = next(iter(inner.values()))[0]
    first_line = (str(failure).strip() or "no message").splitlines()[0]
    return f"{type(failure).__name__}: {first_line}", None


def from_rank_0(value: Any) -> Any:
    """Return rank 0's value on every rank."""
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]
