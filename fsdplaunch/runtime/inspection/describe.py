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

from fsdplaunch.display_text import listed, short_count
from fsdplaunch.errors import ShardingError
from fsdplaunch.runtime import messages
from fsdplaunch.runtime.inspection import (
    clean_name,
    named_parameters,
    parameters_of,
    tied_names,
    unwrapped,
)
from fsdplaunch.runtime.inspection.units import fsdp1_wrappers, is_unit, refuse_of_xla
from fsdplaunch.runtime.sharding.compute import CompiledForward
from fsdplaunch.runtime.sharding.mesh import TENSOR, data_mesh, splits_layer
from fsdplaunch.runtime.sharding.registry import registered
from fsdplaunch.runtime.sharding.settings import HYBRID
from fsdplaunch.runtime.sharding.wrap import class_name
from fsdplaunch.runtime.torch_internals.fsdp import (
    flat_parameter,
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
        size = f"{short_count(self.parameters)} parameters"
        words = f"sharded {self.model}: {units or 'one unit'}, {size}, {self.layout()}"
        return "; ".join([words, *(f"{about}: {text}" for about, text in self._remarks() if text)])

    def layout(self) -> str:
        """Return over how many ranks, how, and in which dtypes."""
        uses = ((self.root.compute, "compute"), (self.root.reduce, "reduce"), (self.output, "out"))
        words = [
            f"FSDP{self.version} {self.strategy} over {' x '.join(map(str, self.mesh.values()))} ranks",
            f"{'/'.join(sorted(map(_word, self.kept)))} kept",
            *(f"{_word(dtype)} {use}" for dtype, use in uses if dtype),
        ]
        return ", ".join(words)

    def _remarks(self) -> Iterator[tuple[str, str]]:
        if self.split:
            total = len(self.split) + len(self.alike)
            by = f", by {self.plan}" if self.plan else ""
            yield "layers split", f"{len(self.split)} of {total} parameters over {self.mesh.get(TENSOR)} ranks{by}"
        by = "" if self.attention == "auto" else f", attention by {self.attention}"
        yield "sequences split", f"over {self.context} ranks inside the blocks{by}" if self.context > 1 else ""
        yield "not sharded", listed(self.ignored or self.unsharded, 4)
        yield "frozen", f"{short_count(self.parameters - self.trained)} parameters" if self.frozen else ""
        where = ", their inputs in host memory" if self.activations_offloaded else ""
        again = f"{len(self.checkpointed)} modules{where}" if self.checkpointed else ""
        yield "activation checkpointing", again
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
    if prepared.split is not None:
        layout |= {"plan": prepared.split.origin}
    return _described(model, layout)


def describe_seen(model: nn.Module) -> ShardingDescription:
    """Describe how a model is sharded, by its outermost unit, that something else than `prepare` has sharded."""
    layout: dict[str, Any] = {"device": str(next(parameters_of(model)).device)}
    if isinstance(model, FullyShardedDataParallel):
        layout |= {"strategy": model.sharding_strategy.name.lstrip("_")}
        return _described(model, layout | {"mesh": {"ranks": dist.get_world_size(model.process_group)}})
    named = dict(named_parameters(model))
    sharded = {name: param for name, param in named.items() if isinstance(param, DTensor)}
    mesh = max((param.device_mesh for param in sharded.values()), key=lambda mesh: mesh.ndim)
    (_, *units) = _fsdp2_units(model)
    freed = not units or any(unit.reshard_after_forward for unit in units)  # the root stays gathered either way
    names = ("FULL_SHARD", "SHARD_GRAD_OP") if data_mesh(mesh).ndim == 1 else HYBRID
    axes = mesh.mesh_dim_names or tuple(f"ranks{axis}" for axis in range(mesh.ndim))
    layout |= {
        "strategy": names[0] if freed else names[1],
        "mesh": dict(zip(axes, mesh.shape, strict=True)),
        "tied": tied_names(model),
        "unsharded": tuple(sorted(named.keys() - sharded.keys())),
    }
    return _described(model, layout)


def _described(model: nn.Module, layout: dict[str, Any]) -> ShardingDescription:
    if not is_unit(model):  # else it was compiled before, and the units begin with what came out
        model = unwrapped(model)
    named, modules = dict(named_parameters(model)), list(model.named_modules())
    whole = [named[name] for name in layout.get("unsharded", ())]
    own: dict[str, Any]
    if isinstance(model, FullyShardedDataParallel):
        version, inside = 1, model.module
        (root, *units), held = _fsdp1_units(model), list(_flat_parameters(model))
        ahead = model.backward_prefetch
        own = {
            "output": None,
            "buffers": _dtype_name(model.mixed_precision.buffer_dtype),
            "forward_prefetch": bool(model.forward_prefetch),
            "backward_prefetch": "NO_PREFETCH" if ahead is None else ahead.name,
            "offloaded": model.cpu_offload.offload_params,
        }
    else:
        version, inside, groups = 2, model, param_groups(model)
        sharded = [param for name, param in named.items() if name not in layout.get("unsharded", ())]
        (root, *units), held = _fsdp2_units(model), [(p.dtype, p.numel(), p.requires_grad) for p in sharded]
        own = {
            "output": _dtype_name(root_mixed_precision(model).output_dtype),
            "buffers": None,
            "forward_prefetch": prefetches_forward(model),
            "backward_prefetch": "BACKWARD_PRE",  # by itself, in the order that forward ran in
            "offloaded": bool(groups) and isinstance(groups[0].offload_policy, CPUOffloadPolicy),
        }
    kept: Counter[str] = Counter()
    for dtype, size, _ in held:
        kept[_dtype_name(dtype) or ""] += size
    held += [(param.dtype, param.numel(), param.requires_grad) for param in whole]
    split = tuple(name for name, param in named.items() if splits_layer(param))
    compiled = [module for _, module in modules if isinstance(module.__dict__.get("forward"), CompiledForward)]
    return ShardingDescription(
        model=_own_class(inside),
        version=version,
        units=tuple(units),
        root=root,
        parameters=sum(size for _, size, _ in held),
        trained=sum(size for _, size, trained in held if trained),
        kept=dict(kept),
        frozen=tuple(name for name, param in named.items() if not param.requires_grad),
        checkpointed=tuple(clean_name(name) for name, module in modules if isinstance(module, CheckpointWrapper)),
        activations_offloaded=any(isinstance(module, OffloadWrapper) for _, module in modules),
        compiled=("model" if inside in compiled else "blocks") if compiled else None,
        split=split,
        alike=tuple(name for name in named if name not in split) if split else (),
        **layout,
        **own,
    )


def _word(name: str | None) -> str:
    return {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}.get(name or "", name or "")


def _fsdp2_units(model: nn.Module) -> Iterator[ShardedUnit]:
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
            kind=_own_class(module),
            parameters=sum(prod(param.sharded_param.shape) for group in groups for param in group.fsdp_params),
            reshard_after_forward=size != 0 and (size == groups[0].mesh_info.shard_mesh_size or size),
            compute=_dtype_name(policy.param_dtype) if policy else None,
            reduce=_dtype_name(policy.reduce_dtype) if policy else None,
        )


