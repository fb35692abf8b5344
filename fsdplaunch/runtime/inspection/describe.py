"""`describe`: how a model is sharded, read back from torch's own objects and not from the configuration."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from fsdplaunch.display_text import listed
from fsdplaunch.errors import ShardingError
from fsdplaunch.runtime import messages
from fsdplaunch.runtime.inspection.parameters import (
    clean_name,
    count,
    named_parameters,
    parameters_of,
    tied_names,
    unwrapped,
)
from fsdplaunch.runtime.inspection.units import fsdp1_wrappers, is_unit, refuse_of_xla
from fsdplaunch.runtime.sharding.compute import CompiledForward
from fsdplaunch.runtime.sharding.mesh import TENSOR, data_mesh, splits_layer
from fsdplaunch.runtime.sharding.registry import ShardedModel, registered
from fsdplaunch.runtime.sharding.wrap import class_name
from fsdplaunch.runtime.torch_internals.fsdp import (
    flat_parameter,
    full_size,
    mixed_precision_of,
    param_groups,
    prefetches_forward,
    root_mixed_precision,
)
from fsdplaunch.runtime.torch_internals.modules import CheckpointWrapper, OffloadWrapper, checkpointed_module


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedUnit:
    """Parameters that are gathered and freed together.

    Attributes:
        name: The module's clean name; empty for the root.
        kind: The module's class, as the user wrote it.
        parameters: How many numbers it holds over all ranks of one replica.
        reshard_after_forward: Whether it is freed after forward, or the number of ranks it is then spread over.
        compute: Dtype it is gathered and computed in, or None for the one it is kept in.
        reduce: Dtype its gradients are summed in, or None for the one they have.
    """

    name: str
    kind: str
    parameters: int
    reshard_after_forward: bool | int
    compute: str | None
    reduce: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingDescription:
    """How one model is sharded. Parameters are counted in elements, dtypes are torch's names.

    Attributes:
        model: The model's class.
        version: 1 or 2.
        strategy: As the configuration names it.
        mesh: Ranks per axis, by the axis's name.
        device: Where this worker computes.
        parameters: All of the model's.
        trained: Those that get gradients.
        units: In the model's order, without the root.
        root: What is in no other unit.
        kept: Parameters by the dtype their shards are kept in.
        output: Dtype of the model's outputs, or None for the one they have.
        buffers: Dtype of buffers in forward (FSDP1), or None for their own.
        tied: Names of each parameter that has several.
        ignored: Names of the modules that are not sharded.
        unsharded: Names of the parameters that are not sharded, each rank holding all of them.
        frozen: Names of the parameters that get no gradients.
        checkpointed: Names of the modules that compute their activations again in backward.
        activations_offloaded: Whether what these keep goes to host memory.
        forward_prefetch: Whether a unit gathers the next one while it computes forward.
        backward_prefetch: When the next unit is gathered in backward.
        offloaded: Whether shards are kept in host memory.
        compiled: What is compiled: `blocks`, `model`, or None.
        float8: Linear layers that compute in float8.
        methods: Methods beside forward that parameters are gathered for.
        split: Names of the parameters that ranks split layer by layer (tensor parallelism).
        alike: Where they do, names of those that each of these ranks has alike.
        plan: Whose plan says so.
        context: How many ranks split each sequence.
        attention: How attention sees the other ranks' pieces, as configured.
    """

    model: str
    version: int
    strategy: str
    mesh: dict[str, int]
    device: str
    parameters: int
    trained: int
    units: tuple[ShardedUnit, ...]
    root: ShardedUnit
    kept: dict[str, int]
    output: str | None
    buffers: str | None
    frozen: tuple[str, ...]
    checkpointed: tuple[str, ...]
    activations_offloaded: bool
    forward_prefetch: bool
    backward_prefetch: str
    offloaded: bool
    compiled: str | None
    tied: tuple[tuple[str, ...], ...] = ()
    ignored: tuple[str, ...] = ()
    unsharded: tuple[str, ...] = ()
    float8: int = 0
    methods: tuple[str, ...] = ()
    split: tuple[str, ...] = ()
    alike: tuple[str, ...] = ()
    plan: str = ""
    context: int = 1
    attention: str = "auto"

    def line(self) -> str:
        """Return the same for people in one line, with what is out of the ordinary in how it computes."""
        units = ", ".join(f"{n} x {kind}" for kind, n in Counter(unit.kind for unit in self.units).items())
        words = (
            f"sharded {self.model}: {units or 'one unit'}, {count(self.parameters)} parameters, {self.layout()}"
        )
        return "; ".join([words, *(f"{about}: {text}" for about, text in self._remarks() if text)])

    def layout(self) -> str:
        """Return over how many ranks, how, and in which dtypes."""
        words = [
            f"FSDP{self.version} {self.strategy} over {' x '.join(map(str, self.mesh.values()))} ranks",
            f"{'/'.join(sorted(map(_word, self.kept)))} kept",
        ]
        words += [f"{_word(self.root.compute)} compute"] if self.root.compute else []
        words += [f"{_word(self.root.reduce)} reduce"] if self.root.reduce else []
        words += [f"{_word(self.output)} out"] if self.output else []
        return ", ".join(words)

    def _remarks(self) -> Iterator[tuple[str, str]]:
        if self.split:
            total = len(self.split) + len(self.alike)
            by = f", by {self.plan}" if self.plan else ""
            yield "layers split", f"{len(self.split)} of {total} parameters over {self.mesh.get(TENSOR)} ranks{by}"
        by = "" if self.attention == "auto" else f", attention by {self.attention}"
        yield "sequences split", f"over {self.context} ranks inside of the blocks{by}" if self.context > 1 else ""
        yield "not sharded", listed(self.ignored or self.unsharded, 4)
        yield "frozen", f"{count(self.parameters - self.trained)} parameters" if self.frozen else ""
        again = f"{len(self.checkpointed)} modules" if self.checkpointed else ""
        where = ", what they keep in host memory" if self.activations_offloaded else ""
        yield "activation checkpointing", again and again + where
        yield "compiled", self.compiled or ""
        yield "float8", f"{self.float8} linear layers" if self.float8 else ""
        yield "shards in host memory", "yes" if self.offloaded else ""


def describe(model: nn.Module) -> ShardingDescription:
    """Describe how a prepared model is sharded.

    Args:
        model: What `prepare` returned, or what torch.compile made of it.

    Raises:
        ShardingError: The model did not come from `prepare`.
    """
    refuse_of_xla(model, "describe")
    prepared = registered(model)
    if prepared is None:
        msg = f"this {class_name(model)} was not sharded by prepare"
        raise ShardingError(msg, hint="describe what fsdplaunch.prepare returns")
    return _described(model, _kept_layout(prepared))


def describe_seen(model: nn.Module) -> ShardingDescription:
    """Describe how a model is sharded that something else than `prepare` has sharded.

    Args:
        model: Its outermost unit.
    """
    return _described(model, _seen_layout(model))


def _described(model: nn.Module, layout: dict[str, Any]) -> ShardingDescription:
    if not is_unit(model):  # else it was compiled before, and the units begin with what came out
        model = unwrapped(model)
    named, modules = dict(named_parameters(model)), list(model.named_modules())
    unsharded = layout.get("unsharded", ())
    if isinstance(model, FullyShardedDataParallel):
        version, inside, own = 1, model.module, _fsdp1_settings(model)
        (root, *units), held = fsdp1_units(model), list(flat_parameters(model))
    else:
        version, inside, own = 2, model, _fsdp2_settings(model)
        (root, *units), held = fsdp2_units(model), [_held(p) for name, p in named.items() if name not in unsharded]
    kept: Counter[str] = Counter()
    for dtype, size, _ in held:
        kept[dtype_name(dtype) or ""] += size
    held += [_held(named[name]) for name in unsharded]
    split = tuple(name for name, param in named.items() if splits_layer(param))
    inner = any("forward" in m.__dict__ and _is_compiled(m) for _, m in modules if m is not inside)
    return ShardingDescription(
        model=own_class(inside),
        version=version,
        units=tuple(units),
        root=root,
        parameters=sum(size for _, size, _ in held),
        trained=sum(size for _, size, trained in held if trained),
        kept=dict(kept),
        frozen=tuple(name for name, param in named.items() if not param.requires_grad),
        checkpointed=tuple(clean_name(name) for name, module in modules if isinstance(module, CheckpointWrapper)),
        activations_offloaded=any(isinstance(module, OffloadWrapper) for _, module in modules),
        compiled="model" if _is_compiled(inside) else "blocks" if inner else None,
        split=split,
        alike=tuple(name for name in named if name not in split) if split else (),
        **layout,
        **own,
    )


def _held(param: nn.Parameter) -> tuple[torch.dtype, int, bool]:
    return param.dtype, param.numel(), param.requires_grad


def _word(name: str | None) -> str:
    return {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}.get(name or "", name or "")


def fsdp2_units(model: nn.Module) -> Iterator[ShardedUnit]:
    """Yield the units of an FSDP2 model, the root first."""
    for name, module in model.named_modules():
        if not is_unit(module):
            continue
        groups = param_groups(module)
        policy = mixed_precision_of(groups[0]) if groups else None
        after = groups[0].post_forward_mesh_info if groups else None
        size = 0 if after is None else int(after.shard_mesh_size)  # 0: it stays gathered after forward
        yield ShardedUnit(
            name=clean_name(name),
            kind=own_class(module),
            parameters=sum(prod(full_size(param)) for group in groups for param in group.fsdp_params),
            reshard_after_forward=size != 0 and (size == groups[0].mesh_info.shard_mesh_size or size),
            compute=dtype_name(policy.param_dtype) if policy else None,
            reduce=dtype_name(policy.reduce_dtype) if policy else None,
        )


def fsdp1_units(model: nn.Module) -> Iterator[ShardedUnit]:
    """Yield the units of an FSDP1 model, the root first."""
    for name, module in model.named_modules():
        if not isinstance(module, FullyShardedDataParallel):
            continue
        flat = flat_parameter(module)
        yield ShardedUnit(
            name=clean_name(name),
            kind=own_class(module.module),
            parameters=sum(map(prod, flat.shapes)) if flat else 0,
            reshard_after_forward=module.sharding_strategy.name in ("FULL_SHARD", "HYBRID_SHARD"),
            compute=dtype_name(module.mixed_precision.param_dtype),
            reduce=dtype_name(module.mixed_precision.reduce_dtype),
        )


def flat_parameters(model: nn.Module) -> Iterator[tuple[torch.dtype, int, bool]]:
    """Yield dtype, size and whether it gets a gradient, of each full parameter in FSDP1's flat ones."""
    for wrapper in fsdp1_wrappers(model):
        flat = flat_parameter(wrapper)
        if flat is not None:
            flags = [p.requires_grad for p in flat.params] or [flat.tensor.requires_grad] * len(flat.shapes)
            for shape, trained in zip(flat.shapes, flags, strict=True):
                yield flat.tensor.dtype, prod(shape), trained


