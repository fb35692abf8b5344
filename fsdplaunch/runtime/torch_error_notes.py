"""Notes on errors of torch that say neither the cause nor the way out: parameters are full only in the model."""

from collections.abc import Iterator
from contextlib import contextmanager

from fsdplaunch.runtime.patch import MISSING_GRADIENTS_NOTE, call_if_imported

_TORCH_MESSAGES = (
    "got mixed torch.Tensor and DTensor",
    "does not have a sharding strategy registered",
    "Cannot flatten unevenly sharded tensor",
    "Attempted to flatten unevenly sharded dimension",
    "Sharding propagation failed for Op(",
    "would remove or reshape sharded dimension",
    "only accepts torch.Tensor but got <class 'torch.distributed.tensor.DTensor'>",
)
_NOTES = {
    "Invariant encountered: value was None": (
        "fsdplaunch: a unit was sharded inside another that was not called as a module, which happens when "
        "embeddings are units.\nName the model's block class: fsdp_transformer_layer_cls_to_wrap: BertLayer, for "
        "example"
    ),
    **dict.fromkeys(
        (
            "expected scalar type BFloat16 but found Float",
            "must have the same dtype, but got Float and BFloat16",
            "Input type (float) and bias type (c10::BFloat16)",
            "Input type (float) and weight type (c10::BFloat16)",
            "expected scalar type Float but found BFloat16",
            "mixed dtype (CPU): expect parameter to have scalar type of Float",
            "input dtype (torch.float32) does not match weight dtype (torch.bfloat16)",
        ),
        "fsdplaunch: an operation got bf16 and fp32 together: FSDP2 makes weights and inputs bf16; buffers, and "
        "inputs in objects of the script's own, stay fp32.\nSet mixed_precision: no, or convert what the "
        "operation is given (x.to(weight.dtype))",
    ),
    "RegisterPostBackwardFunction is a view and is being modified inplace": (
        "fsdplaunch: a sharded block changes its input in place, which FSDP2 does not allow.\nLet the block's "
        "first operation make a new tensor: inplace=False, F.relu(x) for F.relu_(x), x = x + y for x += y"
    ),
    "_chunk_cat expects non-empty tensor": (
        "fsdplaunch: a parameter without elements has a gradient, which FSDP2 cannot divide.\nLeave it out of the "
        "computation, or freeze it: requires_grad=False"
    ),
    "read-only": (
        "fsdplaunch: an array of a sharded parameter is a copy, and what is written into it would be lost.\n"
        "Change the copy, then write it back: p.data.copy_(torch.from_numpy(array))"
    ),
    "Found dtype Float but expected BFloat16": (
        "fsdplaunch: a loss got the model's output in bf16 and targets in fp32, for which this torch computes no "
        "gradient.\nSet precision.output: fp32 for outputs in fp32, or give both to the loss in one dtype"
    ),
}
"""What torch says about these names neither the cause nor the way out."""


@contextmanager
def explaining_mixtures() -> Iterator[None]:
    """Add a note to torch's error, below the traceback that names the script's line."""
    try:
        yield
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        if any(message in str(error) for message in _TORCH_MESSAGES):
            error.add_note(
                "fsdplaunch: a sharded parameter is a full tensor only while its model computes. Compute this in "
                "the model's forward or in a method of the model that gets its inputs as arguments,\nor shard "
                "explicitly in the script: model, optimizer = fsdplaunch.prepare(model, optimizer)"
            )
        for message, note in _NOTES.items():
            if message in str(error):
                error.add_note(note)
        if (note := call_if_imported(MISSING_GRADIENTS_NOTE, str(error))) is not None:
            error.add_note(note)
        raise
