"""Count the rows and tokens that a script's data loaders give it."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from fsdplaunch.runtime.torch_internals.data_loaders import watch_batches

_SEQUENCES = 2
"""Dimensions of a batch of token numbers: rows, and tokens in each."""


class BatchCount:
    """What loaders have given since the process began.

    Attributes:
        rows: Of all batches.
        tokens: Of batches of token numbers.
        shape: Rows and tokens per row of the last batch of token numbers; None without one.
    """

    def __init__(self) -> None:
        self.rows = 0
        self.tokens = 0
        self.shape: tuple[int, int] | None = None

    def install(self) -> None:
        """Begin to count, until the process ends."""
        watch_batches(self.count)

    def count(self, batch: Any) -> None:
        """Count one batch by its first tensor; of a mapping, by `input_ids` where it has them."""
        tensor = first_tensor(batch)
        if tensor is None or not tensor.dim():
            return
        self.rows += tensor.shape[0]
        if tensor.dim() == _SEQUENCES and not tensor.is_floating_point():
            self.tokens += tensor.numel()
            self.shape = (tensor.shape[0], tensor.shape[1])


def first_tensor(batch: Any) -> torch.Tensor | None:
    """Return the first tensor in nested lists and mappings, `input_ids` before others; None without one."""
    if isinstance(batch, torch.Tensor):
        return batch
    parts: Iterable[Any] = ()
    if isinstance(batch, Mapping):
        parts = [batch["input_ids"]] if "input_ids" in batch else batch.values()
    elif isinstance(batch, list | tuple):
        parts = batch
    return next((found for part in parts if (found := first_tensor(part)) is not None), None)
