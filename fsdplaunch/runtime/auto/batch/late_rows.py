"""Outputs of a divided pass that are gathered where the script first looks at them, if it does.

A model that returns its loss returns its logits as well, and a cache; most scripts look at the loss alone.
"""

from typing import Any

import torch

from fsdplaunch.runtime.auto.batch.rank_rows import RankRows
from fsdplaunch.runtime.torch_internals.tensors import (
    computing_as_plain_tensors,
    metadata_getters,
    tree_map,
    wrapper_tensor,
)


class LateRows(torch.Tensor):
    """Stands for the rows of all ranks; whatever computes with it computes with them. Collective where it does.

    Use `LateRows.of`.
    """

    own: torch.Tensor
    rows: RankRows
    dim_of_rows: int
    whole: torch.Tensor | None

    @staticmethod
    def of(own: torch.Tensor, rows: RankRows, dim: int) -> "LateRows":
        """Return what stands for the rows of all ranks.

        Args:
            own: This rank's.
            rows: Of the pass.
            dim: Which dimension they are.
        """
        shape = list(own.shape)
        shape[dim] *= rows.ranks
        late = wrapper_tensor(LateRows, own, shape)
        late.own, late.rows, late.dim_of_rows, late.whole = own, rows, dim, None
        return late  # type: ignore[no-any-return]

    def gathered(self) -> torch.Tensor:
        """Return the rows of all ranks. Collective at the first call."""
        if self.whole is None:
            with torch.set_grad_enabled(self.own.requires_grad):
                self.whole = self.rows.gather(self.own, self.dim_of_rows)
        return self.whole

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute with the rows of all ranks."""
        if func in metadata_getters():
            with computing_as_plain_tensors():
                return func(*args, **(kwargs or {}))
        args, kwargs = tree_map(_gathered, (args, kwargs or {}))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Compute with the rows of all ranks inside of a function of autograd's, too."""
        args, kwargs = tree_map(_gathered, (args, kwargs or {}))
        return func(*args, **kwargs)


def _gathered(value: Any) -> Any:
    return value.gathered() if isinstance(value, LateRows) else value
