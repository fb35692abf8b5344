"""Which layers of a model are split and how: its own plan, or the configuration's, checked against it."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdplaunch.display_text import listed
from fsdplaunch.errors import ShardingError
from fsdplaunch.probe.torch_version import parse
from fsdplaunch.runtime import messages
from fsdplaunch.runtime.inspection.parameters import ModelTensor, clean_name, joined
from fsdplaunch.runtime.inspection.units import local_tensor
from fsdplaunch.runtime.sharding.mesh import split_groups
from fsdplaunch.runtime.sharding.wrap import class_name
from fsdplaunch.runtime.split_checks import FirstPass, check_first_gradients, check_first_inputs, draw_alike
from fsdplaunch.runtime.tensor_parallel.styles import (
    HEAD_NORM,
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


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedStyle:
    """What a plan says of one module or parameter: its clean name, the pattern that matched, and the style."""

    name: str
    pattern: str
    style: str


def find_plan(model: nn.Module, configured: Mapping[str, str]) -> tuple[dict[str, str], str]:
    """Return patterns of names with their styles, and whose they are.

    Raises:
        ShardingError: Neither the configuration nor the model has a plan.
    """
    if configured:
        return dict(configured), _KEY
    for prefix, module in model.named_modules():
        own = _own_plan(module)
        if own:
            start = f"{clean_name(prefix)}." if prefix else ""
            return {start + pattern: style for pattern, style in own.items()}, f"{class_name(module)}'s own plan"
    msg = f"{class_name(model)} has no plan of how its layers can be split"
    raise ShardingError(msg, hint=f"write one as {_KEY}, such as {{layers.*.up: colwise, layers.*.down: rowwise}}")


def _own_plan(module: nn.Module) -> dict[str, str]:
    """Return the plan that a model of transformers brings along, complete for it and what is inside."""
    config: Any = _not_of_what_is_inside(module, "config")
    is_wrapper = not hasattr(type(module), "base_model_prefix")  # PeftModel has the configuration of what it wraps
    of_base = {} if is_wrapper else getattr(config, "base_model_tp_plan", None) or {}
    own = dict(_not_of_what_is_inside(module, "_tp_plan") or {})
    base = getattr(module, "base_model_prefix", "")
    if not own and not of_base:
        return {}
    inner = getattr(module, base, None) if base else None
    prefix = f"{base}." if isinstance(inner, nn.Module) and inner is not module else ""
    return {**{prefix + pattern: style for pattern, style in of_base.items()}, **own}


def _not_of_what_is_inside(module: nn.Module, name: str) -> Any:
    """Return an attribute of a module; wrappers, such as those of adapters, pass on those of the model inside."""
    return module.__dict__.get(name) or (getattr(module, name) if hasattr(type(module), name) else None)


def matches(model: nn.Module, plan: Mapping[str, str]) -> Iterator[tuple[str, list[NamedStyle]]]:
    """Yield each pattern with what it matches: modules and parameters whose full name it is, `*` for one part."""
    names = [clean_name(name) for name, _ in model.named_modules(remove_duplicate=False) if name]
    names += [clean_name(name) for name, _ in model.named_parameters(remove_duplicate=False)]
    for pattern, style in plan.items():
        expression = re.compile(re.escape(pattern).replace(r"\*", "[^.]+"))
        found = [name for name in dict.fromkeys(names) if expression.fullmatch(name)]
        yield pattern, [NamedStyle(name=name, pattern=pattern, style=style) for name in found]


def matched(model: nn.Module, plan: Mapping[str, str], *, strict: bool) -> dict[str, NamedStyle]:
    """Return the style of each module or parameter that a plan names.

    Args:
        model: Not sharded yet.
        plan: Patterns and styles.
        strict: Whether a pattern that matches nothing is an error. Models' own plans have such for layers that
            other variants of the model have.

    Raises:
        ShardingError: A style is not known, a pattern matches nothing, or two say different things.
    """
    found: dict[str, NamedStyle] = {}
    for pattern, named in matches(model, plan):
        if plan[pattern] not in (*STYLES, ROPE) and (strict or named):
            msg = f"{pattern}: {plan[pattern]} is no style to split a layer"
            raise ShardingError(msg, hint=f"the styles are {', '.join(known_styles())}")
        if strict and not named:
            raise _nothing_matched(model, pattern)
        for one in named:
            other = found.setdefault(one.name, one)
            if other.style != one.style:
                msg = f"{one.name} is {other.style} by {other.pattern} and {one.style} by {pattern}"
                raise ShardingError(msg, hint=f"let one pattern of {_KEY} match it")
    return found


def _nothing_matched(model: nn.Module, pattern: str) -> ShardingError:
    last = pattern.rsplit(".", 1)[-1]
    near = [clean_name(name) for name, _ in model.named_modules() if name.rsplit(".", 1)[-1] == last]
    names = near or [
        clean_name(name) for name, module in model.named_modules() if name and not [*module.children()]
    ]
    msg = f"{_KEY}: {pattern} matches no module and no parameter of {class_name(model)}"
    return ShardingError(msg, hint=f"names there: {listed(names, 6)}")


_BASE, _FIRST, _SECOND = "base_layer", "lora_A", "lora_B"
_FULL = ("lora_embedding_A", "lora_embedding_B")
"""Of an embedding's adapters: they get all ids and add to its full output."""
_SUMMED = "replicated_with_grad_allreduce"


