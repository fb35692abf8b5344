"""What the ranks that load one model tell each other: the first one's plan, any one's failure, tensors."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from fsdplaunch.errors import CheckpointError, LaunchError


class RankGroup:
    """The ranks of one model's mesh.

    Args:
        groups: Groups that, broadcast over one after the other, reach all ranks from the first; [] for one rank
            without a process group. None stands for all ranks there are.
        device: Where a collective's tensor can be.
    """

    def __init__(self, groups: Sequence[dist.ProcessGroup | None], device: torch.device) -> None:
        self.groups = groups
        self.device = device
        self.is_first = all(_number(group) == 0 for group in groups)

    def from_first(self, value: Any) -> Any:
        """Return the first rank's value on every rank."""
        box = [value]
        for group in self.groups:
            dist.broadcast_object_list(box, src=_first(group), group=group)
        return box[0]

    def send(self, tensor: torch.Tensor) -> None:
        """Overwrite a contiguous tensor with the first rank's."""
        raw = tensor.view(-1).view(torch.uint8)  # every backend can send bytes, whatever the number format is
        for group in self.groups:
            dist.broadcast(raw, src=_first(group), group=group)

    @contextmanager
    def together(self, doing: str) -> Iterator[None]:
        """Run a block on every rank and raise on all of them if it failed on any.

        Args:
            doing: What the block does, to complete "cannot ...".

        Raises:
            CheckpointError: With the first failing rank's words.
        """
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            failure = error
        words = None if failure is None else (dist.get_rank() if self.groups else 0, *_words(failure))
        first = self._anyones(words)
        if first is not None:
            rank, message, hint = first
            who = f"rank {rank}: " if rank else ""
            msg = f"cannot {doing}: {who}{message}"
            raise CheckpointError(msg, hint=hint) from failure

    def _anyones(self, words: Any) -> Any:
        for group in self.groups:
            said: list[Any] = [None] * dist.get_world_size(group)
            dist.all_gather_object(said, words, group=group)
            words = next((each for each in said if each is not None), None)
        return words


def _first(group: dist.ProcessGroup | None) -> int:
    return 0 if group is None else dist.get_global_rank(group, 0)


def _number(group: dist.ProcessGroup | None) -> int:
    return dist.get_rank(group)


def _words(failure: Exception) -> tuple[str, str | None]:
    if isinstance(failure, LaunchError):
        return failure.message, failure.hint
    first_line = (str(failure).strip() or "no message").splitlines()[0]
    return f"{type(failure).__name__}: {first_line}", None
