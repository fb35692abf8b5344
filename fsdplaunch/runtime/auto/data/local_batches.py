"""What this rank's shares of the batches look like, to tell them from data that all ranks hold alike."""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch

from fsdplaunch.runtime.torch_internals.held_tensors import tensors_held


@dataclass(slots=True)
class LocalBatches:
    """The rows that this rank trains on.

    Attributes:
        sizes: How many rows its shares had so far: those of full batches, and of a last one.
        current: Rows of the share that a model's running or last pass got; 0 where it got none.
        latest: Rows of the share that was drawn last.
        time_first: Whether that pass got them in the second dimension: recurrent models have the time first.
        shared_passes: Passes since the last backward that got a share.
        alike_passes: Passes since the last backward that got something else, such as noise for all rows.
        backwards: How many have begun.
        drawn: How many shares of batches were drawn.
        loss_is_sum: Whether the last loss was a sum over the batch.
        joined: Of what the script made of several shares since one was drawn, by its rows: those of each share.
        flat: How many were drawn since as one row of several numbers per row, those of each side by side.
        single: Numbers drawn one by one since the last backward, by the script's line.
        reported: The calls that computed what was noted since the last backward, by what it is; None for one that
            is not recorded, or gives more than a number.
        numbered: Recorded calls that have counted a share's rows since the last backward.
        noted: Sums of what was computed of rows beside a loss's graph and is still to be compared, by what it is.
        lengths: How long rows were that a script's own collate function has padded, by the line that reads them.
        complete: Whether the loader that was read last gave all ranks the same rows, to evaluate by.
        divided: Whether a loader gave this rank its share of something.
        read_by: Why what was read was not divided, where a loader read it.
        compares: Whether what passes get is still to be compared over ranks.
        fingerprint: A number made of what the last pass got while it is; None before the first.
    """

    sizes: set[int] = field(default_factory=set)
    current: int = 0
    latest: int = 0
    time_first: bool = False
    shared_passes: int = 0
    alike_passes: int = 0
    backwards: int = 0
    drawn: int = 0
    loss_is_sum: bool = False
    joined: dict[int, tuple[int, ...]] = field(default_factory=dict)
    flat: set[int] = field(default_factory=set)
    single: dict[str, int] = field(default_factory=dict)
    reported: dict[str, list[Any]] = field(default_factory=dict)
    numbered: set[int] = field(default_factory=set)
    noted: dict[str, float] = field(default_factory=dict)
    lengths: dict[str, int] = field(default_factory=dict)
    complete: bool = False
    divided: bool = False
    read_by: str = ""
    compares: bool = True
    fingerprint: float | None = None

    def note(self, rows: int) -> None:
        """Note that a share has so many rows."""
        self.sizes.add(rows)
        self.latest = rows
        self.joined.clear()
        self.flat.clear()
        self.numbered.clear()
        self.complete = False
        self.drawn += 1
        self.divided = True

    def join(self, parts: Sequence[int]) -> None:
        """Note that shares of so many rows are one below the other in a tensor, such as two views of a batch."""
        if len(parts) > 1 and all(rows in self.sizes for rows in parts):
            self.joined[sum(parts)] = tuple(parts)

    def merge(self, shape: Sequence[int], rows: int) -> None:
        """Note that a tensor's first dimensions were put together to one of so many rows.

        Those of one row of the batch are side by side where its dimension is the first, and else in shares.
        """
        if rows in self.sizes or rows == shape[0] or not rows:
            return
        known = self.joined.get(shape[0], ()) if shape[0] not in self.sizes else ()
        parts = _merged(tuple(shape), rows, self.latest, self.current, known)
        if parts:
            self.joined[rows] = parts

    @contextmanager
    def keeping_joined(self) -> Iterator[None]:
        """Forget at the end what was joined meanwhile."""
        before = dict(self.joined)
        try:
            yield
        finally:
            self.joined = before

    def parts_of(self, rows: int) -> tuple[int, ...]:
        """Return of how many rows each are the shares that so many rows are of."""
        return (rows,) if rows in self.sizes else self.joined.get(rows, (rows,))

    def may_have_rows(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor may be of this rank's rows, by its size."""
        return tensor.dim() > 0 and tensor.shape[0] in self.sizes

    def enter(self, given: Iterable[Any]) -> None:
        """Note what a model's pass in training mode was given, tensors of any shape among it.

        A pass without gradients, such as a teacher's, belongs to no backward.
        """
        tensors = list(tensors_held(tuple(given)))
        self.current = next(filter(None, map(self._rows_of, tensors)), 0)
        if not torch.is_grad_enabled():
            return
        if self.compares and not self.divided and tensors:
            self.fingerprint = float(sum(map(_fingerprint, tensors)))
        if self.current:
            self.shared_passes += 1
        else:
            self.alike_passes += 1

    def _rows_of(self, tensor: torch.Tensor) -> int:
        """Return how many rows of a share a tensor has, 0 where it has none; note in which dimension they are.

        The second one is taken for rows in what has times first, (times, rows) of numbers of words or (times,
        rows, features), and for chance in (rows, features) or images of as many channels.
        """
        shape = tensor.shape
        by_time = len(shape) == 3 or (len(shape) == 2 and not tensor.is_floating_point())  # noqa: PLR2004
        first, second = (rows if rows in self.sizes else 0 for rows in (*shape[:2], 0, 0)[:2])
        second = second if by_time else 0
        if bool(first) != bool(second):
            self.time_first = not first
        return int(second if self.time_first and second else first)

    def dim_of_rows(self, shape: Sequence[int]) -> int | None:
        """Return which dimension of something drawn for the batch has this rank's rows; None where none has.

        Masks may have the time first, or the rows of all heads and positions together in one dimension. Where
        several dimensions could be the rows, the batch at hand counts before others, then what the pass got.
        """
        if shape[0] in self.joined and not self.time_first:
            return 0
        now = {self.current, self.latest} - {0}
        for sizes in (now, self.sizes):
            found = [dim for dim, rows in enumerate(shape[:2]) if rows in sizes and self._may_hold(dim, shape)]
            if found:
                return found[-1 if self.time_first else 0]
        return 0 if self.current and shape[0] and shape[0] % self.current == 0 else None

    def _may_hold(self, dim: int, shape: Sequence[int]) -> bool:
        """Return whether a dimension as long as a share has its rows, not as many features or positions by chance.

        (positions, features) have the rows first, and so have weights between positions, (heads, n, n).
        """
        square = len(shape) == 3 and shape[1] == shape[2] and shape[0] % shape[1] == 0  # noqa: PLR2004
        return dim == 0 or self.time_first or (len(shape) > 2 and not square)  # noqa: PLR2004

    def await_backward(self) -> bool:
        """Return whether a pass was made that no backward has followed."""
        return bool(self.shared_passes or self.alike_passes)

    def leave(self) -> None:
        """Note that a backward has begun, which the passes so far belong to."""
        self.shared_passes = self.alike_passes = 0
        self.backwards += 1


@lru_cache(maxsize=4096)  # models come here with the same shapes in every pass
def _merged(
    shape: tuple[int, ...], rows: int, latest: int, current: int, known: tuple[int, ...]
) -> tuple[int, ...]:
    """Return of how many rows each are the shares in a dimension that several were merged to; () for none."""
    merged = next((end for end in range(2, len(shape) + 1) if math.prod(shape[:end]) == rows), 0)
    if merged and known:
        return tuple(part * (rows // shape[0]) for part in known)
    at = next((dim for dim in range(merged) if shape[dim] in (latest, current) and shape[dim]), None)
    if at is None:
        return ()
    shares = math.prod(shape[:at])
    return (rows // shares,) * shares


def _fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    """Return a sum over a tensor in which each place has a weight of its own: sums of few words are soon alike."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        return tensor.detach().double().sum()
    values = tensor.detach().double().flatten()
    return values @ torch.arange(1, len(values) + 1, dtype=torch.float64, device=values.device).sqrt()
