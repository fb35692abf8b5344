"""Ranks that split layers or sequences have the same data and draw the same random numbers: they join results."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdplaunch.errors import ShardingError
from fsdplaunch.runtime.collectives.rank_group import RankGroup
from fsdplaunch.runtime.sharding.rank_consistency import unequal
from fsdplaunch.runtime.torch_internals.wrappers import untraced


def draw_alike(axis: DeviceMesh) -> None:
    """Give the ranks of an axis the first one's random states, torch's: they drop out what all of them have."""
    states = [torch.get_rng_state(), torch.cuda.get_rng_state() if torch.cuda.is_available() else None]
    on_cpu, on_gpu = RankGroup([axis.get_group()]).from_first(states)
    torch.set_rng_state(on_cpu)
    if on_gpu is not None:
        torch.cuda.set_rng_state(on_gpu)


def check_first_inputs(
    model: nn.Module,
    axis: DeviceMesh,
    device: torch.device,
    together: str,
    *,
    unless: Callable[[], bool] = lambda: False,
) -> None:
    """Compare the inputs of the model's first forward over the ranks of an axis; later ones cost nothing.

    Args:
        model: Sharded.
        axis: The ranks that split its layers or sequences.
        device: Where this worker computes.
        together: What they do together, for the error.
        unless: Whether a forward is given other inputs on each rank on purpose.
    """
    compared = False

    def compare(module: nn.Module, args: Any, kwargs: Any) -> None:
        nonlocal compared  # the hook stays: another one may run the model, in whose pass this one could not go
        if compared or unless():
            return
        compared = True
        facts = {"inputs": _fingerprint(_tensors((args, kwargs)))}
        if module.training and any(isinstance(each, nn.Dropout) and each.p > 0 for each in module.modules()):
            facts["random numbers"] = torch.get_rng_state()
        different = unequal(facts, [axis.get_group()], device)
        if different:
            raise _different(different[0], axis, together)

    model.register_forward_pre_hook(untraced(compare), prepend=True, with_kwargs=True)


def _different(what: str, axis: DeviceMesh, together: str) -> ShardingError:
    ranks = ", ".join(map(str, axis.mesh.tolist()))
    number = "RANK // (tp_size * cp_size)"
    if what == "inputs":
        msg = f"ranks {ranks} {together}, and their inputs differ: they need the same batch"
        return ShardingError(msg, hint=f"divide data by fsdplaunch.prepare(loader), or by {number}")
    msg = f"ranks {ranks} {together}, and would drop out different activations"
    return ShardingError(msg, hint=f"seed torch by {number}, not by RANK")


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in arguments, lists and mappings among them."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)


def _fingerprint(tensors: Iterator[torch.Tensor]) -> torch.Tensor:
    """Return two numbers that differ where shapes or values do: the elements, and their sum weighted by place."""
    elements, total = 0, 0.0
    for tensor in tensors:
        flat = tensor.detach().double().flatten()
        elements += flat.numel()
        total += float((flat * torch.arange(1, flat.numel() + 1, device=flat.device)).sum())
    return torch.tensor([float(elements), total], dtype=torch.float64)
