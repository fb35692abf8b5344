"""`describe`: how a model is sharded, read back from torch's own objects and not from what was asked for."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper, OffloadWrapper
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from fsdplaunch.errors import ShardingError
from fsdplaunch.runtime.blocks import class_name
from fsdplaunch.runtime.compiling import CompiledForward
from fsdplaunch.runtime.names import clean_name, count, named_parameters, unwrapped
from fsdplaunch.runtime.prepared import Prepared, prepared_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Parameters that are gathered and freed together.

    Attributes:
        name: The module's clean name; empty for the root.
        kind: The module's class, as the user wrote it.
        parameters: How many numbers it holds over all ranks of one copy.
        reshard_after_forward: Whether it is freed after forward, or the number of ranks it is then spread over.
        compute: Number format it is gathered and computed in, or None for the one it is kept in.
        reduce: Number format its gradients are summed in, or None for the one they have.
    """

    name: str
    kind: str
    parameters: int
    reshard_after_forward: bool | int
    compute: str | None
    reduce: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """How one model is sharded. Parameters are counted in numbers, formats are torch's names.

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
        kept: Parameters by the number format their shards are kept in.
        output: Number format of the model's outputs, or None for the one they have.
        buffers: Number format of buffers in forward (version 1), or None for their own.
        tied: Names of each parameter that has several.
        ignored: Names of the modules that are not sharded.
        whole: Names of the parameters that are not sharded, each rank holding all of them.
        frozen: Names of the parameters that get no gradients.
        checkpointed: Names of the modules that compute their activations again in backward.
        activations_offloaded: Whether what these keep goes to host memory.
        forward_prefetch: Whether a unit gathers the next one while it computes forward.
        backward_prefetch: When the next unit is gathered in backward.
        offloaded: Whether shards are kept in host memory.
        compiled: What is compiled: `blocks`, `model`, or None.
        float8: Linear layers that compute in float8.
        methods: Methods beside forward that parameters are gathered for.
    """

    model: str
    version: int
    strategy: str
    mesh: dict[str, int]
    device: str
    parameters: int
    trained: int
    units: tuple[Unit, ...]
    root: Unit
    kept: dict[str, int]
    output: str | None
    buffers: str | None
    tied: tuple[tuple[str, ...], ...]
    ignored: tuple[str, ...]
    whole: tuple[str, ...]
    frozen: tuple[str, ...]
    checkpointed: tuple[str, ...]
    activations_offloaded: bool
    forward_prefetch: bool
    backward_prefetch: str
    offloaded: bool
    compiled: str | None
    float8: int
    methods: tuple[str, ...]

    def lines(self) -> Iterator[str]:
        """The same for people: one line, and one more for everything out of the ordinary."""
        units = ", ".join(f"{n} x {kind}" for kind, n in Counter(unit.kind for unit in self.units).items())
        words = [
            f"sharded {self.model}: {units or 'one unit'}",
            f"{count(self.parameters)} parameters",
            f"FSDP{self.version} {self.strategy} over {' x '.join(map(str, self.mesh.values()))} ranks",
            f"{'/'.join(sorted(map(_word, self.kept)))} kept",
        ]
        words += [f"{_word(self.root.compute)} compute"] if self.root.compute else []
        words += [f"{_word(self.root.reduce)} reduce"] if self.root.reduce else []
        words += [f"{_word(self.output)} out"] if self.output else []
        yield ", ".join(words)
        for about, said in self._remarks():
            if said:
                yield f"  {about}: {said}"

    def _remarks(self) -> Iterator[tuple[str, str]]:
        if self.units:
            left = 100 * self.root.parameters // max(self.parameters, 1)
            yield "units", f"{_sizes(self.units)} parameters, {count(self.root.parameters)} ({left} %) in the root"
        yield "tied", "; ".join(" = ".join(names) for names in self.tied)
        yield "not sharded", _some(self.ignored or self.whole)
        yield "frozen", f"{count(self.parameters - self.trained)} parameters" if self.frozen else ""
        again = f"{len(self.checkpointed)} modules" if self.checkpointed else ""
        where = ", what they keep in host memory" if self.activations_offloaded else ""
        yield "activation checkpointing", again and again + where
        yield "compiled", self.compiled or ""
        yield "float8", f"{self.float8} linear layers" if self.float8 else ""
        ahead = ["in forward"] if self.forward_prefetch else []
        ahead += ["in backward"] if self.backward_prefetch != "NO_PREFETCH" else []
        yield "next unit gathered ahead", " and ".join(ahead) if self.units else ""
        yield "shards in host memory", "yes" if self.offloaded else ""
        yield "gathered for, beside forward", ", ".join(self.methods)


