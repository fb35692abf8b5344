"""The blocks of a model on pieces of its sequences: cut where the first begins, joined where the last ends."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode

from fsdplaunch.config.schema.kinds import SequenceAttentionName
from fsdplaunch.errors import ShardingError
from fsdplaunch.runtime.inspection import unwrapped
from fsdplaunch.runtime.messages import script_line
from fsdplaunch.runtime.sharding.registry import registered
from fsdplaunch.runtime.sharding.wrap import class_name, find_blocks
from fsdplaunch.runtime.split.ring import ring_attention
from fsdplaunch.runtime.split_checks import FirstPass, check_first_inputs, draw_alike
from fsdplaunch.runtime.torch_internals.modules import untraced


def check_length(length: int, ranks: int) -> None:
    """Check that ranks can split sequences of a length.

    One position a rank is not enough: models of transformers take a query of one for a step of generation, and
    leave out that attention is causal.
    """
    if length % ranks:
        msg = f"{script_line()}: sequences of {length} cannot be divided by {ranks} ranks (cp_size)"
        raise ShardingError(msg, hint=f"use lengths that {ranks} divides: pad, or split the data differently")
    if length == ranks:
        msg = f"{script_line()}: sequences of {length} leave one position to each of {ranks} ranks (cp_size)"
        raise ShardingError(msg, hint="use longer ones: pad, or split the data differently")


def own_piece(tensor: torch.Tensor, axis: DeviceMesh, dim: int) -> torch.Tensor:
    """Return this rank's piece, along a dimension, of what all ranks have equally."""
    return tensor.chunk(axis.size(), dim)[axis.get_local_rank()]


class _Joined(torch.autograd.Function):
    """The ranks' pieces along a dimension as one tensor, of which all ranks compute the same afterwards.

    Each rank's gradient is that of its piece, times the number of ranks: FSDP averages over them, while their
    gradients are summands.
    """

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, axis: DeviceMesh, dim: int) -> torch.Tensor:
        ctx.axis, ctx.dim = axis, dim
        pieces = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(axis.size())]
        dist.all_gather(pieces, tensor.contiguous(), group=axis.get_group())
        return torch.cat(pieces, dim)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return own_piece(gradient, ctx.axis, ctx.dim) * ctx.axis.size(), None, None


class _Exchanged(torch.autograd.Function):
    """A tensor that was in pieces along `join`, joined there and in pieces along `split` instead."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, axis: DeviceMesh, split: int, join: int) -> torch.Tensor:
        ctx.axis, ctx.split, ctx.join = axis, split, join
        mine = torch.stack(tensor.chunk(axis.size(), split))
        theirs = torch.empty_like(mine)  # what each rank has of this one's piece
        dist.all_to_all_single(theirs, mine, group=axis.get_group())
        return torch.cat(theirs.unbind(), join)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        back = _Exchanged.apply(gradient, ctx.axis, ctx.join, ctx.split)  # type: ignore[no-untyped-call]
        return back, None, None, None  # by apply, so that the gradient has a gradient


_HEADS, _POSITIONS, _DIMENSIONS = 1, 2, 4
_ATTENTION = nn.functional.scaled_dot_product_attention
_MODULES = nn.functional.multi_head_attention_forward
"""What nn.MultiheadAttention calls, and by it nn.TransformerEncoderLayer."""


class SplitAttention(TorchFunctionMode):
    """While this is active, scaled_dot_product_attention is over the positions of all ranks."""

    def __init__(self, axis: DeviceMesh, way: SequenceAttentionName) -> None:
        super().__init__()
        self.attend = partial(attend, axis, way)

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _ATTENTION:
            return self.attend(*args, **(kwargs or {}))
        if func is not _MODULES:
            return func(*args, **(kwargs or {}))
        nn.functional.scaled_dot_product_attention = self.attend  # no mode is active inside of this one
        try:
            return func(*args, **(kwargs or {}))
        finally:
            nn.functional.scaled_dot_product_attention = _ATTENTION


def attend(
    axis: DeviceMesh,
    way: SequenceAttentionName,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **kwargs: Any,
) -> torch.Tensor:
    """Return scaled_dot_product_attention of this rank's positions with all, the mask being that of all.

    By `heads`, by `ring`, or `auto`: by heads where the ranks divide them.

    Raises:
        ShardingError: The tensors have other dimensions, the mask is not that of all positions, there is one or
            dropout in a ring, or the heads cannot be divided as configured.
    """
    if query.dim() != _DIMENSIONS:
        msg = f"{script_line()}: attention over {query.dim()} dimensions cannot be split (cp_size)"
        raise ShardingError(msg, hint="let it be batch x heads x positions x width, or leave cp_size out")
    rows, keys = axis.size() * query.size(_POSITIONS), axis.size() * key.size(_POSITIONS)
    if attn_mask is not None and (
        attn_mask.dim() < _POSITIONS or attn_mask.size(-2) not in (1, rows) or attn_mask.size(-1) not in (1, keys)
    ):
        wanted = f"that of all {rows} x {keys} positions (cp_size)"
        msg = f"{script_line()}: a mask of {tuple(attn_mask.shape)} is not {wanted}"
        raise ShardingError(msg, hint="give attention a mask of full sequences, or is_causal")
    heads, divides = query.size(_HEADS), query.size(_HEADS) % axis.size() == 0
    if way == "ring" or (way == "auto" and not divides):
        if attn_mask is not None or dropout_p:
            what = "a mask" if attn_mask is not None else "dropout"
            msg = f"{script_line()}: attention with {what} is not possible as ring attention (cp_size)"
            raise ShardingError(msg, hint=f"use a cp_size that divides the {heads} heads, or is_causal")
        scale = kwargs.get("scale")
        scale = query.size(-1) ** -0.5 if scale is None else scale
        return ring_attention(axis, query, key, value, is_causal=is_causal, scale=scale)
    if not divides:
        msg = f"{script_line()}: {heads} attention heads cannot be divided by {axis.size()} ranks (cp_size)"
        raise ShardingError(msg, hint="set sharding.context_parallel_attention: auto, or another cp_size")
    if attn_mask is not None and attn_mask.dim() == _DIMENSIONS and attn_mask.size(_HEADS) != 1:
        attn_mask = own_piece(attn_mask, axis, _HEADS)
    return _own_heads(axis, query, key, value, attn_mask, dropout_p, is_causal, **kwargs)


def _own_heads(
    axis: DeviceMesh, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
) -> torch.Tensor:
    groups = query.size(_HEADS) // key.size(_HEADS)
    if key.size(_HEADS) % axis.size():  # too few heads of keys and values to divide: one for each query's
        key, value = (each.repeat_interleave(groups, _HEADS) for each in (key, value))
        kwargs.pop("enable_gqa", None)
    exchange: Callable[..., torch.Tensor] = _Exchanged.apply
    query, key, value = (exchange(each, axis, _HEADS, _POSITIONS) for each in (query, key, value))
    mixed = _ATTENTION(query, key, value, *args, **kwargs)
    return exchange(mixed, axis, _POSITIONS, _HEADS)


SEQUENCE = 1
"""The dimension of positions in what goes through blocks."""


@dataclass(slots=True, kw_only=True)
class SplitSequences:
    """How a model's sequences are split now."""

    axis: DeviceMesh  # the ranks that split them
    way: SequenceAttentionName = "auto"  # how attention sees the other ranks' pieces, as configured
    # whether they are, in the present pass: passes without gradients compute full sequences on every rank
    now: bool = False
    gives_pieces: bool = False  # whether the script gives the model pieces
    has_pieces: bool = False  # whether it gave the present pass pieces
    # both of the last pass with gradients, whose blocks backward may compute again
    in_training: tuple[bool, bool] = (False, False)

    def begin_pass(self) -> None:
        """Decide what a pass of the model splits: one with gradients does, and one that is given pieces."""
        self.has_pieces = self.gives_pieces
        self.now = self.has_pieces or torch.is_grad_enabled()
        if torch.is_grad_enabled():
            self.in_training = (self.now, self.has_pieces)

    def end_pass(self) -> None:
        """Leave what the last pass with gradients split: an evaluation may stand between it and its backward."""
        self.now, self.has_pieces = self.in_training


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
        own = self.inner or partial(type(self.block).forward, self.block)
        if sequences is None or not sequences.now:
            return own(*args, **kwargs)
        if not sequences.has_pieces:
            full = self._positions(args, kwargs) * (1 if self.first else sequences.axis.size())
            args, kwargs = _cut(args, full, sequences.axis), _cut(kwargs, full, sequences.axis)
        with SplitAttention(sequences.axis, sequences.way):
            output = own(*args, **kwargs)
        if sequences.has_pieces or not self.last:
            return output
        join: Callable[..., torch.Tensor] = _Joined.apply
        return _mapped(output, lambda each: join(each, sequences.axis, SEQUENCE))

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
        if self.first and self.sequences is not None:
            check_length(hidden.size(SEQUENCE), self.sequences.axis.size())
        return hidden.size(SEQUENCE)


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


