"""Which layers of a model are split and how: its own plan, or the configuration's, checked against it."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdplaunch.display_text import listed
from fsdplaunch.errors import ShardingError
from fsdplaunch.runtime import messages
from fsdplaunch.runtime.inspection.parameters import ModelTensor, clean_name, joined
from fsdplaunch.runtime.inspection.units import local_tensor
from fsdplaunch.runtime.sharding.mesh import split_groups
from fsdplaunch.runtime.sharding.wrap import class_name
from fsdplaunch.runtime.split_checks import FirstPass, check_first_gradients, check_first_inputs, draw_alike
from fsdplaunch.runtime.tensor_parallel.styles import (
    ROPE,
    STYLES,
    Cut,
    Style,
    known_styles,
    matrix_layer,
    rope_style,
)
from fsdplaunch.runtime.torch_internals.distributed import (
    operator_handlers,
    silence_slow_exchanges,
    unscale_operator,
)
from fsdplaunch.runtime.torch_internals.modules import own_parameters, untraced

Place = tuple[nn.Module, str]
"""A module, and the attribute under which it holds a parameter."""


@dataclass(slots=True, kw_only=True)
class SplitNow:
    """Whether layers compute in parts at present; a pass to compare with computes them in full on every rank."""

    layers: bool = True


@dataclass(slots=True, kw_only=True)
class SplitPlan:
    """How a model's layers are split.

    Attributes:
        axis: The ranks that split them.
        origin: Whose plan it is.
        strict: Whether what cannot be split is an error; what a model's own plan says of its vocabulary is not.
        modules: What becomes of each module's forward.
        cuts: How parameters are split.
        names: Of the modules.
        now: Of all its layers.
    """

    axis: DeviceMesh
    origin: str
    strict: bool
    modules: dict[nn.Module, Style] = field(default_factory=dict)
    cuts: dict[Place, Cut] = field(default_factory=dict)
    names: dict[nn.Module, str] = field(default_factory=dict)
    now: SplitNow = field(default_factory=SplitNow)

    def cut_at(self, places: list[Place]) -> Cut | None:
        """Return how the parameter that is in these places is split; None if it is not."""
        return next((self.cuts[place] for place in places if place in self.cuts), None)

    def split_parameter(self, entry: ModelTensor) -> None:
        """Exchange a full parameter for one of which this rank has its part; leave those that are not split."""
        cut = self.cut_at(entry.places)
        if cut is not None and isinstance(entry.tensor, nn.Parameter):
            entry.exchange(cut.split(entry.tensor.detach(), self.axis))

    def expect_same_inputs(self, model: nn.Module, device: torch.device, computes_in: torch.dtype | None) -> None:
        """Let the ranks that split layers draw alike from now on, and compare their first passes."""
        operator_handlers()[unscale_operator()] = _unscale_together
        draw_alike(self.axis)
        self.compare_first_pass(model, computes_in)
        check_first_inputs(model, self.axis, device, "split layers together (tp_size)")
        check_first_gradients(model, self.axis, device)

    def compare_first_pass(self, model: nn.Module, computes_in: torch.dtype | None) -> None:
        """Compare the model's first pass with one in which every rank computes with full layers."""

        def choose(split: bool) -> None:
            self.now.layers = split

        alone = "rowwise follows colwise, and layers take sizes from their inputs"
        remedy = alone if self.strict else "write another as sharding.tensor_parallel_plan"
        hint = f"{self.origin} does not fit what its layers compute: {remedy}"
        first = FirstPass("split layers (tp_size)", hint, choose, computes_in)

        def begin(module: nn.Module, args: Any, kwargs: Any) -> None:
            if not first.running:
                first.compare(module, args, kwargs)

        model.register_forward_pre_hook(untraced(begin), prepend=True, with_kwargs=True)

    def of(self, module: nn.Module) -> dict[str, Cut]:
        """Return the cuts of a module's own parameters, by attribute."""
        return {attribute: cut for (holder, attribute), cut in self.cuts.items() if holder is module}


_KEY = "sharding.tensor_parallel_plan"


def find_plan(model: nn.Module, configured: Mapping[str, str]) -> tuple[dict[str, str], str]:
    """Return patterns of names with their styles, and whose they are.

    Raises:
        ShardingError: Neither the configuration nor the model has a plan.
    """
    if configured:
        return dict(configured), _KEY
    for prefix, module in model.named_modules():
        # transformers makes it when the model is built, complete for what is inside; wrappers only pass it on.
        if own := module.__dict__.get("_tp_plan"):
            start = f"{clean_name(prefix)}." if prefix else ""
            return {start + pattern: style for pattern, style in own.items()}, f"{class_name(module)}'s own plan"
    msg = f"{class_name(model)} has no plan of how its layers can be split"
    raise ShardingError(msg, hint=f"write one as {_KEY}, such as {{layers.*.up: colwise, layers.*.down: rowwise}}")