def _is_compiled(module: nn.Module) -> bool:
    """Return whether torch.compile made the module's forward."""
    return isinstance(module.__dict__.get("forward"), CompiledForward)


def _fsdp1_settings(model: FullyShardedDataParallel) -> dict[str, Any]:
    """Return what holds for an FSDP1 model as one, by the names of the description."""
    ahead = model.backward_prefetch
    return {
        "output": None,
        "buffers": dtype_name(model.mixed_precision.buffer_dtype),
        "forward_prefetch": bool(model.forward_prefetch),
        "backward_prefetch": "NO_PREFETCH" if ahead is None else ahead.name,
        "offloaded": model.cpu_offload.offload_params,
    }


def _fsdp2_settings(model: nn.Module) -> dict[str, Any]:
    """Return what holds for an FSDP2 model as one, by the names of the description."""
    groups = param_groups(model)
    return {
        "output": dtype_name(root_mixed_precision(model).output_dtype),
        "buffers": None,
        "forward_prefetch": prefetches_forward(model),
        "backward_prefetch": "BACKWARD_PRE",  # by itself, in the order that forward ran in
        "offloaded": bool(groups) and isinstance(groups[0].offload_policy, CPUOffloadPolicy),
    }


def own_class(module: Any) -> str:
    """Return the name of the user's class, inside of what checkpointing and sharding put around it."""
    while isinstance(module, CheckpointWrapper | OffloadWrapper):
        module = checkpointed_module(module)
    return class_name(module)