def split_blocks(
    model: nn.Module, classes: tuple[str, ...], axis: DeviceMesh, way: SequenceAttentionName
) -> SplitSequences:
    """Give a model's blocks forwards that compute on pieces of the sequences, from the first training pass on.

    Blocks are those of the configured classes, or found.
    """
    sequences = SplitSequences(axis=axis, way=way)
    named = find_blocks(model, classes)
    # Encoders of transformers name an embedding as one, too: numbered ones come first, and none without children.
    numbered = [block for name, block in named.items() if name.rpartition(".")[2].isdecimal()]
    found = [unwrapped(block) for block in numbered or named.values()]
    blocks = [block for block in found if any(True for _ in block.children())]
    if not blocks:
        msg = f"{class_name(model)} has no blocks in which sequences could be split (cp_size)"
        raise ShardingError(msg, hint="name them in fsdp_transformer_layer_cls_to_wrap, or leave cp_size out")
    for number, block in enumerate(blocks):
        last = number == len(blocks) - 1
        block.__dict__["forward"] = BlockForward(block, sequences, first=number == 0, last=last)
    return sequences


def compare_first_pass(
    model: nn.Module, sequences: SplitSequences, device: torch.device, computes_in: torch.dtype | None
) -> None:
    """Split sequences in each pass with gradients; compare the first one with a pass that splits nothing.

    The hook that begins a pass must come before those of sharding.
    """
    draw_alike(sequences.axis)

    def choose(split: bool) -> None:
        sequences.now = split

    hint = (
        "its blocks must mix positions by scaled_dot_product_attention only, which transformers calls"
        ' attn_implementation="sdpa", and take positions as an input'
    )
    first = FirstPass("split sequences (cp_size)", hint, choose, computes_in)

    def begin(module: nn.Module, args: Any, kwargs: Any) -> None:
        if first.running:
            return
        if not sequences.gives_pieces:
            first.compare(module, args, kwargs)
        sequences.begin_pass()

    def end(_module: nn.Module, _inputs: Any, _output: Any) -> None:
        sequences.end_pass()

    model.register_forward_hook(untraced(end), always_call=True)
    model.register_forward_pre_hook(untraced(begin), prepend=True, with_kwargs=True)
    check_first_inputs(
        model, sequences.axis, device, "split sequences together (cp_size)", unless=lambda: sequences.gives_pieces
    )


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