def describe(model: nn.Module) -> Description:
    """Say how a prepared model is sharded.

    Args:
        model: What `prepare` returned, or what torch.compile made of it.

    Raises:
        ShardingError: The model did not come from `prepare`.
    """
    prepared = prepared_of(model)
    if prepared is None:
        msg = f"this {class_name(model)} was not sharded by prepare"
        raise ShardingError(msg, hint="describe what fsdplaunch.prepare returns")
    model = unwrapped(model)
    version1 = isinstance(model, FullyShardedDataParallel)
    (root, *units) = _units_1(model) if version1 else _units_2(model)
    named = dict(named_parameters(model))
    return Description(
        model=_own_class(model.module if isinstance(model, FullyShardedDataParallel) else model),
        version=1 if version1 else 2,
        strategy=prepared.settings.strategy,
        mesh=dict(zip(prepared.mesh.mesh_dim_names or ("ranks",), prepared.mesh.shape, strict=True)),
        device=str(prepared.device),
        units=tuple(units),
        root=root,
        tied=prepared.tied,
        ignored=prepared.ignored,
        whole=tuple(sorted(prepared.left_out)),
        methods=prepared.methods,
        float8=prepared.converted,
        **_counted(model, named, prepared, sum(unit.parameters for unit in (root, *units))),
        **_wrapped(model),
        **(_of_version_1(model) if isinstance(model, FullyShardedDataParallel) else _of_version_2(model)),
    )


def _counted(
    model: nn.Module, named: dict[str, nn.Parameter], prepared: Prepared, in_units: int
) -> dict[str, Any]:
    """What the parameters themselves say."""
    apart = {name: named[name] for name in prepared.left_out}
    sharded = [param for name, param in named.items() if name not in apart]
    still = sum(param.numel() for param in apart.values() if not param.requires_grad)
    if isinstance(model, FullyShardedDataParallel):
        flat = list(_numbers_1(model))
    else:
        flat = [(param.dtype, param.numel(), param.requires_grad) for param in sharded]
    kept: Counter[str] = Counter()
    for dtype, size, trained in flat:
        kept[_name(dtype) or ""] += size
        still += 0 if trained else size
    total = in_units + sum(param.numel() for param in apart.values())
    return {
        "parameters": total,
        "trained": total - still,
        "kept": dict(kept),
        "frozen": tuple(name for name, param in named.items() if not param.requires_grad),
    }


def _units_2(model: nn.Module) -> Iterator[Unit]:
    for name, module in model.named_modules():
        if not isinstance(module, FSDPModule):
            continue
        groups: Any = module._get_fsdp_state()._fsdp_param_groups
        policy: Any = groups[0].mp_policy if groups else None
        after = groups[0].post_forward_mesh_info if groups else None
        yield Unit(
            name=clean_name(name),
            kind=_own_class(module),
            parameters=sum(prod(param._orig_size) for group in groups for param in group.fsdp_params),
            reshard_after_forward=_resharded(after, groups),
            compute=_name(policy.param_dtype) if policy else None,
            reduce=_name(policy.reduce_dtype) if policy else None,
        )


def _resharded(after: Any, groups: Any) -> bool | int:
    """Whether a version 2 unit is freed after forward: to all ranks of a copy, or to a part of them."""
    if after is None:
        return False
    size = int(after.shard_mesh_size)
    return True if size == groups[0].mesh_info.shard_mesh_size else size


