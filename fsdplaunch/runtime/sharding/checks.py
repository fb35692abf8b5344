"""What must hold before a model is sharded and after: kinds of parameters, equal settings and values, no loss.

What does not is a ShardingError, on all ranks where they compare.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from fsdplaunch.display_text import listed
from fsdplaunch.errors import ShardingError
from fsdplaunch.runtime import messages
from fsdplaunch.runtime.collectives.rank_group import RankGroup
from fsdplaunch.runtime.inspection import (
    ModelTensor,
    clean_name,
    living_modules,
    named_parameters,
    parameters_of,
    unwrapped,
)
from fsdplaunch.runtime.inspection.units import fsdp1_wrappers, is_sharded, local_tensor
from fsdplaunch.runtime.messages import script_line
from fsdplaunch.runtime.sharding.mesh import data_mesh, groups_from_first, is_fake, splits_layer, tensor_mesh
from fsdplaunch.runtime.sharding.registry import AVERAGED, ShardedModel, fsdp1_units
from fsdplaunch.runtime.sharding.settings import Settings
from fsdplaunch.runtime.torch_internals.fsdp import is_in_flat_parameter, replica_group, shown_parameters
from fsdplaunch.runtime.torch_internals.tensors import inner_tensor


def check_settings(settings: Settings, mesh: DeviceMesh) -> None:
    """Check that every rank is about to do the same; with another strategy on one rank all would hang."""
    mine = {entry.name: _text_of(getattr(settings, entry.name)) for entry in fields(settings)}
    ranks = RankGroup(groups_from_first(mesh))
    theirs = ranks.from_first(mine)
    different = (
        f"{name} is {text} on the first rank and {mine.get(name)} on rank {dist.get_rank()}"
        for name, text in theirs.items()
        if mine.get(name) != text
    )
    mismatch = ranks.from_any(next(different, None))
    if mismatch is not None:
        msg = f"ranks would shard differently: {mismatch}"
        raise ShardingError(msg, hint="give all ranks the same configuration, and build the same plugin on each")


def _text_of(value: Any) -> str:
    """Return a setting as a text that is the same in every process."""
    if isinstance(value, nn.Module):
        return type(value).__name__
    if isinstance(value, tuple):
        return f"({', '.join(map(_text_of, value))})"
    if is_dataclass(value):
        return ", ".join(f"{entry.name}={_text_of(getattr(value, entry.name))}" for entry in fields(value))
    if callable(value):
        return f"the function {getattr(value, '__qualname__', type(value).__name__)}"
    return str(value)


def unequal(
    tensors: Mapping[str, torch.Tensor], groups: list[dist.ProcessGroup | None], device: torch.device
) -> list[str]:
    """Return the names, alike on every rank, of tensors whose bytes are not the same on all ranks of the groups.

    DTensors stand for this rank's shard. The device is where a collective's tensor can be.
    """
    if not tensors:
        return []
    sums = []
    for tensor in tensors.values():  # of bytes, eight at a time where possible; overflow does no harm
        data = inner_tensor(local_tensor(tensor)).contiguous().view(-1).view(torch.uint8)
        data = data.view(torch.int64) if data.numel() % 8 == 0 and data.storage_offset() % 8 == 0 else data
        sums.append(data.sum(dtype=torch.int64).to(device))
    low, high = extremes(torch.stack(sums), groups)
    differs = (low != high).tolist()
    return [name for name, differ in zip(tensors, differs, strict=True) if differ]


def extremes(
    tensor: torch.Tensor, groups: Iterable[dist.ProcessGroup | None]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the least and the largest that any rank of the groups has, element by element."""
    low, high = tensor.contiguous().clone(), tensor.contiguous().clone()
    for group in groups:
        dist.all_reduce(low, dist.ReduceOp.MIN, group=group)
        dist.all_reduce(high, dist.ReduceOp.MAX, group=group)
    return low, high


_Groups = tuple[dist.ProcessGroup | None, ...]