def adapted_layers(module: nn.Module, style: Style, name: str, style_name: str) -> dict[nn.Module, str] | None:
    """Return the layers that are split instead of a module that holds adapters, each with the name of its style.

    Args:
        module: What a plan names.
        style: How its layer is split.
        name: Of the module, for errors.
        style_name: Of the style.

    Returns:
        None for a module without adapters, and for styles that split no parameters.

    Raises:
        ShardingError: The adapters are of a kind of which it is not known how they are split.
    """
    if not style.splits:
        return None
    original, trained = _child(module, "original_module"), _child(module, "modules_to_save")
    if original is not None and trained is not None:
        return dict.fromkeys((original, *trained.children()), style_name)
    base = _child(module, _BASE)
    if base is None:
        return None
    _check_kind(module, name)
    return {base: style_name} | dict(_beside(module, style, style_name))


def layer_name(name: str) -> str:
    """Return what a layer is called by the model that has no adapters."""
    return name.removesuffix(f".{_BASE}")


def _child(module: nn.Module, name: str) -> nn.Module | None:
    child = dict(module.named_children()).get(name)
    return child if isinstance(child, nn.Module) else None


def _check_kind(module: nn.Module, name: str) -> None:
    held = dict.fromkeys(each.partition(".")[0] for each, _ in module.named_parameters())
    others = [each for each in held if each not in (_BASE, _FIRST, _SECOND, *_FULL)]
    if others:
        msg = f"ranks (tp_size) cannot split the adapters of {name}: {class_name(module)} has {listed(others, 3)}"
        raise ShardingError(msg, hint="use plain LoRA, or leave the layer out of sharding.tensor_parallel_plan")


def _beside(module: nn.Module, style: Style, style_name: str) -> Iterator[tuple[nn.Module, str]]:
    """Yield the small matrices that meet activations of which each rank has a part.

    Beside split outputs that is the second, which adds to them; beside split inputs the first. The other one is
    full; where neither the layer's inputs nor its outputs are exchanged, its gradients are summands.
    """
    by_outputs = style.weights == "outputs"
    if not by_outputs and style.weights != "inputs":
        return
    outside = style.leave if by_outputs else style.enter
    if outside is not None:  # in full on both sides of the layer, and so for its adapters
        return
    split, full = (_SECOND, _FIRST) if by_outputs else (_FIRST, _SECOND)
    for each in _adapters(module, split):
        yield each, style_name
    if style.enter is None and style.leave is None:
        for each in _adapters(module, full):
            yield each, _SUMMED


def _adapters(module: nn.Module, which: str) -> list[nn.Module]:
    held = _child(module, which)
    return [] if held is None else list(held.children())


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
