"""Where each parameter lies in FSDP1's flat parameters: only the model knows, and a merge needs it."""

from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from fsdplaunch.runtime.inspection.parameter_names import clean_name, joined
from fsdplaunch.runtime.torch_internals.fsdp.fsdp1 import FLAT_PARAMETER, FlatParameter, flat_parameter


def flat_layout(model: nn.Module) -> dict[str, Any]:
    """Say what each flat parameter of a model is made of, in plain data.

    Args:
        model: Sharded by FSDP1, with flat parameters (`use_orig_params` false).

    Returns:
        For each flat parameter, by its name in a local state dict: `ranks`, which hold its parts in this order;
        `part`, the elements of each part but the last; and `runs`, the whole's runs of elements in their order,
        each as `[names, shape]`: a parameter with all its names, or padding without any. One that holds a
        parameter in another order than row by row is left out.
    """
    return {
        joined(clean_name(name), FLAT_PARAMETER): layout
        for name, unit in model.named_modules()
        if isinstance(unit, FullyShardedDataParallel) and (layout := _describe(unit, clean_name(name))) is not None
    }


def _describe(unit: FullyShardedDataParallel, prefix: str) -> dict[str, Any] | None:
    flat = flat_parameter(unit)
    if flat is None or not all(flat.is_contiguous):
        return None
    return {
        "ranks": dist.get_process_group_ranks(unit.process_group),
        "part": flat.shard_numel,
        "runs": list(_runs(flat, prefix)),
    }


def _runs(flat: FlatParameter, prefix: str) -> Iterator[list[Any]]:
    """Yield the runs of a flat parameter; a tied parameter lies there once and has several names."""
    names: dict[tuple[int, str], list[str]] = {
        (id(info.module), info.param_name): [fqn] for info, fqn in zip(flat.infos, flat.names, strict=True)
    }
    for shared in flat.shared:
        first = names[id(shared.prim_module), shared.prim_param_name]
        first.append(joined(shared.module_name, shared.param_name))
    known = zip(names.values(), flat.shapes, strict=True)
    for count, is_padding in zip(flat.counts, flat.is_padding, strict=True):
        if is_padding:
            yield [[], [count]]
        else:
            own, shape = next(known)
            yield [[joined(prefix, clean_name(name)) for name in own], list(shape)]
