"""Make a model's split plan: the styles that a plan names as cuts of the model's parameters."""

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdplaunch.errors import ShardingError
from fsdplaunch.runtime.inspection.parameter_names import clean_name, joined
from fsdplaunch.runtime.sharding.blocks import class_name
from fsdplaunch.runtime.tensor_parallel.adapters import adapted_layers, layer_name
from fsdplaunch.runtime.tensor_parallel.layers import Cut
from fsdplaunch.runtime.tensor_parallel.plan import find_plan, matched
from fsdplaunch.runtime.tensor_parallel.plan_checks import (
    check_divisible,
    check_even,
    check_heads,
    check_kind,
    check_splits,
)
from fsdplaunch.runtime.tensor_parallel.split_plan import Place, SplitPlan
from fsdplaunch.runtime.tensor_parallel.styles import HEAD_NORM, ROPE, STYLES, Style, rope_style
from fsdplaunch.runtime.torch_internals.dtensor import silence_slow_exchanges
from fsdplaunch.runtime.torch_internals.modules import own_parameters


def build_plan(model: nn.Module, configured: Mapping[str, str], axis: DeviceMesh, *, shards: int) -> SplitPlan:
    """Decide how a model's layers are split.

    Args:
        model: Not sharded yet.
        configured: The configuration's plan; empty for the model's own.
        axis: The ranks that split them.
        shards: Ranks that each part is sharded over.

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
        _add_inner_parameters(result)
    _follow_ties(result, model)
    check_divisible(result, model)
    check_splits(result, model)
    check_even(result, shards)
    check_heads(result, model)
    return result


def _add_module(plan: SplitPlan, model: nn.Module, module: nn.Module, name: str) -> None:
    if name == "replicate":
        return
    style = _style(model, module, name)
    adapted = adapted_layers(module, style, plan.names[module], name)
    if adapted is not None:
        for layer, own in adapted.items():
            _add_module(plan, model, layer, own)
        return
    check_kind(plan, module, style, name)
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


def _add_inner_parameters(plan: SplitPlan) -> None:
    """Add up the gradients of what lies between split projections and is not named by the model's plan.

    Norms of split heads are not named by the plans of transformers 4, activations with parameters by none.
    """
    by_name = {name: module for module, name in plan.names.items()}
    for module, style in list(plan.modules.items()):
        parent, _, own = layer_name(plan.names[module]).rpartition(".")
        if style.weights != "outputs" or style.leave is not None:
            continue
        inner = [f"{own.removesuffix('_proj')}_norm"] if own in ("q_proj", "k_proj") else ["act_fn", "act"]
        for found in filter(None, (by_name.get(f"{parent}.{name}") for name in inner)):
            if found not in plan.modules:
                plan.modules[found] = HEAD_NORM
                plan.cuts |= {(found, attribute): Cut() for attribute, _ in own_parameters(found)}


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
