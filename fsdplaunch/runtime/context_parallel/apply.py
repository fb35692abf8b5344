"""Split a model's sequences in its passes with gradients, after a first pass that shows that it can be done."""

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdplaunch.config.schema.kinds import SequenceAttentionName
from fsdplaunch.errors import ShardingError
from fsdplaunch.runtime.context_parallel.split_blocks import BlockForward, SplitSequences
from fsdplaunch.runtime.inspection.parameter_names import unwrapped
from fsdplaunch.runtime.sharding.blocks import class_name, find_blocks
from fsdplaunch.runtime.tensor_parallel.compare_passes import FirstPass
from fsdplaunch.runtime.tensor_parallel.same_inputs import check_first_inputs, draw_alike
from fsdplaunch.runtime.torch_internals.wrappers import untraced


def split_blocks(
    model: nn.Module, classes: tuple[str, ...], axis: DeviceMesh, way: SequenceAttentionName
) -> SplitSequences:
    """Give a model's blocks forwards that compute on pieces of the sequences, from the first training pass on.

    Args:
        model: Not sharded yet.
        classes: Names of the block classes, where they are configured.
        axis: The ranks that split sequences.
        way: How attention sees the other ranks' pieces, as configured.

    Raises:
        ShardingError: The model has no blocks.
    """
    sequences = SplitSequences(axis=axis, way=way)
    found = [unwrapped(block) for block in _in_lists(find_blocks(model, classes))]
    blocks = [block for block in found if any(True for _ in block.children())]  # embeddings side by side are none
    if not blocks:
        msg = f"{class_name(model)} has no blocks inside of which sequences could be split (cp_size)"
        raise ShardingError(msg, hint="name them in fsdp_transformer_layer_cls_to_wrap, or leave cp_size out")
    for number, block in enumerate(blocks):
        last = number == len(blocks) - 1
        block.__dict__["forward"] = BlockForward(block, sequences, first=number == 0, last=last)
    return sequences


def _in_lists(blocks: dict[str, nn.Module]) -> list[nn.Module]:
    """Return the blocks that are numbered, if any are: encoders of transformers name an embedding as one, too."""
    numbered = [block for name, block in blocks.items() if name.rpartition(".")[2].isdecimal()]
    return numbered or list(blocks.values())


def compare_first_pass(
    model: nn.Module, sequences: SplitSequences, device: torch.device, computes_in: torch.dtype | None
) -> None:
    """Split sequences in each pass with gradients; compare the first one with a pass that splits nothing.

    Args:
        model: Sharded; the hook that begins a pass must come before those of sharding.
        sequences: Of its blocks.
        device: Where this worker computes.
        computes_in: The dtype that sharding gathers parameters in; None for their own.
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
        sequences.begin_pass(trains=torch.is_grad_enabled())

    def end(_module: nn.Module, _inputs: Any, _output: Any) -> None:
        sequences.end_pass()

    model.register_forward_hook(untraced(end), always_call=True)
    model.register_forward_pre_hook(untraced(begin), prepend=True, with_kwargs=True)
    check_first_inputs(
        model, sequences.axis, device, "split sequences together (cp_size)", unless=lambda: sequences.gives_pieces
    )
