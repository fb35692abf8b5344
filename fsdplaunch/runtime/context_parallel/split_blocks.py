"""The blocks of a model on pieces of its sequences: cut where the first begins, joined where the last ends."""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdplaunch.config.schema.kinds import SequenceAttentionName
from fsdplaunch.errors import ShardingError
from fsdplaunch.runtime.context_parallel.attention import SplitAttention
from fsdplaunch.runtime.context_parallel.exchanges import check_length, joined, own_piece
from fsdplaunch.runtime.script_line import script_line

SEQUENCE = 1
"""The dimension of positions in what goes through blocks."""


@dataclass(slots=True, kw_only=True)
class SplitSequences:
    """How a model's sequences are split now.

    Attributes:
        axis: The ranks that split them.
        way: How attention sees the other ranks' pieces, as configured.
        now: Whether they are, in the present pass: passes without gradients compute full sequences on every rank.
        gives_pieces: Whether the script gives the model pieces.
        has_pieces: Whether it gave the present pass pieces.
        in_training: Both of the last pass with gradients, whose blocks backward may compute again.
    """

    axis: DeviceMesh
    way: SequenceAttentionName = "auto"
    now: bool = False
    gives_pieces: bool = False
    has_pieces: bool = False
    in_training: tuple[bool, bool] = (False, False)

    def begin_pass(self, *, trains: bool) -> None:
        """Decide what a pass of the model splits.

        Args:
            trains: Whether it is one with gradients.
        """
        self.has_pieces = self.gives_pieces
        self.now = self.has_pieces or trains
        if trains:
            self.in_training = (self.now, self.has_pieces)

    def end_pass(self) -> None:
        """Leave what the last pass with gradients split: an evaluation may stand between it and its backward."""
        self.now, self.has_pieces = self.in_training

    def attention(self) -> AbstractContextManager[Any]:
        """Return what must be active while a block computes."""
        return SplitAttention(self.axis, self.way) if self.now else nullcontext()


class BlockForward:
    """A block's forward. That of a copy of the block is the block's own."""

    def __init__(self, block: nn.Module, sequences: SplitSequences | None, *, first: bool, last: bool) -> None:
        self.block = block
        self.inner = block.__dict__.get("forward")  # of a block that holds split parameters itself
        self.sequences = sequences
        self.first = first
        self.last = last

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the block's output, of this rank's positions; the last block's of all."""
        sequences = self.sequences
        if sequences is None or not sequences.now:
            return self._own(*args, **kwargs)
        if sequences.has_pieces:
            with sequences.attention():
                return self._own(*args, **kwargs)
        full = self._positions(args, kwargs) * (1 if self.first else sequences.axis.size())
        args, kwargs = _cut(args, full, sequences.axis), _cut(kwargs, full, sequences.axis)
        with sequences.attention():
            output = self._own(*args, **kwargs)
        return _mapped(output, lambda each: joined(each, sequences.axis, SEQUENCE)) if self.last else output

    def _own(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs) if self.inner else type(self.block).forward(self.block, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> "BlockForward":
        """Return the forward of a copy of the block, which other ranks may not have."""
        made = BlockForward(copy.deepcopy(self.block, memo), None, first=self.first, last=self.last)
        made.inner = copy.deepcopy(self.inner, memo)
        return made

    def _positions(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """Return the length of the sequences that the block is given: of its first input."""
        inputs = (*args, *kwargs.values())
        tensors = (each for each in inputs if isinstance(each, torch.Tensor) and each.is_floating_point())
        hidden = next((each for each in tensors if each.dim() > SEQUENCE), None)
        if hidden is None:
            msg = f"{script_line()}: {type(self.block).__name__} is given no sequence that could be split"
            raise ShardingError(msg, hint="leave cp_size out")
        length, ranks = hidden.size(SEQUENCE), self.sequences.axis.size() if self.sequences else 1
        if self.first:
            check_length(length, ranks)
        return length


def _cut(value: Any, length: int, axis: DeviceMesh) -> Any:
    """Return arguments with this rank's piece of each tensor that has one entry per position in the second place.

    Masks that say something of pairs of positions stay as they are: attention sees all positions.
    """

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        of_pairs = tensor.shape == (length, length) and tensor.is_floating_point()
        return own_piece(tensor, axis, SEQUENCE) if tensor.size(SEQUENCE) == length and not of_pairs else tensor

    return _mapped(value, cut)


def _mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a value with the tensors in it changed that may have positions: two dimensions or more, no flags."""
    if isinstance(value, torch.Tensor):
        return change(value) if value.dim() > SEQUENCE and value.dtype != torch.bool else value
    if (isinstance(value, tuple) and type(value) is tuple) or isinstance(value, list):
        return type(value)(_mapped(item, change) for item in value)
    if isinstance(value, dict) and type(value) is dict:
        return {name: _mapped(item, change) for name, item in value.items()}
    return value
