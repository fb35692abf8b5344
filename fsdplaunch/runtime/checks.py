"""What must hold before a model is sharded, and what must hold after."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fsdplaunch.errors import ShardingError
from fsdplaunch.runtime.mesh import shard_group
from fsdplaunch.runtime.names import clean_name, named_parameters, unwrapped
from fsdplaunch.runtime.prepared import Prepared


def check_model(model: nn.Module, version: int) -> None:
    """Refuse what cannot be sharded, by name.

    Raises:
        ShardingError: A parameter has no dimension to split, or is sharded already; or version 1 is to wrap
            modules of torch.compile, whose names it then confuses when it loads a checkpoint.
    """
    if version == 1 and any(unwrapped(module) is not module for module in model.modules()):
        msg = "fsdp_version 1 cannot shard modules that torch.compile has wrapped"
        raise ShardingError(msg, hint="compile what prepare returns, or call module.compile() instead")
    for name, param in named_parameters(model):
        if isinstance(param, DTensor):
            msg = f"{name} is sharded already, but the whole {type(model).__name__} is not"
            raise ShardingError(msg, hint="give prepare the model before anything of it is sharded")
        if param.dim() == 0:
            msg = f"{name} is a scalar, which cannot be split over ranks"
            raise ShardingError(msg, hint="give it one dimension: torch.nn.Parameter(value.reshape(1))")


@contextmanager
def naming(what: str) -> Iterator[None]:
    """Turn torch's refusal to shard something into an error that names it.

    Raises:
        ShardingError: Torch raised.
    """
    try:
        yield
    except (ValueError, NotImplementedError, AssertionError) as refusal:
        msg = (
            f"torch cannot shard {what}: {str(refusal).splitlines()[0] if str(refusal) else 'it does not say why'}"
        )
        raise ShardingError(msg, hint="leave it out with fsdp_ignored_modules, or wrap other modules") from refusal


def check_whole(
    model: nn.Module, prepared: Prepared, *, total: int, ignored: Sequence[nn.Module], device: torch.device
) -> None:
    """Check that the shards of all ranks are the model, its ties still hold, and its master format is as asked.

    Args:
        model: Sharded.
        prepared: How it was sharded.
        total: Number of parameters before.
        ignored: Modules that were left out.
        device: Where a collective's tensor can be.

    Raises:
        ShardingError: They do not; nothing of what follows could be trusted.
    """
    skipped = {id(param) for module in ignored for param in module.parameters()}
    sharded = [param for param in model.parameters() if id(param) not in skipped]
    expected = total - sum(p.numel() for p in model.parameters() if id(p) in skipped)
    held = torch.tensor(sum(_local(param).numel() for param in sharded), dtype=torch.int64, device=device)
    dist.all_reduce(held, group=shard_group(prepared.mesh))
    settings = prepared.settings
    padded = settings.version == 1 and not settings.use_orig_params
    copies = prepared.mesh.size(prepared.mesh.ndim - 1) if _kept_whole(prepared) else 1
    found = int(held.item()) // copies
    if found < expected or (found > expected and not padded):
        msg = f"the ranks hold {found} of {expected} parameters after sharding"
        raise ShardingError(msg, hint="this is a defect in sharding this model; try NO_WRAP or the other version")
    _check_ties(model, prepared)
    _check_master(sharded, settings.dtypes.master)


def _kept_whole(prepared: Prepared) -> bool:
    """Whether every rank of the mesh's last axis holds everything: NO_SHARD under version 1."""
    return prepared.settings.version == 1 and prepared.settings.strategy == "NO_SHARD"


def _local(param: torch.Tensor) -> torch.Tensor:
    return param.to_local() if isinstance(param, DTensor) else param


def _check_ties(model: nn.Module, prepared: Prepared) -> None:
    if prepared.settings.version == 1:
        return  # flat parameters show a tied weight under one of its names only
    now = {clean_name(name): param for name, param in model.named_parameters(remove_duplicate=False)}
    for names in prepared.tied:
        if len({id(now[name]) for name in names if name in now}) > 1:
            msg = f"{' and '.join(names)} shared one parameter and no longer do"
            raise ShardingError(msg, hint="this is a defect in sharding this model; try NO_WRAP")


def _check_master(params: Sequence[nn.Parameter], master: torch.dtype | None) -> None:
    for param in params:
        if master is not None and param.requires_grad and param.is_floating_point() and param.dtype != master:
            msg = f"a trained parameter is kept in {param.dtype} after sharding, not in {master}"
            raise ShardingError(msg, hint="set precision.master to the format to keep parameters in")
