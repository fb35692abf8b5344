"""Whether a model can be split as a plan says: kinds of layers, dimensions, attention heads."""

from typing import Any

import torch
from torch import nn

from fsdplaunch.errors import ShardingError
from fsdplaunch.probe.torch_version import parse
from fsdplaunch.runtime import messages
from fsdplaunch.runtime.inspection.parameter_names import joined
from fsdplaunch.runtime.sharding.blocks import class_name
from fsdplaunch.runtime.tensor_parallel.adapters import layer_name
from fsdplaunch.runtime.tensor_parallel.layers import matrix_layer
from fsdplaunch.runtime.tensor_parallel.split_plan import SplitPlan
from fsdplaunch.runtime.tensor_parallel.styles import Style

_UNEVEN_PARTS = (2, 9)
"""The first torch that knows where shards are of parts that they do not divide."""


def check_kind(plan: SplitPlan, module: nn.Module, style: Style, name: str) -> None:
    """Refuse a style for a module that is of another kind than it splits."""
    wanted = {
        "rows": "an embedding",
        "columns": "an embedding",
        "outputs": "a linear layer",
        "inputs": "a linear layer",
    }
    if not style.splits:
        return
    fits = (
        isinstance(module, nn.Embedding)
        if style.weights in ("rows", "columns")
        else matrix_layer(module) is not None
    )
    if not fits:
        msg = f"{plan.names[module]} is a {class_name(module)}, and {name} splits {wanted[style.weights]}"
        raise ShardingError(
            msg, hint="name the layer inside of it that holds the matrix, or one of its parameters"
        )
    if isinstance(module, nn.Embedding) and (
        module.max_norm is not None or module.sparse or module.scale_grad_by_freq
    ):
        msg = f"{plan.names[module]} cannot be split: it has max_norm, sparse or scale_grad_by_freq"
        raise ShardingError(msg, hint="leave it out of the plan")
    if name == "local_rowwise" and getattr(module, "bias", None) is not None:
        msg = f"{plan.names[module]} has a bias, which local_rowwise would add on every rank"
        raise ShardingError(msg, hint="use rowwise")


def check_splits(plan: SplitPlan, model: nn.Module) -> None:
    """Check that a plan splits something: otherwise the ranks would only compute the same.

    Raises:
        ShardingError: It does not.
    """
    if all(cut.dim is None for cut in plan.cuts.values()):
        msg = f"{plan.origin} splits no parameter of {class_name(model)}, and tp_size is {plan.axis.size()}"
        raise ShardingError(msg, hint="name its layers in sharding.tensor_parallel_plan, or leave tp_size out")


def check_divisible(plan: SplitPlan, model: nn.Module) -> None:
    """Check that the ranks divide every dimension that is split; a model's vocabulary may stay as it is.

    Raises:
        ShardingError: They do not.
    """
    ranks = plan.axis.size()
    for (module, attribute), cut in list(plan.cuts.items()):
        param = getattr(module, attribute)
        if cut.dim is None or param.shape[cut.dim] % (ranks * cut.packed) == 0:
            continue
        name = joined(plan.names[module], attribute)
        what = f"{param.shape[cut.dim]} {'rows' if cut.dim == 0 else 'columns'}"
        if plan.strict or not _is_vocabulary(module, model):
            msg = f"{name} has {what}, which {ranks} ranks (tp_size) cannot divide"
            raise ShardingError(msg, hint="use a tp_size that divides it, or leave the layer out of the plan")
        messages.say(f"{name}: {ranks} ranks (tp_size) cannot divide its {what}, so each has all of it")
        for place in [place for place in plan.cuts if place[0] is module]:
            del plan.cuts[place]
        plan.modules.pop(module, None)


def check_even(plan: SplitPlan, shards: int) -> None:
    """Refuse what torch before 2.9 puts into the wrong places of a checkpoint: parts that shards do not divide.

    Raises:
        ShardingError: This torch is older, and the plan has such a part.
    """
    version = parse(torch.__version__)
    if version is None or version >= _UNEVEN_PARTS:
        return
    for (module, attribute), cut in plan.cuts.items():
        rows = getattr(module, attribute).shape[0] // plan.axis.size()
        if cut.dim == 0 and cut.packed == 1 and rows % shards:
            name = joined(plan.names[module], attribute)
            msg = (
                f"{name} has {rows} rows on each of {plan.axis.size()} ranks, which {shards} shards cannot divide"
            )
            raise ShardingError(msg, hint="install torch 2.9 or newer, or use sizes that divide")


def _is_vocabulary(module: nn.Module, model: nn.Module) -> bool:
    """Return whether a layer is an embedding, or has one output for each entry of one."""
    sizes = {each.num_embeddings for each in model.modules() if isinstance(each, nn.Embedding)}
    return isinstance(module, nn.Embedding) or getattr(module, "out_features", None) in sizes


def check_heads(plan: SplitPlan, model: nn.Module) -> None:
    """Check that the ranks divide the attention heads of a model of transformers whose projections are split.

    Raises:
        ShardingError: They do not.
    """
    projections = ("q_proj", "k_proj", "v_proj", "q_b_proj", "kv_b_proj")
    split = {
        layer_name(plan.names[module]).rpartition(".")[2]
        for module, style in plan.modules.items()
        if style.weights == "outputs" and style.leave is None
    }
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    if not split & set(projections):
        return
    for key, what in (("num_attention_heads", "attention heads"), ("num_key_value_heads", "key-value heads")):
        heads = getattr(config, key, None)
        if isinstance(heads, int) and heads % plan.axis.size():
            msg = f"{class_name(model)} has {heads} {what}, which {plan.axis.size()} ranks (tp_size) cannot divide"
            raise ShardingError(msg, hint=f"use a tp_size that divides {heads}")
