"""Split a model's sequences in its passes with gradients, after a first pass that shows that it can be done."""

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdplaunch.errors import ShardingError
from fsdplaunch.runtime.auto.script_line import script_line
from fsdplaunch.runtime.context_parallel.split_blocks import BlockForward, SplitSequences
from fsdplaunch.runtime.inspection.parameter_names import unwrapped
from fsdplaunch.runtime.sharding.blocks import class_name, find_blocks
from fsdplaunch.runtime.tensor_parallel.same_inputs import check_first_inputs, draw_alike

_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6}
_LOW_PRECISION = 0.1


def split_blocks(model: nn.Module, classes: tuple[str, ...], axis: DeviceMesh) -> SplitSequences:
    """Give a model's blocks forwards that compute on pieces of the sequences, from the first training pass on.

    Args:
        model: Not sharded yet.
        classes: Names of the block classes, where they are configured.
        axis: The ranks that split sequences.

    Raises:
        ShardingError: The model has no blocks.
    """
    sequences = SplitSequences(axis=axis)
    found = [unwrapped(block) for block in find_blocks(model, classes).values()]
    blocks = [block for block in found if any(True for _ in block.children())]  # embeddings side by side are none
    if not blocks:
        msg = f"{class_name(model)} has no blocks inside of which sequences could be split (cp_size)"
        raise ShardingError(msg, hint="name them in fsdp_transformer_layer_cls_to_wrap, or leave cp_size out")
    for number, block in enumerate(blocks):
        last = number == len(blocks) - 1
        block.__dict__["forward"] = BlockForward(block, sequences, first=number == 0, last=last)
    return sequences


def compare_first_pass(model: nn.Module, sequences: SplitSequences, device: torch.device) -> None:
    """Split sequences in each pass with gradients; compare the first one with a pass that splits nothing.

    Args:
        model: Sharded; the hook that begins a pass must come before those of sharding.
        sequences: Of its blocks.
        device: Where this worker computes.
    """
    draw_alike(sequences.axis)
    state = {"compares": False, "compared": False}

    def begin(module: nn.Module, args: Any, kwargs: Any) -> None:
        if state["compares"]:
            return
        sequences.has_pieces = sequences.gives_pieces
        if sequences.has_pieces:
            sequences.now = True
            return
        if torch.is_grad_enabled() and not state["compared"]:
            state.update(compares=True, compared=True)
            try:
                _check_same(module, sequences, args, kwargs)
            finally:
                state["compares"] = False
        sequences.now = torch.is_grad_enabled()

    model.register_forward_pre_hook(begin, prepend=True, with_kwargs=True)
    check_first_inputs(
        model, sequences.axis, device, "split sequences together (cp_size)", unless=lambda: sequences.gives_pieces
    )


@torch.no_grad()
def _check_same(model: nn.Module, sequences: SplitSequences, args: Any, kwargs: Any) -> None:
    """Check that a model computes the same with split sequences, without dropout and gradients.

    Raises:
        ShardingError: It does not: it mixes positions by other means than attention, or counts them in its blocks.
    """
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # it would not call attention by its name
    try:
        sequences.now = False
        full = _activations(model(*args, **kwargs))
        sequences.now = True
        split = _activations(model(*args, **kwargs))
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        for module in training:
            module.training = True
    if len(full) != len(split) or any(map(_differ, full, split)):
        msg = (
            f"{script_line()}: {class_name(model)} computes something else when its sequences are split (cp_size)"
        )
        hint = "its blocks must mix positions by scaled_dot_product_attention only, and take positions as an input"
        raise ShardingError(msg, hint=hint)


def _differ(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape:
        return True
    tolerance = _TOLERANCE.get(one.dtype, _LOW_PRECISION)
    distance = (one.double() - other.double()).norm()
    return bool(distance > tolerance * one.double().norm())


def _activations(value: Any) -> list[torch.Tensor]:
    """Return the activations in a model's output."""
    if isinstance(value, torch.Tensor):
        return [value] if value.is_floating_point() else []
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return []
    return [tensor for item in value for tensor in _activations(item)]