def _fsdp1_units(model: nn.Module) -> Iterator[ShardedUnit]:
    """Yield the units of an FSDP1 model, the root first."""
    for name, module in model.named_modules():
        if not isinstance(module, FullyShardedDataParallel):
            continue
        flat = flat_parameter(module)
        yield ShardedUnit(
            name=clean_name(name),
            kind=_own_class(module.module),
            parameters=sum(map(prod, flat.shapes)) if flat else 0,
            reshard_after_forward=module.sharding_strategy.name in ("FULL_SHARD", "HYBRID_SHARD"),
            compute=_dtype_name(module.mixed_precision.param_dtype),
            reduce=_dtype_name(module.mixed_precision.reduce_dtype),
        )


def _flat_parameters(model: nn.Module) -> Iterator[tuple[torch.dtype, int, bool]]:
    """Yield dtype, size and whether it gets a gradient, of each full parameter in FSDP1's flat ones."""
    for wrapper in fsdp1_wrappers(model):
        flat = flat_parameter(wrapper)
        if flat is not None:
            flags = [p.requires_grad for p in flat.params] or [flat.tensor.requires_grad] * len(flat.shapes)
            for shape, trained in zip(flat.shapes, flags, strict=True):
                yield flat.tensor.dtype, prod(shape), trained


def _own_class(module: Any) -> str:
    """Return the name of the user's class, inside of what checkpointing and sharding put around it."""
    while isinstance(module, CheckpointWrapper | OffloadWrapper):
        module = checkpointed_module(module)
    return class_name(module)


def _dtype_name(dtype: torch.dtype | None) -> str | None:
    return None if dtype is None else str(dtype).removeprefix("torch.")


_SMALL = 10_000_000  # parameters up to which models share a line, if there are several
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
    """Print how a model is sharded, and for whom or by whom; or remember it until `print_waiting`."""
    said = about or (_about[-1] if _about else "")
    if said is not None:
        _waiting.append((description, said and f", {said}"))
        if not _waits:
            print_waiting()


def wait_for_others() -> None:
    """Print nothing from now on until `print_waiting`, so that several models can share a line."""
    _waits.append(True)


def print_waiting() -> None:
    """Print what was remembered: small models that are sharded alike in one line."""
    waiting, _waiting[:] = list(_waiting), []
    alike = {(each.version, each.strategy, tuple(each.mesh.items()), *sorted(each.kept)) for each, _ in waiting}
    if len(waiting) > 1 and len(alike) == 1 and all(each.parameters <= _SMALL for each, _ in waiting):
        by_class = Counter(each.model for each, _ in waiting)
        kinds = ", ".join(f"{number} x {kind}" if number > 1 else kind for kind, number in by_class.items())
        size = short_count(sum(each.parameters for each, _ in waiting))
        first, said = waiting[0]
        messages.say(f"sharded {len(waiting)} models: {kinds}, {size} parameters, {first.layout()}{said}")
        return
    for each, said in waiting:
        messages.say(each.line() + said)
