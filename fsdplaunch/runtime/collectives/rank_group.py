"""What the ranks of a group exchange: the first one's value or tensors, any one's value or failure."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from fsdplaunch.errors import CheckpointError, LaunchError


class SharedError(CheckpointError):
    """A failure that every rank has raised already."""


class RankGroup:
    """Ranks that do the same: all there are, or those of one model's mesh.

    Args:
        groups: Broadcast over one after the other they reach all ranks from the first; [] for one rank without a
            process group. None stands for all ranks there are.
        device: Where a collective's tensor can be.
    """

    def __init__(
        self,
        groups: Sequence[dist.ProcessGroup | None] = (None,),
        device: torch.device = torch.device("cpu"),  # noqa: B008  (a constant)
    ) -> None:
        self.groups = groups
        self.device = device

    @property
    def is_first(self) -> bool:
        """Return whether this rank is the one whose values the others get."""
        return all(dist.get_rank(group) == 0 for group in self.groups)

    def from_first(self, value: Any) -> Any:
        """Return the first rank's value on every rank."""
        values = [value]
        for group in self.groups:
            dist.broadcast_object_list(values, group=group, group_src=0)
        return values[0]

    def from_any(self, value: Any) -> Any:
        """Return on every rank the first value, in the order of ranks, that is not None; None if all are."""
        for group in self.groups:
            value = next((each for each in from_all(value, group) if each is not None), None)
        return value

    def send(self, *tensors: torch.Tensor) -> None:
        """Overwrite tensors with the first rank's."""
        sent = [(tensor, tensor.contiguous()) for tensor in tensors if tensor.numel()]
        # Every backend can send bytes, whatever the dtype is.
        raw = [each.view(-1).view(torch.uint8) for _, each in sent]
        for group in self.groups:
            works = [dist.broadcast(each, group=group, async_op=True, group_src=0) for each in raw]
            for work in works:
                if work is not None:
                    work.wait()
        for tensor, each in sent:
            if each is not tensor:
                tensor.copy_(each)

    @contextmanager
    def raise_on_all(self, doing: str, *, naming_first: bool = False) -> Iterator[None]:
        """Run a block on every rank and raise the first failing rank's CheckpointError on all if it failed on any.

        Torch's checkpoint functions raise an exception that is not an `Exception`; it counts, too.

        Args:
            doing: What the block does, to complete "cannot ...".
            naming_first: Name rank 0 in the message, too, when it failed; other ranks are always named.
        """
        failure: BaseException | None = None
        try:
            yield
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            failure = error
        mine = None if failure is None else (dist.get_rank() if self.groups else 0, *_message_of(failure))
        found = self.from_any(mine)
        if isinstance(failure, SharedError):
            raise failure  # from a block inside this one, with the rank that failed and what it did in its message
        if found is not None:
            rank, message, hint = found
            who = f"rank {rank}: " if rank or naming_first else ""
            msg = f"cannot {doing}: {who}{message}"
            raise SharedError(msg, hint=hint) from failure


def raise_on_all_ranks(doing: str, group: dist.ProcessGroup | None = None) -> Any:
    """Run a block on all ranks, maybe in a group of its own; see `RankGroup.raise_on_all`."""
    return RankGroup([group]).raise_on_all(doing, naming_first=True)


def from_all(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return every rank's value on every rank, in the order of ranks."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def from_rank_0(value: Any, group: dist.ProcessGroup | None = None) -> Any:
    """Return rank 0's value on every rank."""
    return RankGroup([group]).from_first(value)


def _message_of(failure: BaseException) -> tuple[str, str | None]:
    """Return what happened, in one line, and the hint if the error has one."""
    if isinstance(failure, LaunchError):
        return failure.message, failure.hint
    inner = getattr(failure, "failures", None)  # CheckpointException: rank -> (error, traceback)
    if inner:
        failure = next(iter(inner.values()))[0]
        if isinstance(failure, LaunchError):
            return failure.message, failure.hint
    lines = (str(failure).strip() or "no message").splitlines()
    ends = lines[0] if len(lines) == 1 else f"{lines[0]} ... {lines[-1].strip()}"  # torch puts the cause last
    return f"{type(failure).__name__}: {ends}", None