def _units_1(model: nn.Module) -> Iterator[Unit]:
    for name, module in model.named_modules():
        if not isinstance(module, FullyShardedDataParallel):
            continue
        handle: Any = module._handle
        yield Unit(
            name=clean_name(name),
            kind=_own_class(module.module),
            parameters=sum(map(prod, handle.flat_param._shapes)) if handle else 0,
            reshard_after_forward=module.sharding_strategy.name in ("FULL_SHARD", "HYBRID_SHARD"),
            compute=_name(module.mixed_precision.param_dtype),
            reduce=_name(module.mixed_precision.reduce_dtype),
        )


def _numbers_1(model: nn.Module) -> Iterator[tuple[torch.dtype, int, bool]]:
    """Format, size and whether it gets a gradient, of each whole parameter in version 1's flat ones."""
    for module in model.modules():
        handle: Any = module._handle if isinstance(module, FullyShardedDataParallel) else None
        if handle is None:
            continue
        flat = handle.flat_param
        flags = [p.requires_grad for p in flat._params or ()] or [flat.requires_grad] * len(flat._shapes)
        for shape, trained in zip(flat._shapes, flags, strict=True):
            yield flat.dtype, prod(shape), trained


def _wrapped(model: nn.Module) -> dict[str, Any]:
    modules = list(model.named_modules())
    again = [clean_name(name) for name, module in modules if isinstance(module, CheckpointWrapper)]
    whole = model.module if isinstance(model, FullyShardedDataParallel) else model
    inner = any("forward" in m.__dict__ and _is_compiled(m) for _, m in modules if m is not whole)
    return {
        "checkpointed": tuple(again),
        "activations_offloaded": any(isinstance(module, OffloadWrapper) for _, module in modules),
        "compiled": "model" if _is_compiled(whole) else "blocks" if inner else None,
    }


def _is_compiled(module: nn.Module) -> bool:
    """Whether torch.compile made the module's forward."""
    return isinstance(module.__dict__.get("forward"), CompiledForward)


def _of_version_1(model: FullyShardedDataParallel) -> dict[str, Any]:
    ahead = model.backward_prefetch
    return {
        "output": None,
        "buffers": _name(model.mixed_precision.buffer_dtype),
        "forward_prefetch": bool(model.forward_prefetch),
        "backward_prefetch": "NO_PREFETCH" if ahead is None else ahead.name,
        "offloaded": model.cpu_offload.offload_params,
    }


def _of_version_2(model: nn.Module) -> dict[str, Any]:
    state: Any = model._get_fsdp_state()  # type: ignore[operator]
    first: Any = next((p for p in model.parameters() if isinstance(p, DTensor)), None)
    groups = state._fsdp_param_groups
    return {
        "output": _name(state._mp_policy.output_dtype),
        "buffers": None,
        "forward_prefetch": bool(state._states_to_forward_prefetch),
        "backward_prefetch": "BACKWARD_PRE",  # by itself, in the order that forward ran in
        "offloaded": bool(groups) and isinstance(groups[0].offload_policy, CPUOffloadPolicy) and first is not None,
    }


def _own_class(module: Any) -> str:
    """The user's class, inside of what checkpointing and sharding put around a module or its class."""
    while isinstance(module, CheckpointWrapper | OffloadWrapper):
        module = module._checkpoint_wrapped_module
    module = unwrapped(module)
    kinds = type(module).__mro__
    return next(kind.__name__ for kind in kinds if not issubclass(kind, FSDPModule))


def _sizes(units: tuple[Unit, ...]) -> str:
    sizes = sorted({unit.parameters for unit in units})
    return count(sizes[0]) if len(sizes) == 1 else f"{count(sizes[0])} to {count(sizes[-1])}"


def _some(names: tuple[str, ...]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")  # noqa: PLR2004


def _name(dtype: torch.dtype | None) -> str | None:
    return None if dtype is None else str(dtype).removeprefix("torch.")


def _word(name: str | None) -> str:
    return {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}.get(name or "", name or "")