def check_trained(optimizer: Optimizer) -> None:
    """Check that ranks hold the same copies of what an optimizer trains, whoever sharded it.

    One that trains nothing of a sharded model may step on one rank alone, and is not looked at.
    """
    different = _unequal_copies([param for group in optimizer.param_groups for param in group["params"]])
    if far := [param for groups, param in different if _is_far(param, groups)]:
        msg = f"{script_line()}: ranks train different values of {_names(far)}, which is not divided over them"
        hint = "average its gradients (fsdplaunch.prepare does), or launch with --allow-unsharded"
        raise ShardingError(msg, hint=hint)
    if different:
        messages.say_unequal(f"ranks' copies of {_names([param for _, param in different])} differ by rounding")


def _unequal_copies(params: list[Any]) -> list[tuple[_Groups, Any]]:
    """Return those of some parameters that are not alike on the ranks that hold the same of them."""
    copies: dict[_Groups, dict[str, Any]] = {}
    for number, (groups, param) in enumerate(_copies(params)):
        copies.setdefault(groups, {})[str(number)] = param
    return [
        (groups, same[number])
        for groups, same in copies.items()
        for number in unequal(same, list(groups), local_tensor(next(iter(same.values()))).device)
    ]


def _copies(params: list[Any]) -> Iterator[tuple[_Groups, Any]]:
    """Yield each of some parameters that other ranks hold as well, with the groups of those ranks."""
    flat = {id(param): replica_group(unit) for unit in fsdp1_units for param in shown_parameters(unit)}
    held = params
    if not any(isinstance(param, DTensor) or id(param) in flat or hasattr(param, AVERAGED) for param in params):
        own = set(map(id, params))
        models = (list(parameters_of(each)) for each in living_modules() if is_sharded(each))
        held = [param for each in models if not own.isdisjoint(map(id, each)) for param in each]
    mesh = max((p.device_mesh for p in held if isinstance(p, DTensor)), key=DeviceMesh.size, default=None)
    everyone = (None,) if mesh is None else tuple(groups_from_first(mesh))
    for param in params if held else ():
        if isinstance(param, DTensor):
            axes = [axis for axis, placement in enumerate(param.placements) if placement.is_replicate()]
            yield from (((param.device_mesh.get_group(axis),), param) for axis in axes)
        elif not is_in_flat_parameter(param):
            yield everyone, param
        elif (group := flat.get(id(param))) is not None:
            yield (group,), param


def _is_far(param: torch.Tensor, groups: _Groups) -> bool:
    """Return whether copies differ by more than sums in another order bring; a collective may add in any."""
    low, high = extremes(inner_tensor(local_tensor(param)).float(), groups)
    bound = torch.finfo(param.dtype if param.is_floating_point() else high.dtype).eps ** 0.5
    return not bool((high - low).max() <= bound * high.abs().max())  # NaN is far from everything


def _names(params: list[Any]) -> str:
    named = [pair for each in living_modules() for pair in nn.Module.named_parameters(each)]
    found = [max((name for name, one in named if one is param), key=len, default="") for param in params]
    return listed([clean_name(name) or "a parameter" for name in found], 3)


def check_model(model: nn.Module, version: int) -> None:
    """Refuse, by name, what is sharded already or cannot be, and names that FSDP1 confuses when it loads."""
    if version == 1 and any(unwrapped(module) is not module for module in model.modules()):
        msg = "fsdp_version 1 cannot shard modules that torch.compile has wrapped"
        raise ShardingError(msg, hint="compile what prepare returns, or call module.compile() instead")
    for name, param in named_parameters(model):
        if isinstance(param, DTensor):
            msg = f"{name} is sharded already, but not all of {type(model).__name__} is"
            raise ShardingError(msg, hint="give prepare the model before any part of it is sharded")
    check_kinds(model)


def check_kinds(model: nn.Module) -> None:
    """Refuse parameters without a shape, and those of modules that compute with their own of them."""
    for name, module in model.named_modules():
        where = clean_name(name) or type(model).__name__
        params = list(parameters_of(module, recurse=False))
        if any(is_lazy(param) for param in params):
            msg = f"{where} has no shape before the model's first pass"
            raise ShardingError(msg, hint="run one batch through the model first")
        if params and isinstance(module, torch.jit.ScriptModule):
            msg = f"{where} is compiled by torch.jit.script, and its parameters cannot be sharded"
            hint = "train the model as it is written, or by torch.compile; script it afterwards"
            raise ShardingError(msg, hint=hint)


