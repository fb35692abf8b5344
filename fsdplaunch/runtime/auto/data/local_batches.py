"""What this rank's shares of the batches look like, to tell them from data that all ranks hold alike."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(slots=True)
class LocalBatches:
    """The rows that this rank trains on.

    Attributes:
        sizes: How many rows its shares had so far: those of full batches, and of a last one.
        current: Rows of the share that a model's running or last pass got; 0 where it got none.
        shared_passes: Passes since the last backward that got a share.
        alike_passes: Passes since the last backward that got something else, such as noise for all rows.
        backwards: How many have begun.
        drawn: How many shares of batches were drawn.
        loss_is_sum: Whether the last loss was a sum over the batch.
        single: Numbers drawn one by one since the last backward, by the script's line.
        complete: Whether the loader that was read last gave all ranks the same rows, to evaluate by.
        divided: Whether a loader gave this rank its share of something.
        read_by: A class of loaders that read without being divided, for they begin to in a way of their own.
        compares: Whether what passes get is still to be compared over ranks.
        fingerprint: A number made of what the last pass got while it is; None before the first.
    """

    sizes: set[int] = field(default_factory=set)
    current: int = 0
    shared_passes: int = 0
    alike_passes: int = 0
    backwards: int = 0
    drawn: int = 0
    loss_is_sum: bool = False
    single: dict[str, int] = field(default_factory=dict)
    complete: bool = False
    divided: bool = False
    read_by: str = ""
    compares: bool = True
    fingerprint: float | None = None

    def note(self, rows: int) -> None:
        """Note that a share has so many rows."""
        self.sizes.add(rows)
        self.complete = False
        self.drawn += 1
        self.divided = True

    def enter(self, given: Iterable[Any]) -> None:
        """Note what a model's pass in training mode was given, tensors of any shape among it.

        Rows may be the second dimension: recurrent models have the time first. A pass without gradients, such as
        a teacher's, belongs to no backward.
        """
        tensors = list(_tensors(given))
        shapes = [tensor.shape for tensor in tensors]
        self.current = next((rows for shape in shapes for rows in shape[:2] if rows in self.sizes), 0)
        if not torch.is_grad_enabled():
            return
        if self.compares and not self.divided:
            self.fingerprint = float(sum(tensor.detach().double().sum() for tensor in tensors))
        if self.current:
            self.shared_passes += 1
        else:
            self.alike_passes += 1

    def await_backward(self) -> bool:
        """Return whether a pass was made that no backward has followed."""
        return bool(self.shared_passes or self.alike_passes)

    def leave(self) -> None:
        """Note that a backward has begun, which the passes so far belong to."""
        self.shared_passes = self.alike_passes = 0
        self.backwards += 1


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors among values, and in the lists and mappings among them."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, Mapping):
            yield from _tensors(value.values())
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
