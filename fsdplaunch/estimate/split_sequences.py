"""Attention over split sequences, as far as memory and communication depend on it: by heads, or in a ring."""

from fsdplaunch.estimate.families.parts import ActivationShape
from fsdplaunch.estimate.training_setup import TrainingSetup

FP32 = 4
_AT_ONCE_BY_HEADS, _AT_ONCE_IN_RING = 8, 6
"""Tensors of the size of queries that backward has at a time beside what is kept: counted by torch's profiler."""


def goes_in_ring(shape: ActivationShape, setup: TrainingSetup) -> bool:
    """Return whether keys and values go around, as attention decides when it meets the heads."""
    if setup.context == 1 or setup.attention == "heads":
        return False
    return setup.attention == "ring" or _heads(shape, setup) % setup.context > 0


def divides_heads(shape: ActivationShape, setup: TrainingSetup) -> bool:
    """Return whether the heads can be divided among the ranks as configured; a ring needs nothing of them."""
    return setup.attention != "heads" or _heads(shape, setup) % setup.context == 0


def kept_per_token(shape: ActivationShape, setup: TrainingSetup, width: int) -> int:
    """Return the bytes that a block keeps for one of a rank's tokens beside what an attention in one piece does.

    By heads the result is kept twice, as attention and as the layer after it see it, and too few heads of keys are
    repeated.

    Args:
        shape: What one rank has of the model's.
        setup: The run.
        width: Bytes per element of the computation.
    """
    if setup.context == 1 or goes_in_ring(shape, setup):
        return 0
    return width * (shape.heads + 2 * (_exchanged_keys(shape, setup) - shape.keys))


def attention_at_once(shape: ActivationShape, setup: TrainingSetup, width: int) -> int:
    """Return the bytes that backward of one attention has at a time beside what is kept.

    Args:
        shape: What one rank has of the model's.
        setup: The run.
        width: Bytes per element of the computation.
    """
    if setup.context == 1:
        return 0
    inside = setup.tokens // setup.context
    if not goes_in_ring(shape, setup):
        return inside * _AT_ONCE_BY_HEADS * shape.heads * width
    repeated = 2 * shape.heads if shape.keys < shape.heads else 0
    messages = 2 * shape.keys * (1 if setup.context == 2 else 2)  # noqa: PLR2004  (the next one travels)
    in_width = _AT_ONCE_IN_RING * shape.heads + repeated + messages
    in_fp32 = shape.heads + 2 * (2 * shape.keys)  # what is added up, and what travels of it
    return inside * (in_width * width + in_fp32 * max(width, FP32))


def sent_bytes(shape: ActivationShape, setup: TrainingSetup, width: int) -> int:
    """Return the bytes that one rank sends in a step for attention, forward and backward of all blocks.

    Args:
        shape: The model's.
        setup: The run.
        width: Bytes per element of the computation.
    """
    tokens, others = setup.tokens // setup.context, setup.context - 1
    passes = 3 if setup.checkpointing else 2
    heads, keys = shape.heads // setup.tensor, shape.keys // setup.tensor
    if goes_in_ring(shape, setup):
        gradients = setup.context * max(width, FP32)
        return shape.layers * tokens * 2 * keys * (passes * others * width + gradients)
    elements = 2 * (heads + _exchanged_keys(shape, setup) // setup.tensor)
    return shape.layers * tokens * passes * elements * width * others // setup.context


def _heads(shape: ActivationShape, setup: TrainingSetup) -> int:
    return shape.head_count // setup.tensor


def _exchanged_keys(shape: ActivationShape, setup: TrainingSetup) -> int:
    """Return the elements of a token's keys as ranks exchange them: those of queries where they are repeated."""
    count = shape.keys * _heads(shape, setup) // shape.heads
    return shape.keys if goes_in_ring(shape, setup) or count % setup.context == 0 else shape.heads
