"""`describe`: how a model is sharded, read back from torch's own objects and not from the configuration."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from fsdplaunch.errors import ShardingError
from fsdplaunch.name_lists import listed
from fsdplaunch.runtime.inspection.introspect import (
    ShardedUnit,
    dtype_name,
    flat_parameters,
    fsdp1_settings,
    fsdp1_units,
    fsdp2_settings,
    fsdp2_units,
    own_class,
    wrappers,
)
from fsdplaunch.runtime.inspection.layout import Layout, kept_layout, seen_layout
from fsdplaunch.runtime.inspection.parameter_names import count, named_parameters, unwrapped
from fsdplaunch.runtime.inspection.units import is_unit
from fsdplaunch.runtime.inspection.xla_models import refuse_of_xla
from fsdplaunch.runtime.sharding.blocks import class_name
from fsdplaunch.runtime.sharding.mesh import TENSOR, splits_layer
from fsdplaunch.runtime.sharding.registry import registered


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
    tied: tuple[tuple[str, ...], ...]
    ignored: tuple[str, ...]
    unsharded: tuple[str, ...]
    frozen: tuple[str, ...]
    checkpointed: tuple[str, ...]
    activations_offloaded: bool
    forward_prefetch: bool
    backward_prefetch: str
    offloaded: bool
    compiled: str | None
    float8: int
    methods: tuple[str, ...]
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

    def lines(self) -> Iterator[str]:
        """Yield the same in full, a line for everything: a headline, then remarks."""
        first, *_ = self.line().split("; ")
        yield first
        for about, text in (*self._details(), *self._remarks()):
            if text:
                yield f"  {about}: {text}"

    def _details(self) -> Iterator[tuple[str, str]]:
        if self.units:
            left = 100 * self.root.parameters // max(self.parameters, 1)
            yield "units", f"{_sizes(self.units)} parameters, {count(self.root.parameters)} ({left} %) in the root"
        yield "the same on each of these", listed(self.alike, 4)
        yield "tied", "; ".join(" = ".join(names) for names in self.tied)
        ahead = ["in forward"] if self.forward_prefetch else []
        ahead += ["in backward"] if self.backward_prefetch != "NO_PREFETCH" else []
        yield "next unit gathered ahead", " and ".join(ahead) if self.units else ""
        yield "gathered for, beside forward", ", ".join(self.methods)

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
    return _described(model, kept_layout(prepared))


def describe_seen(model: nn.Module) -> ShardingDescription:
    """Describe how a model is sharded that something else than `prepare` has sharded.

    Args:
        model: Its outermost unit.
    """
    return _described(model, seen_layout(model))


def _described(model: nn.Module, layout: Layout) -> ShardingDescription:
    if not is_unit(model):  # else it was compiled before, and the units begin with what came out
        model = unwrapped(model)
    is_fsdp1 = isinstance(model, FullyShardedDataParallel)
    (root, *units) = fsdp1_units(model) if is_fsdp1 else fsdp2_units(model)
    named = dict(named_parameters(model))
    split = tuple(name for name, param in named.items() if splits_layer(param))
    return ShardingDescription(
        model=own_class(model.module if isinstance(model, FullyShardedDataParallel) else model),
        version=1 if is_fsdp1 else 2,
        strategy=layout.strategy,
        mesh=layout.mesh,
        device=layout.device,
        units=tuple(units),
        root=root,
        tied=layout.tied,
        ignored=layout.ignored,
        unsharded=tuple(sorted(layout.left_out)),
        methods=layout.methods,
        float8=layout.float8,
        plan=layout.plan,
        context=layout.context,
        attention=layout.attention,
        split=split,
        alike=tuple(name for name in named if name not in split) if split else (),
        **_counted(model, named, layout, sum(unit.parameters for unit in (root, *units))),
        **wrappers(model),
        **(fsdp1_settings(model) if isinstance(model, FullyShardedDataParallel) else fsdp2_settings(model)),
    )


def _counted(model: nn.Module, named: dict[str, nn.Parameter], layout: Layout, in_units: int) -> dict[str, Any]:
    """Return what is counted from the parameters themselves."""
    apart = {name: named[name] for name in layout.left_out}
    sharded = [param for name, param in named.items() if name not in apart]
    still = sum(param.numel() for param in apart.values() if not param.requires_grad)
    if isinstance(model, FullyShardedDataParallel):
        flat = list(flat_parameters(model))
    else:
        flat = [(param.dtype, param.numel(), param.requires_grad) for param in sharded]
    kept: Counter[str] = Counter()
    for dtype, size, trained in flat:
        kept[dtype_name(dtype) or ""] += size
        still += 0 if trained else size
    total = in_units + sum(param.numel() for param in apart.values())
    return {
        "parameters": total,
        "trained": total - still,
        "kept": dict(kept),
        "frozen": tuple(name for name, param in named.items() if not param.requires_grad),
    }


def _sizes(units: tuple[ShardedUnit, ...]) -> str:
    sizes = sorted({unit.parameters for unit in units})
    return count(sizes[0]) if len(sizes) == 1 else f"{count(sizes[0])} to {count(sizes[-1])}"


def _word(name: str | None) -> str:
    return {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}.get(name or "", name or "")