def dtype_name(dtype: torch.dtype | None) -> str | None:
    """Return torch's name of a dtype."""
    return None if dtype is None else str(dtype).removeprefix("torch.")


def _kept_layout(prepared: ShardedModel) -> dict[str, Any]:
    """Return what a description needs to know of a model that `prepare` sharded, beside its units."""
    layout = {
        "strategy": prepared.settings.strategy,
        "mesh": dict(zip(prepared.mesh.mesh_dim_names or ("ranks",), prepared.mesh.shape, strict=True)),
        "device": str(prepared.device),
        "tied": prepared.tied,
        "ignored": prepared.ignored,
        "unsharded": tuple(sorted(prepared.left_out)),
        "methods": prepared.methods,
        "float8": prepared.converted,
    }
    if prepared.sequences is not None:
        layout |= {"context": prepared.sequences.axis.size(), "attention": prepared.sequences.way}
    return layout if prepared.split is None else layout | {"plan": prepared.split.origin}


def _seen_layout(model: nn.Module) -> dict[str, Any]:
    """Return the same for a model that something else has sharded, as its units show it."""
    device = {"device": str(next(parameters_of(model)).device)}
    if isinstance(model, FullyShardedDataParallel):
        ranks = dist.get_world_size(model.process_group)
        return device | {"strategy": model.sharding_strategy.name.lstrip("_"), "mesh": {"ranks": ranks}}
    named = dict(named_parameters(model))
    sharded = {name: param for name, param in named.items() if isinstance(param, DTensor)}
    mesh = max((param.device_mesh for param in sharded.values()), key=lambda mesh: mesh.ndim)
    (_, *units) = fsdp2_units(model)
    freed = not units or any(unit.reshard_after_forward for unit in units)  # the root stays gathered either way
    strategy = "FULL_SHARD" if freed else "SHARD_GRAD_OP"
    if data_mesh(mesh).ndim > 1:
        strategy = "HYBRID_SHARD" if freed else "HYBRID_SHARD_ZERO2"
    names = mesh.mesh_dim_names or tuple(f"ranks{axis}" for axis in range(mesh.ndim))
    return device | {
        "strategy": strategy,
        "mesh": dict(zip(names, mesh.shape, strict=True)),
        "tied": tied_names(model),
        "unsharded": tuple(sorted(named.keys() - sharded.keys())),
    }


