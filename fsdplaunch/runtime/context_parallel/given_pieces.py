"""`context_parallel`: a script that splits its sequences itself, embedding, output layer and loss among them."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from fsdplaunch.errors import ShardingError
from fsdplaunch.runtime.context_parallel.exchanges import check_length, own_piece
from fsdplaunch.runtime.sharding.blocks import class_name
from fsdplaunch.runtime.sharding.registry import registered


@contextmanager
def context_parallel(model: nn.Module, *tensors: torch.Tensor, dim: int = 1) -> Iterator[tuple[torch.Tensor, ...]]:
    """Split sequences over the ranks of `parallelism_config_cp_size`, for passes of a model inside of the block.

    All of the model computes on pieces then, with attention over full sequences; so does the loss, and logits take
    as much less memory as activations. Give everything that has one entry per position: token ids, labels that are
    shifted already, and positions, which a model cannot count itself. The mean loss of each rank is that of its
    piece: gradients are averaged over ranks, which is the mean of all where every piece has as many labels.

    Args:
        model: What `prepare` returned.
        tensors: The same on all ranks of a group.
        dim: Their dimension of positions.

    Yields:
        This rank's pieces of the tensors; all of them where `cp_size` is 1.

    Raises:
        ShardingError: The model is not prepared, or the ranks cannot split a tensor.
    """
    prepared = registered(model)
    if prepared is None:
        msg = f"this {class_name(model)} was not sharded by prepare"
        raise ShardingError(msg, hint="give context_parallel what fsdplaunch.prepare returns")
    sequences = prepared.sequences
    if sequences is None:
        yield tensors
        return
    ranks = sequences.axis.size()
    for tensor in tensors:
        check_length(tensor.size(dim), ranks)
    sequences.gives_pieces = True
    try:
        yield tuple(own_piece(tensor, sequences.axis, dim) for tensor in tensors)
    finally:
        sequences.gives_pieces = False