def check_dense(model: nn.Module, ignored: Collection[nn.Module]) -> None:
    """Refuse tables whose gradients are sparse: FSDP divides dense ones only, and fails in the first backward."""
    tables = (nn.Embedding, nn.EmbeddingBag)
    for name, module in model.named_modules():
        if isinstance(module, tables) and module.sparse and module.weight.requires_grad and module not in ignored:
            msg = f"{clean_name(name) or type(model).__name__} has sparse gradients, which FSDP cannot divide"
            raise ShardingError(msg, hint="build it with sparse=False, and train it with Adam, not SparseAdam")


def check_same_values(entries: Sequence[ModelTensor], mesh: DeviceMesh, device: torch.device) -> None:
    """Check that all ranks built the same values, where they are not to be sent from the first."""
    if is_fake(mesh):
        return
    different = unequal({e.name: e.tensor for e in entries if e.spec[2]}, groups_from_first(mesh), device)
    if different:
        msg = f"ranks hold different values of {listed(different, 1)}, and fsdp_sync_module_states is false"
        raise ShardingError(msg, hint="set it to true, or build the same values on every rank")


@contextmanager
def naming(what: str) -> Iterator[None]:
    """Turn torch's refusal to shard something into an error that names it."""
    try:
        yield
    except ShardingError:  # a ValueError, too, that says more
        raise
    except (ValueError, NotImplementedError, AssertionError, TypeError) as refusal:
        msg = f"torch cannot shard {what}: {str(refusal).splitlines()[0] if str(refusal) else 'no reason given'}"
        raise ShardingError(msg, hint="leave it out with fsdp_ignored_modules, or wrap other modules") from refusal


def check_sharded_model(model: nn.Module, prepared: ShardedModel, *, total: int) -> None:
    """Check that the shards of all ranks are the model, alike in all replicas and tied."""
    settings = prepared.settings
    named = dict(named_parameters(model))
    sharded = {name: param for name, param in named.items() if name not in prepared.left_out}
    if not is_fake(prepared.mesh):
        expected = total - sum(named[name].numel() for name in prepared.left_out)
        found = _count_over_ranks(sharded.values(), prepared)
        padded = settings.version == 1 and not settings.use_orig_params
        if found < expected or (found > expected and not padded):
            msg = f"the ranks hold {found} of {expected} parameters after sharding"
            hint = "this is a defect in sharding this model; try NO_WRAP or the other fsdp_version"
            raise ShardingError(msg, hint=hint)
        fsdp1_units.update(fsdp1_wrappers(model))
        if different := _unequal_copies([param for param in named.values() if not param.is_meta]):
            msg = f"replicas of {_names([param for _, param in different])} differ between ranks after sharding"
            hint = "set fsdp_sync_module_states to true, so that all ranks start from rank 0's"
            raise ShardingError(msg, hint=hint)
    now = {clean_name(name): param for name, param in model.named_parameters(remove_duplicate=False)}
    for names in prepared.tied if settings.version != 1 else ():  # flat parameters show one of its names only
        if len({id(now[name]) for name in names if name in now}) > 1:
            msg = f"{' and '.join(names)} shared one parameter and no longer do"
            raise ShardingError(msg, hint="this is a defect in sharding this model; try NO_WRAP")


def _count_over_ranks(sharded: Iterable[nn.Parameter], prepared: ShardedModel) -> int:
    held = {True: 0, False: 0}  # of layers that ranks split, and of what each of these ranks has alike
    for param in sharded:
        held[splits_layer(param)] += local_tensor(param).numel()
    total = torch.tensor([held[True], held[False]], dtype=torch.int64, device=prepared.device)
    data, axis = data_mesh(prepared.mesh), tensor_mesh(prepared.mesh)
    dist.all_reduce(total, group=data.get_group(data.ndim - 1))  # one replica's
    if axis is not None:
        dist.all_reduce(total, group=axis.get_group())
        total[1] //= axis.size()
    return int(total.sum().item()) // (prepared.mesh.size(prepared.mesh.ndim - 1) if _keeps_full(prepared) else 1)


def _keeps_full(prepared: ShardedModel) -> bool:
    """Return whether every rank of the mesh's last axis holds everything: NO_SHARD under FSDP1."""
    return prepared.settings.version == 1 and prepared.settings.strategy == "NO_SHARD"
