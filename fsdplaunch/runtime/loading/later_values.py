"""Shard a model whose values a state dict brings later: what cannot be made now stays on the meta device."""

from typing import Any

import torch
from torch import nn

from fsdplaunch.runtime.inspection.model_tensors import ModelTensor
from fsdplaunch.runtime.sharding.materialize import Materializer
from fsdplaunch.runtime.sharding.settings import Settings


class LaterValues(Materializer):
    """Materializes what a rank has values of, or a module can initialise, and leaves the rest without storage."""

    def __init__(self, model: nn.Module, *, settings: Settings, **arguments: Any) -> None:
        del settings  # what other materializers of values that come later need
        super().__init__(model, **arguments)

    def leave_empty(self, entry: ModelTensor) -> None:
        """Put a tensor that nothing has given values back on the meta device."""
        shape, dtype, _ = self.sources[entry.name]
        entry.exchange(torch.empty(shape, dtype=dtype, device="meta"))
