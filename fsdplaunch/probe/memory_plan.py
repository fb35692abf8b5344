"""How much memory each GPU needs for a model under a way of sharding it: arithmetic on a few numbers.

Exact for what is kept (parameters, gradients, Adam's two moments); for what is gathered it counts the blocks that
FSDP holds at once. Activations depend on batch and sequence length and are not in it.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from fsdplaunch.errors import UsageError
from fsdplaunch.probe.model_files import ModelFacts

ITEMSIZES: Mapping[str, int] = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
"""Bytes per element of each dtype."""
STATES: Mapping[str, int] = {
    "adamw": 2, "adam": 2, "nadam": 2, "adagrad": 1, "rmsprop": 1, "momentum": 1, "sgd": 0,
}  # fmt: skip
"""Tensors that each optimizer keeps per parameter, of the parameter's own size."""
_BLOCKS_AT_ONCE = 3  # the block that computes, the one gathered ahead of it, and the first one's whole gradient


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """A way to shard, as far as memory depends on it."""

    ranks: int  # ranks that one replica of the model is sharded over
    compute: str = "no"  # value of mixed_precision: no, bf16, fp16 or fp8
    reshard: bool = True  # whether gathered blocks are freed after forward
    offload: bool = False  # whether what is kept lives in host memory


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Bytes each rank needs before activations."""

    gpu: int  # on the GPU
    host: int  # in host memory: what is kept, where it is offloaded


def kept_bytes(elements: int, itemsize: int, optimizer: str = "adamw") -> dict[str, int]:
    """Return the bytes that a rank keeps of its share of the parameters, by what they are for."""
    held = elements * itemsize
    return {"parameters": held, "gradients": held, "optimizer": held * STATES[optimizer]}


def plan_memory(model: ModelFacts, sharding: Sharding) -> MemoryPlan:
    """Return what each rank needs for training with Adam."""
    if model.parameters is None:
        msg = "the number of parameters is not known"
        raise UsageError(msg, hint="give it, for example --params 8b")
    own = ITEMSIZES.get(model.dtype or "fp32", ITEMSIZES["fp32"])
    master = own if sharding.compute == "no" else ITEMSIZES["fp32"]
    compute = own if sharding.compute == "no" else 2  # fp8 gathers bf16
    share = -(-model.parameters // sharding.ranks)
    kept = sum(kept_bytes(share, master).values())
    at_once = min(model.parameters, _BLOCKS_AT_ONCE * model.unit + model.outside)
    gathered = (at_once if sharding.reshard else model.parameters + model.unit) * compute
    return MemoryPlan(gpu=gathered + (0 if sharding.offload else kept), host=kept if sharding.offload else 0)
