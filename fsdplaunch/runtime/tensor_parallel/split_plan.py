"""What is split of one model: the plan's styles as cuts of its parameters, checked against them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdplaunch.errors import ShardingError
from fsdplaunch.runtime.inspection.parameter_names import clean_name, joined
from fsdplaunch.runtime.sharding.blocks import class_name
from fsdplaunch.runtime.sharding.materialize import ModelTensor
from fsdplaunch.runtime.tensor_parallel.layers import Cut, matrix_layer
from fsdplaunch.runtime.tensor_parallel.plan import find_plan, matched
from fsdplaunch.runtime.tensor_parallel.same_gradients import check_first_gradients
from fsdplaunch.runtime.tensor_parallel.same_inputs import check_first_inputs, draw_alike
from fsdplaunch.runtime.tensor_parallel.styles import HEAD_NORM, ROPE, STYLES, Style, rope_style
from fsdplaunch.runtime.torch_internals.dtensor import silence_slow_exchanges
from fsdplaunch.runtime.torch_internals.modules import own_parameters

Place = tuple[nn.Module, str]
"""A module, and the attribute under which it holds a parameter."""


@dataclass(slots=True, kw_only=True)
class SplitPlan:
    """How a model's layers are split.

    Attributes:
        axis: The ranks that split them.
        origin: Whose plan it is.
        strict: Whether what cannot be split is an error; what a model's own plan says of its vocabulary is not.
        modules: What becomes of each module's forward.
        cuts: How parameters are split.
        kept: Names of what would be split and cannot be, with the reason.
        names: Of the modules.
    """

    axis: DeviceMesh
    origin: str
    strict: bool
    modules: dict[nn.Module, Style] = field(default_factory=dict)
    cuts: dict[Place, Cut] = field(default_factory=dict)
    kept: dict[str, str] = field(default_factory=dict)
    names: dict[nn.Module, str] = field(default_factory=dict)

    def cut_at(self, places: list[Place]) -> Cut | None:
        """Return how the parameter that is in these places is split; None if it is not."""
        return next((self.cuts[place] for place in places if place in self.cuts), None)

    def split_parameter(self, entry: ModelTensor) -> None:
        """Exchange a full parameter for one of which this rank has its part; leave those that are not split."""
        cut = self.cut_at(entry.places)
        if cut is not None and isinstance(entry.tensor, nn.Parameter):
            entry.exchange(cut.split(entry.tensor.detach(), self.axis))

    def expect_same_inputs(self, model: nn.Module, device: torch.device) -> None:
        """Let the ranks that split layers draw alike from now on, and compare first inputs and gradients."""
        draw_alike(self.axis)
        check_first_inputs(model, self.axis, device, "split layers together (tp_size)")
        check_first_gradients(model, self.axis, device)

    def of(self, module: nn.Module) -> dict[str, Cut]:
        """Return the cuts of a module's own parameters, by attribute."""
        return {attribute: cut for (holder, attribute), cut in self.cuts.items() if holder is module}


def split_plan(model: nn.Module, configured: Mapping[str, str], axis: DeviceMesh) -> SplitPlan:
    """Decide how a model's layers are split.

    Args:
        model: Not sharded yet.
        configured: The configuration's plan; empty for the model's own.
        axis: The ranks that split them.

    Raises:
        ShardingError: The plan does not fit the model, or the ranks do not divide it.
    """
    silence_slow_exchanges()
    plan, origin = find_plan(model, configured)
    result = SplitPlan(axis=axis, origin=origin, strict=bool(configured))
    result.names = {module: clean_name(name) for name, module in model.named_modules()}
    modules = {clean_name(name): module for name, module in model.named_modules(remove_duplicate=False)}
    for name, found in matched(model, plan, strict=bool(configured)).items():
        if name in modules:
            _add_module(result, model, modules[name], found.style)
        else:
            holder, _, attribute = name.rpartition(".")
            _add_parameter(result, modules[holder], attribute, STYLES[found.style])
    if not configured:
        _add_head_norms(result)
    _follow_ties(result, model)
    _check_divisible(result, model)
    _check_heads(result, model)
    return result


