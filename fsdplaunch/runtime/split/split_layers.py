"""Which layers of a model are split, by its own plan or the configuration's, and what their forwards then do.

A forward is the exchange before, this rank's part of the computation, and the exchange after.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdplaunch.display_text import listed
from fsdplaunch.errors import ShardingError
from fsdplaunch.runtime import messages
from fsdplaunch.runtime.inspection import ModelTensor, clean_name, joined
from fsdplaunch.runtime.inspection.units import has_shards, local_tensor
from fsdplaunch.runtime.sharding.mesh import split_groups
from fsdplaunch.runtime.sharding.wrap import class_name
from fsdplaunch.runtime.split.styles import (
    ROPE,
    STYLES,
    Cut,
    OwnTensors,
    Style,
    known_styles,
    matrix_outputs,
    rope_style,
)
from fsdplaunch.runtime.split_checks import FirstPass, check_first_gradients, check_first_inputs, draw_alike
from fsdplaunch.runtime.torch_internals.distributed import (
    operator_handlers,
    silence_slow_exchanges,
    unscale_operator,
)
from fsdplaunch.runtime.torch_internals.modules import own_parameters, untraced

Place = tuple[nn.Module, str]
"""A module, and the attribute under which it holds a parameter."""
_KEY = "sharding.tensor_parallel_plan"
_SPLIT = "_layer_split"
"""Where a layer holds how it is split."""


@dataclass(slots=True, kw_only=True)
class SplitNow:
    """Whether layers compute in parts at present; a pass to compare with computes them in full on every rank."""

    layers: bool = True


@dataclass(slots=True, kw_only=True)
class SplitPlan:
    """How a model's layers are split."""

    axis: DeviceMesh  # the ranks that split them
    origin: str  # whose plan it is
    strict: bool  # whether what cannot be split is an error; what a model's own plan says of its vocabulary is not
    modules: dict[nn.Module, Style] = field(default_factory=dict)  # what becomes of each module's forward
    cuts: dict[Place, Cut] = field(default_factory=dict)  # how parameters are split
    names: dict[nn.Module, str] = field(default_factory=dict)  # of the modules
    now: SplitNow = field(default_factory=SplitNow)  # of all its layers

    def cut_at(self, places: list[Place]) -> Cut | None:
        """Return how the parameter that is in these places is split; None if it is not."""
        return next((self.cuts[place] for place in places if place in self.cuts), None)

    def split_parameter(self, entry: ModelTensor) -> None:
        """Exchange a full parameter for one of which this rank has its part; leave those that are not split."""
        cut = self.cut_at(entry.places)
        if cut is not None and isinstance(entry.tensor, nn.Parameter):
            entry.exchange(cut.split(entry.tensor.detach(), self.axis))

    def expect_same_inputs(self, model: nn.Module, device: torch.device, computes_in: torch.dtype | None) -> None:
        """Let the ranks that split layers draw alike from now on, and compare their first passes.

        The model's first one is also compared with one in which every rank computes with full layers.
        """
        operator_handlers()[unscale_operator()] = _unscale_together
        draw_alike(self.axis)

        def choose(split: bool) -> None:
            self.now.layers = split

        alone = "rowwise follows colwise, and layers take sizes from their inputs"
        remedy = alone if self.strict else f"write another as {_KEY}"
        hint = f"{self.origin} does not fit what its layers compute: {remedy}"
        first = FirstPass("split layers (tp_size)", hint, choose, computes_in)
        model.register_forward_pre_hook(untraced(first.compare), prepend=True, with_kwargs=True)
        check_first_inputs(model, self.axis, device, "split layers together (tp_size)")
        check_first_gradients(model, self.axis, device)


