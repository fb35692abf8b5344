"""What forward keeps for backward, in bytes: counted from what autograd saves in a transformer's block.

An approximation that holds for the families of `architecture`; the exact way is to trace the step.
"""

from dataclasses import dataclass, replace

from fsdplaunch.estimate.families.parts import ActivationShape
from fsdplaunch.estimate.split_sequences import FP32, attention_at_once, kept_per_token
from fsdplaunch.estimate.training_setup import TrainingSetup

_STEPS_OF_GELU = 5
"""Tensors that gelu written out (0.5 x (1 + tanh(...))) saves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Activations:
    """Bytes on one rank.

    Attributes:
        block: Kept by one block that is not checkpointed.
        kept: Kept by all blocks from forward to backward.
        logits: Output and loss, at the end of forward.
        loss: What the loss's backward adds to that.
        attention: What backward of a split attention has at a time, beside what is kept.
    """

    block: int
    kept: int
    logits: int
    loss: int
    attention: int = 0


def activations_of(shape: ActivationShape, setup: TrainingSetup, width: int) -> Activations:
    """Count activations.

    Args:
        shape: The model's.
        setup: Says batch, length, checkpointing, and how many ranks split layers and sequences.
        width: Bytes per element of the computation.
    """
    tokens, inside = setup.tokens, setup.tokens // setup.context
    split = replace(
        shape,
        heads=shape.heads // setup.tensor,
        keys=shape.keys // setup.tensor,
        ffn=shape.ffn // setup.tensor,
        eager=shape.eager // (setup.tensor * setup.context),
    )
    per_token = _per_token(split, width) + kept_per_token(split, setup, width)
    block = round(inside * per_token) + _weights(split, setup, width)
    entry = tokens * shape.hidden * width
    if not setup.checkpointing:
        kept = shape.layers * block
    else:
        kept = 0 if setup.checkpoint_offload else shape.layers * entry // setup.context
    scores = tokens * shape.vocab
    wide = FP32 if shape.upcasts else width  # the dtype that the loss is computed in
    capped = width if shape.capped else 0
    logits = scores * (width + wide + capped)
    return Activations(
        block=block,
        kept=kept + entry,
        logits=logits,
        loss=scores * 2 * wide,
        attention=attention_at_once(split, setup, width),
    )


def _per_token(shape: ActivationShape, width: int) -> float:
    h, q, kv = shape.hidden, shape.heads, shape.keys
    norm = (FP32 * h + width * h if width < FP32 else 2 * width * h) if shape.full_norm else width * h
    head_norm = (FP32 + width) * (q + kv) if width < FP32 else 2 * width * (q + kv)
    attention = width * (h + 2 * q + 2 * kv)
    if shape.relu:
        inside = shape.ffn  # relu keeps its result, which the next layer keeps anyway
    elif shape.gated:
        inside = 4 * shape.ffn
    else:
        inside = (_STEPS_OF_GELU if shape.composite else 2) * shape.ffn
    return (
        shape.norms * norm
        + (head_norm if shape.head_norms else 0)
        + attention * (1 + shape.cross / max(shape.layers, 1))
        + width * (h + inside)
        + shape.dropout * h * (width + 1)
    )


def _weights(shape: ActivationShape, setup: TrainingSetup, width: int) -> int:
    """Return the bytes of attention weights, where they are kept: scores, softmax, what dropout makes of it."""
    pairs = setup.batch_size * shape.eager * setup.length * setup.length
    each = FP32 + (width if width < FP32 else 0) + 2 * width if shape.capped else width + 2
    return round(pairs * each * (1 + shape.cross / max(shape.layers, 1)))