def _add_module(plan: SplitPlan, model: nn.Module, module: nn.Module, name: str) -> None:
    if name == "replicate":
        return
    style = _style(model, module, name)
    _check_kind(plan, module, style, name)
    plan.modules[module] = style
    for attribute, param in own_parameters(module):
        cut = style.cut(module, param)
        if cut is not None:
            plan.cuts.setdefault((module, attribute), cut)


def _add_parameter(plan: SplitPlan, module: nn.Module, attribute: str, style: Style) -> None:
    cut = style.cut(module, getattr(module, attribute))
    if cut is not None:
        plan.cuts[module, attribute] = cut
        plan.modules.setdefault(module, STYLES["local"])


def _style(model: nn.Module, module: nn.Module, name: str) -> Style:
    if name != ROPE:
        return STYLES[name]
    config: Any = getattr(module, "config", None) or getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    width = getattr(config, "qk_rope_head_dim", None)
    if not isinstance(width, int):
        msg = f"{ROPE} needs qk_rope_head_dim in the configuration of {class_name(model)}"
        raise ShardingError(msg, hint="leave the style out")
    return rope_style(width)


def _check_kind(plan: SplitPlan, module: nn.Module, style: Style, name: str) -> None:
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


def _add_head_norms(plan: SplitPlan) -> None:
    """Add up the gradients of norms inside of split heads; the plans of transformers 4 do not name them."""
    by_name = {name: module for module, name in plan.names.items()}
    for module, style in list(plan.modules.items()):
        parent, _, own = plan.names[module].rpartition(".")
        norm = by_name.get(f"{parent}.{own.removesuffix('_proj')}_norm")
        if own in ("q_proj", "k_proj") and style.leave is None and norm is not None and norm not in plan.modules:
            plan.modules[norm] = HEAD_NORM
            plan.cuts |= {(norm, attribute): Cut() for attribute, _ in own_parameters(norm)}


def _follow_ties(plan: SplitPlan, model: nn.Module) -> None:
    """Split a parameter that several modules share in all of them alike.

    An embedding that shares its weight with a split output layer is split by rows, and the other way round.
    """
    holders: dict[int, list[Place]] = {}
    for module in model.modules():
        for attribute, param in own_parameters(module):
            holders.setdefault(id(param), []).append((module, attribute))
    for places in holders.values():
        if len(places) > 1 and plan.cut_at(places) is not None:
            _split_alike(plan, places)


def _split_alike(plan: SplitPlan, places: list[Place]) -> None:
    cut = plan.cut_at(places)
    for module, attribute in places:
        if (module, attribute) in plan.cuts:
            other = plan.cuts[module, attribute]
        else:
            follows = "embedding_rowwise" if isinstance(module, nn.Embedding) else "colwise_gather_output"
            style = plan.modules.setdefault(module, STYLES[follows])
            other = style.cut(module, getattr(module, attribute)) or Cut()
            plan.cuts[module, attribute] = other
        if other != cut:
            names = " and ".join(joined(plan.names[holder], name) for holder, name in places)
            msg = f"{names} are one parameter, and the plan splits them differently"
            raise ShardingError(
                msg, hint="split an embedding with embedding_rowwise, its output layer with colwise_gather_output"
            )


def _check_divisible(plan: SplitPlan, model: nn.Module) -> None:
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
        plan.kept[name] = f"{what} are not divided by {ranks}"
        for place in [place for place in plan.cuts if place[0] is module]:
            del plan.cuts[place]
        plan.modules.pop(module, None)


def _is_vocabulary(module: nn.Module, model: nn.Module) -> bool:
    """Return whether a layer is an embedding, or has one output for each entry of one."""
    sizes = {each.num_embeddings for each in model.modules() if isinstance(each, nn.Embedding)}
    return isinstance(module, nn.Embedding) or getattr(module, "out_features", None) in sizes


def _check_heads(plan: SplitPlan, model: nn.Module) -> None:
    """Check that the ranks divide the attention heads of a model of transformers whose projections are split.

    Raises:
        ShardingError: They do not.
    """
    projections = ("q_proj", "k_proj", "v_proj", "q_b_proj", "kv_b_proj")
    split = {
        plan.names[module].rpartition(".")[2]
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