def split_layers(
    model: nn.Module,
    configured: Mapping[str, str],
    axis: DeviceMesh,
    ignored: Collection[nn.Module] = (),
) -> SplitPlan:
    """Decide how a model's layers are split, by the configured plan or its own, and give each a new forward.

    They compute as before until parameters are split.

    Raises:
        ShardingError: The plan does not fit the model or names what is ignored, or the ranks do not divide it.
    """
    silence_slow_exchanges()
    styles, origin = _find_plan(model, configured)
    plan = SplitPlan(axis=axis, origin=origin, strict=bool(configured))
    plan.names = {module: clean_name(name) for name, module in model.named_modules()}
    modules = {clean_name(name): module for name, module in model.named_modules(remove_duplicate=False)}
    for name, style_name in _matched(model, styles, strict=plan.strict).items():
        holder, _, attribute = name.rpartition(".")
        if name in modules:
            _add_module(plan, model, modules[name], style_name)
        elif (cut := STYLES[style_name].cut(modules[holder], getattr(modules[holder], attribute))) is not None:
            plan.cuts[modules[holder], attribute] = cut
            plan.modules.setdefault(modules[holder], STYLES["local"])
    _follow_ties(plan, model)
    _check_divisible(plan, model)
    if all(cut.dim is None for cut in plan.cuts.values()):  # the ranks would only compute the same
        msg = f"{plan.origin} splits no parameter of {class_name(model)}, and tp_size is {plan.axis.size()}"
        raise ShardingError(msg, hint=f"name its layers in {_KEY}, or leave tp_size out")
    _check_heads(plan, model)
    if names := [plan.names[module] for module in plan.modules if module in ignored]:
        msg = f"{listed(names, 3)} cannot be split and ignored"
        raise ShardingError(msg, hint=f"take it out of fsdp_ignored_modules, or out of {_KEY}")
    holders = {module for module, _ in plan.cuts}
    for module, style in plan.modules.items():
        cuts = {attribute: cut for (other, attribute), cut in plan.cuts.items() if other is module}
        has_parts = any(each in holders for each in module.modules())
        split = LayerSplit(style=style, axis=axis, cuts=cuts, has_parts=has_parts, now=plan.now)
        module.__dict__ |= {_SPLIT: split, "forward": MethodType(split_forward, module)}
    return plan


def _find_plan(model: nn.Module, configured: Mapping[str, str]) -> tuple[dict[str, str], str]:
    """Return patterns of names with their styles, and whose they are."""
    if configured:
        return dict(configured), _KEY
    for prefix, module in model.named_modules():
        # transformers makes it when the model is built, complete for what is inside; wrappers only pass it on.
        if own := module.__dict__.get("_tp_plan"):
            start = f"{clean_name(prefix)}." if prefix else ""
            return {start + pattern: style for pattern, style in own.items()}, f"{class_name(module)}'s own plan"
    msg = f"{class_name(model)} has no plan of how its layers can be split"
    raise ShardingError(msg, hint=f"write one as {_KEY}, such as {{layers.*.up: colwise, layers.*.down: rowwise}}")