def matched(model: nn.Module, plan: Mapping[str, str], *, strict: bool) -> dict[str, str]:
    """Return the style of each module or parameter whose full name a pattern matches, `*` standing for one part.

    Args:
        model: Not sharded yet.
        plan: Patterns and styles.
        strict: Whether a pattern that matches nothing is an error. Models' own plans have such for layers that
            other variants of the model have.

    Raises:
        ShardingError: A style is not known, a pattern matches nothing, or two say different things.
    """
    names = [clean_name(name) for name, _ in model.named_modules(remove_duplicate=False) if name]
    names += [clean_name(name) for name, _ in model.named_parameters(remove_duplicate=False)]
    patterns: dict[str, str] = {}
    for pattern, style in plan.items():
        expression = re.compile(re.escape(pattern).replace(r"\*", "[^.]+"))
        here = [name for name in dict.fromkeys(names) if expression.fullmatch(name)]
        if style not in (*STYLES, ROPE) and (strict or here):
            msg = f"{pattern}: {style} is not a style to split a layer"
            raise ShardingError(msg, hint=f"the styles are {', '.join(known_styles())}")
        if strict and not here:
            raise _nothing_matched(model, pattern)
        for name in here:
            other = patterns.setdefault(name, pattern)
            if plan[other] != style:
                msg = f"{name} is {plan[other]} by {other} and {style} by {pattern}"
                raise ShardingError(msg, hint=f"let one pattern of {_KEY} match it")
    return {name: plan[pattern] for name, pattern in patterns.items()}


def _nothing_matched(model: nn.Module, pattern: str) -> ShardingError:
    last = pattern.rsplit(".", 1)[-1]
    near = [clean_name(name) for name, _ in model.named_modules() if name.rsplit(".", 1)[-1] == last]
    names = near or [
        clean_name(name) for name, module in model.named_modules() if name and not [*module.children()]
    ]
    msg = f"{_KEY}: {pattern} matches no module and no parameter of {class_name(model)}"
    return ShardingError(msg, hint=f"names there: {listed(names, 6)}")


_SPLIT_KINDS = {"rows": "an embedding", "columns": "an embedding"}
_ADAPTERS = ("base_layer", "original_module")
"""What PEFT's modules hold the layer under that they were put in the place of."""


def check_kind(plan: SplitPlan, module: nn.Module, style: Style, name: str) -> None:
    """Refuse a style for a module that is of another kind than it splits."""
    if not style.splits:
        return
    held = dict(module.named_children())
    if any(name in held for name in _ADAPTERS):
        msg = f"ranks (tp_size) cannot split {plan.names[module]}, which holds adapters"
        raise ShardingError(msg, hint="leave it out of sharding.tensor_parallel_plan, or leave tp_size out")
    wanted = _SPLIT_KINDS.get(style.weights, "a linear layer")
    is_embedding = isinstance(module, nn.Embedding)
    if not (is_embedding if style.weights in _SPLIT_KINDS else matrix_layer(module) is not None):
        msg = f"{plan.names[module]} is a {class_name(module)}, and {name} splits {wanted}"
        hint = "name the layer inside of it that holds the matrix, or one of its parameters"
        raise ShardingError(msg, hint=hint)
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
        plan.names[module].rpartition(".")[2]
        for module, style in plan.modules.items()
        if style.weights == "outputs" and style.leave is None
    }
    config = _text_config(model)
    if not split & set(projections):
        return
    for key, what in (("num_attention_heads", "attention heads"), ("num_key_value_heads", "key-value heads")):
        heads = getattr(config, key, None)
        if isinstance(heads, int) and heads % plan.axis.size():
            msg = f"{class_name(model)} has {heads} {what}, which {plan.axis.size()} ranks (tp_size) cannot divide"
            raise ShardingError(msg, hint=f"use a tp_size that divides {heads}")


def _text_config(module: nn.Module) -> Any:
    """Return the configuration of a transformers model's decoder; None for a module without one."""
    config: Any = getattr(module, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def build_plan(model: nn.Module, configured: Mapping[str, str], axis: DeviceMesh) -> SplitPlan:
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
    for name, style in matched(model, plan, strict=bool(configured)).items():
        if name in modules:
            _add_module(result, model, modules[name], style)
        else:
            holder, _, attribute = name.rpartition(".")
            _add_parameter(result, modules[holder], attribute, STYLES[style])
    _follow_ties(result, model)
    check_divisible(result, model)
    check_splits(result, model)
    check_heads(result, model)
    return result


def _add_module(plan: SplitPlan, model: nn.Module, module: nn.Module, name: str) -> None:
    if name == "replicate":
        return
    style = _style(model, module, name)
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
    config = _text_config(module) or _text_config(model)
    width = getattr(config, "qk_rope_head_dim", None)
    if not isinstance(width, int):
        msg = f"{ROPE} needs qk_rope_head_dim in the configuration of {class_name(model)}"
        raise ShardingError(msg, hint="leave the style out")
    return rope_style(width)


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


def _unscale_together(operator: Any, args: Any, _kwargs: Any) -> None:
    """Find an overflow on all ranks that have parts of the gradients.

    Torch's GradScaler asks the first gradient for the ranks that have to agree, and refuses gradients of which
    some are split over more axes than others.
    """
    gradients, found, inverse_scale = args
    operator([local_tensor(gradient) for gradient in gradients], local_tensor(found), local_tensor(inverse_scale))
    groups = {id(group): group for gradient in gradients for group in split_groups(gradient)}
    for group in groups.values():
        dist.all_reduce(local_tensor(found), dist.ReduceOp.MAX, group=group)