_SMALL = 10_000_000
"""Parameters up to which models share a line, if there are several."""
_about: list[str | None] = []
_waiting: list[tuple[ShardingDescription, str]] = []
_waits: list[bool] = []


@contextmanager
def announcing(about: str | None) -> Iterator[None]:
    """Add to the lines of models that are sharded inside for whom it is done; None prints nothing of them."""
    _about.append(about)
    try:
        yield
    finally:
        _about.pop()


def announce(description: ShardingDescription, about: str | None = None) -> None:
    """Print how a model is sharded, or remember it until `print_waiting`."""
    if about is None and _about:
        about = _about[-1]
        if about is None:
            return
    _waiting.append((description, about or ""))
    if not _waits:
        print_waiting()


def wait_for_others() -> None:
    """Print nothing from now on until `print_waiting`, so that several models can share a line."""
    _waits.append(True)


def print_waiting() -> None:
    """Print what was remembered."""
    waiting, _waiting[:] = list(_waiting), []
    alike = {(each.version, each.strategy, tuple(each.mesh.items()), *sorted(each.kept)) for each, _ in waiting}
    if len(waiting) > 1 and len(alike) == 1 and all(each.parameters <= _SMALL for each, _ in waiting):
        first, about = waiting[0]
        kinds = ", ".join(
            f"{n} x {kind}" if n > 1 else kind for kind, n in Counter(e.model for e, _ in waiting).items()
        )
        size = count(sum(each.parameters for each, _ in waiting))
        messages.say(f"sharded {len(waiting)} models: {kinds}, {size} parameters, {first.layout()}{_ended(about)}")
        return
    for each, about in waiting:
        messages.say(each.line() + _ended(about))


def _ended(about: str) -> str:
    return about and f", {about}"