def _matched(model: nn.Module, plan: Mapping[str, str], *, strict: bool) -> dict[str, str]:
    """Return the style of each module or parameter whose full name a pattern matches, `*` standing for one part.

    Strict: a pattern that matches nothing is an error. Models' own plans have such for layers of other variants.
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
            last = pattern.rsplit(".", 1)[-1]
            near = [clean_name(name) for name, _ in model.named_modules() if name.rsplit(".", 1)[-1] == last]
            leaves = [clean_name(name) for name, module in model.named_modules() if not [*module.children()]]
            msg = f"{_KEY}: {pattern} matches no module and no parameter of {class_name(model)}"
            raise ShardingError(msg, hint=f"names there: {listed(near or leaves, 6)}")
        for name in here:
            other = patterns.setdefault(name, pattern)
            if plan[other] != style:
                msg = f"{name} is {plan[other]} by {other} and {style} by {pattern}"
                raise ShardingError(msg, hint=f"let one pattern of {_KEY} match it")
    return {name: plan[pattern] for name, pattern in patterns.items()}


def _add_module(plan: SplitPlan, model: nn.Module, module: nn.Module, name: str) -> None:
    if name == "replicate":
        return
    if name == ROPE:
        config = _text_config(module) or _text_config(model)
        width = getattr(config, "qk_rope_head_dim", None)
        if not isinstance(width, int):
            msg = f"{ROPE} needs qk_rope_head_dim in the configuration of {class_name(model)}"
            raise ShardingError(msg, hint="leave the style out")
        style = rope_style(width)
    else:
        style = STYLES[name]
    if style.weights != "full":
        _check_kind(plan, module, style, name)
    plan.modules[module] = style
    for attribute, param in own_parameters(module):
        cut = style.cut(module, param)
        if cut is not None:
            plan.cuts.setdefault((module, attribute), cut)


def _check_kind(plan: SplitPlan, module: nn.Module, style: Style, name: str) -> None:
    """Refuse a style for a module that is of another kind than it splits."""
    where, is_embedding = plan.names[module], isinstance(module, nn.Embedding)
    of_embeddings = style.weights in ("rows", "columns")
    # What PEFT's modules hold the layer under that they were put in the place of.
    if {"base_layer", "original_module"} & dict(module.named_children()).keys():
        msg = f"ranks (tp_size) cannot split {where}, which holds adapters"
        raise ShardingError(msg, hint=f"leave it out of {_KEY}, or leave tp_size out")
    if not (is_embedding if of_embeddings else matrix_outputs(module) is not None):
        wanted = "an embedding" if of_embeddings else "a linear layer"
        msg = f"{where} is a {class_name(module)}, and {name} splits {wanted}"
        hint = "name the layer inside it that holds the matrix, or one of its parameters"
        raise ShardingError(msg, hint=hint)
    if isinstance(module, nn.Embedding) and (
        module.max_norm is not None or module.sparse or module.scale_grad_by_freq
    ):
        msg = f"{where} cannot be split: it has max_norm, sparse or scale_grad_by_freq"
        raise ShardingError(msg, hint="leave it out of the plan")
    if name == "local_rowwise" and getattr(module, "bias", None) is not None:
        msg = f"{where} has a bias, which local_rowwise would add on every rank"
        raise ShardingError(msg, hint="use rowwise")


def _follow_ties(plan: SplitPlan, model: nn.Module) -> None:
    """Split a parameter that several modules share in all of them alike.

    An embedding that shares its weight with a split output layer is split by rows, and the other way round.
    """
    holders: dict[int, list[Place]] = {}
    for module in model.modules():
        for attribute, param in own_parameters(module):
            holders.setdefault(id(param), []).append((module, attribute))
    for places in holders.values():
        cut = plan.cut_at(places)
        for module, attribute in places if len(places) > 1 and cut is not None else ():
            if (module, attribute) not in plan.cuts:
                follows = "embedding_rowwise" if isinstance(module, nn.Embedding) else "colwise_gather_output"
                style = plan.modules.setdefault(module, STYLES[follows])
                plan.cuts[module, attribute] = style.cut(module, getattr(module, attribute)) or Cut()
            if plan.cuts[module, attribute] != cut:
                names = " and ".join(joined(plan.names[holder], name) for holder, name in places)
                msg = f"{names} are one parameter, and the plan splits them differently"
                hint = "split an embedding with embedding_rowwise, its output layer with colwise_gather_output"
                raise ShardingError(msg, hint=hint)


def _check_divisible(plan: SplitPlan, model: nn.Module) -> None:
    """Check that the ranks divide every dimension that is split; a model's vocabulary may stay as it is.

    That is an embedding, or a layer with one output for each entry of one.
    """
    ranks = plan.axis.size()
    sizes = {each.num_embeddings for each in model.modules() if isinstance(each, nn.Embedding)}
    for (module, attribute), cut in list(plan.cuts.items()):
        param = getattr(module, attribute)
        if cut.dim is None or param.shape[cut.dim] % (ranks * cut.packed) == 0:
            continue
        name = joined(plan.names[module], attribute)
        what = f"{param.shape[cut.dim]} {'rows' if cut.dim == 0 else 'columns'}"
        is_vocabulary = isinstance(module, nn.Embedding) or getattr(module, "out_features", None) in sizes
        if plan.strict or not is_vocabulary:
            msg = f"{name} has {what}, which {ranks} ranks (tp_size) cannot divide"
            raise ShardingError(msg, hint="use a tp_size that divides it, or leave the layer out of the plan")
        messages.say(f"{name}: {ranks} ranks (tp_size) cannot divide its {what}, so each has all of it")
        for place in [place for place in plan.cuts if place[0] is module]:
            del plan.cuts[place]
        plan.modules.pop(module, None)


def _check_heads(plan: SplitPlan, model: nn.Module) -> None:
    """Check that the ranks divide the attention heads of a model of transformers whose projections are split."""
    split = {
        plan.names[module].rpartition(".")[2]
        for module, style in plan.modules.items()
        if style.weights == "outputs" and style.leave is None
    }
    if not split & {"q_proj", "k_proj", "v_proj", "q_b_proj", "kv_b_proj"}:
        return
    for key, what in (("num_attention_heads", "attention heads"), ("num_key_value_heads", "key-value heads")):
        heads = getattr(_text_config(model), key, None)
        if isinstance(heads, int) and heads % plan.axis.size():
            msg = f"{class_name(model)} has {heads} {what}, which {plan.axis.size()} ranks (tp_size) cannot divide"
            raise ShardingError(msg, hint=f"use a tp_size that divides {heads}")


def _text_config(module: nn.Module) -> Any:
    """Return the configuration of a transformers model's decoder; None for a module without one."""
    config: Any = getattr(module, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


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


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSplit:
    """How one layer is split."""

    style: Style  # what is exchanged
    axis: DeviceMesh  # the ranks that split it
    cuts: Mapping[str, Cut]  # of its own parameters, by attribute
    has_parts: bool  # whether parameters in it are split, which shows whether it is a full copy
    now: SplitNow  # whether anything is exchanged at present

    def __deepcopy__(self, memo: dict[int, Any]) -> "LayerSplit":
        """Return the same for a copy of the layer; the ranks are the same."""
        return self


def split_forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Return what the full layer would, while its parameters are split; with full ones, as in a copy, as ever.

    It is a function of the layer and reads what it does from there: torch.compile then takes the blocks of a model
    for equal, and compiles one for all of them.
    """
    split: LayerSplit = module.__dict__[_SPLIT]
    style, axis = split.style, split.axis
    if split.has_parts and not has_shards(module):
        return type(module).forward(module, *args, **kwargs)
    if not split.now.layers:
        with OwnTensors(module, split.cuts, full=True):
            return type(module).forward(module, *args, **kwargs)
    if style.enter is not None:
        if style.every_input or not args:
            kwargs = {name: _enter(split, value) for name, value in kwargs.items()}
            args = tuple(_enter(split, value) for value in args)
        else:
            args = (_enter(split, args[0]), *args[1:])
    output = _compute(module, split, args, kwargs)
    if style.leave is None or output is None:
        return output
    if isinstance(output, tuple):
        return (style.leave(output[0], axis), *output[1:])
    output = style.leave(output, axis)
    bias = getattr(module, "bias", None) if style.late_bias else None
    return output if bias is None else output + bias


def _enter(split: LayerSplit, value: Any) -> Any:
    activations = isinstance(value, torch.Tensor) and value.is_floating_point()
    return split.style.enter(value, split.axis) if activations and split.style.enter else value


def _compute(module: nn.Module, split: LayerSplit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    outputs, late_bias = matrix_outputs(module), split.style.late_bias
    if isinstance(module, nn.Embedding) and split.style.weights == "rows":
        return _look_up(module, split, *args, **kwargs)
    is_plain = outputs == 1 or type(module).forward is nn.Linear.forward  # nothing but the product and the bias
    if is_plain and len(args) == 1:
        weight = _local(module, split, "weight")
        bias = None if late_bias else _local(module, split, "bias")
        return nn.functional.linear(args[0], weight if outputs == 0 else weight.t(), bias)
    with OwnTensors(module, split.cuts, without=("bias",) if late_bias else ()):
        return type(module).forward(module, *args, **kwargs)


def _local(module: nn.Module, split: LayerSplit, attribute: str) -> Any:
    param, cut = getattr(module, attribute, None), split.cuts.get(attribute)
    return param if cut is None else cut.local(param)


def _look_up(module: nn.Embedding, split: LayerSplit, ids: torch.Tensor) -> torch.Tensor:
    """Return the rows of this rank, and zeros for those that others have."""
    rows = module.num_embeddings // split.axis.size()
    first = rows * split.axis.get_local_rank()
    elsewhere = (ids < first) | (ids >= first + rows)
    padding = module.padding_idx
    own_padding = padding - first if padding is not None and first <= padding < first + rows else None
    with OwnTensors(module, split.cuts, padding_idx=own_padding):
        found = type(module).forward(module, (ids - first).masked_fill(elsewhere, 0))
    return found.masked_fill(elsewhere.unsqueeze(-1), 0)
