"""Parameters that torch's FSDP2 has gathered, and the gradients that it keeps beside those of the shards."""

import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fsdplaunch.runtime.torch_internals.fsdp.fsdp2 import param_groups
from fsdplaunch.runtime.torch_internals.tensors import counted_changes


def unsharded_parameters(group: Any) -> list[tuple[torch.Tensor, bool]]:
    """List the trained parameters of a group as a pass computes with them, with whether each has a gradient.

    Taken from a group whose parameters are gathered; to 2.13 torch keeps a sum of gradients beside the new one.
    """
    found = [each for each in group.fsdp_params if each.sharded_param.requires_grad]
    return [
        (
            each._unsharded_param,
            each._unsharded_param.grad is not None or each.unsharded_accumulated_grad is not None,
        )
        for each in found
        if hasattr(each, "_unsharded_param")
    ]


def group_refs(unit: Any) -> list[weakref.ref[Any]]:
    """Return the parameter groups of an FSDP2 unit, held weakly; all versions."""
    return [weakref.ref(group) for group in param_groups(unit)]


def drop_local_gradients(ref: weakref.ref[Any], shards: set[int]) -> None:
    """Forget what passes without averaging have added up on this rank for shards, given by id.

    To 2.13 torch keeps a sum beside the gradient; in 2.15 the gradient is the sum.
    """
    group = ref()
    for param in () if group is None else group.fsdp_params:
        if id(param.sharded_param) in shards and hasattr(param, "_unsharded_param"):
            param._unsharded_param.grad = None
            if param.unsharded_accumulated_grad is not None:
                param.unsharded_accumulated_grad = None


def take_local_gradients(ref: weakref.ref[Any], shards: set[int]) -> list[tuple[Any, torch.Tensor]]:
    """Return what passes without averaging have added up on this rank, each with its shard; all versions.

    It is forgotten here.
    """
    group = ref()
    pending: list[tuple[Any, torch.Tensor]] = []
    for param in () if group is None else group.fsdp_params:
        if id(param.sharded_param) in shards and hasattr(param, "_unsharded_param"):
            apart, gradient = param.unsharded_accumulated_grad, param._unsharded_param.grad
            found = (gradient,) if apart is gradient else (apart, gradient)  # the same one in 2.15
            pending += [(param.sharded_param, each) for each in found if each is not None]
    drop_local_gradients(ref, shards)
    return pending


def gathered_now(ref: weakref.ref[Any]) -> list[tuple[Any, Any]]:
    """List the parameters of a group, each with its shard, if they are gathered now; all versions."""
    group = ref()
    if group is None or not group.is_unsharded:
        return []
    return [(param._unsharded_param, param.sharded_param) for param in group.fsdp_params]


def still_gathered(refs: list[weakref.ref[Any]]) -> list[weakref.ref[Any]]:
    """Return those groups whose parameters are gathered now; all versions."""
    return [ref for ref in refs if (group := ref()) is not None and group.is_unsharded]


def gathered_parameters(module: Any) -> list[tuple[Any, Any]]:
    """List the parameters that an FSDP2 unit has gathered before, each with its shard; all versions."""
    held = [param for group in param_groups(module) for param in group.fsdp_params]
    return [(param._unsharded_param, param.sharded_param) for param in held if hasattr(param, "_unsharded_param")]


def first_gathers(module: Any) -> Iterator[tuple[Any, Callable[[Callable[[Any], None]], None]]]:
    """Yield the shards of an FSDP2 unit, each with what calls a function with its full parameter; all versions.

    At once where it was gathered before, else when it first is. Torch gathers into the same tensor from then on.
    """
    for group in param_groups(module):
        for held in group.fsdp_params:
            yield held.sharded_param, functools.partial(_call_when_gathered, held)


def call_when_gathered(ref: weakref.ref[Any], act: Callable[[Any], None]) -> None:
    """Call a function with each full parameter of a group, in order, when it is first gathered; all versions."""
    group = ref()
    for held in () if group is None else group.fsdp_params:
        _call_when_gathered(held, act)


def before_giving_back(
    ref: weakref.ref[Any],
    gathered: list[torch.Tensor],
    counts: list[int],
    marked: set[int],
    act: Callable[[], None],
) -> None:
    """Call a function where a group is to give back gathered parameters that were changed; all versions.

    Looked at after each pass, also where they stay gathered until backward, and after backward, by no call of a
    function. Gathering is no change that torch counts. What was given back has no memory.

    Args:
        ref: The group.
        gathered: Its full parameters.
        counts: How often each was changed until last time; to be brought up to date by `act`.
        marked: What is changed uncounted, if anything.
        act: The function.
    """
    group = ref()
    if group is None:
        return
    give_back = type(group).reshard

    def reshard() -> None:
        if (still := ref()) is None:
            return
        if still.is_unsharded and (marked or list(map(counted_changes, gathered)) != counts):
            act()
        give_back(still)

    group.reshard = reshard


def _call_when_gathered(held: Any, act: Callable[[Any], None]) -> None:
    gather, waiting = held.init_unsharded_param, [act]

    def gather_first(*args: Any, **kwargs: Any) -> None:
        gather(*args, **kwargs)
        if held.init_unsharded_param is gather_first:  # several may wait for one parameter
            held.init_unsharded_param = gather
        if waiting:
            waiting.pop()(held._unsharded_param)

    if hasattr(held, "_unsharded_param"):
        act(held._unsharded_param)
    else:
        held.init_unsharded_param = gather_first


def places_of_shards(module: Any) -> Iterator[tuple[Any, list[tuple[Any, str]]]]:
    """Yield the shards of an FSDP2 unit, each with the modules and names by which it is gathered; all versions."""
    for group in param_groups(module):
        for held in group.fsdp_params:
            info = held._module_info
            shared = zip(info.shared_modules, info.shared_param_names, strict=True)
            yield held.sharded_param, [(info.module, info.param_name), *shared]


def count_shard_changes(refs: list[weakref.ref[Any]]) -> int:
    """Return how often the shards of groups were changed in place, at little cost: each pass asks. All versions.

    Torch counts where an operation is given it: the DTensor, or its local tensor. Those made in inference mode
    count nothing.
    """
    total = 0
    for ref in refs:
        group = ref()
        for param in () if group is None else group.fsdp_params:
            shard = param.sharded_param
            try:
                total += shard._version + shard._local_tensor._version
            except RuntimeError:
                continue
    return total


def shards_by_place(module: Any) -> dict[tuple[int, str], Any]:
    """Return the sharded parameters of an FSDP2 unit by the id of the module that has each, and its attribute.

    In a pass the modules have gathered ones in their place. All versions.
    """
    found: dict[tuple[int, str], Any] = {}
    for param in (param for group in param_groups(module) for param in group.fsdp_params):
        info = param._module_info
        holders = [(info.module, info.param_name), *zip(info.shared_modules, info.shared_param_names, strict=True)]
        found |= {(id(holder), name): param.sharded_param for holder, name in holders}
    return found
