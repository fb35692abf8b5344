"""What torch's FSDP2 keeps behind its units: parameter groups, policies, shards."""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_param

from fsdplaunch.runtime.torch_internals.held_tensors import tensors_held
from fsdplaunch.runtime.torch_internals.tensors import tree_leaves

if TYPE_CHECKING:
    from torch import nn


def param_groups(module: Any) -> list[Any]:
    """List the parameter groups of one FSDP2 unit.

    2.7 to 2.12: the state has one group or None; from 2.13: a list of groups.
    """
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []


def allow_class(kind: type) -> None:
    """Let `fully_shard` shard modules of a class whose first base has no `__dict__`: ABC, Generic, a Protocol.

    It derives a module's new class from FSDPModule and the module's own, in this order. The layout in memory is
    that of the first, and Python refuses to exchange classes of different layouts. Derived in the other order,
    with the same method resolution, it is the module's. All versions.
    """
    home: Any = importlib.import_module("torch.distributed.fsdp._fully_shard._fully_shard")
    if kind in home.cls_to_fsdp_cls or not _begins_without_dict(kind):
        return

    class FSDPModuleFirst(type(kind)):  # type: ignore[misc]
        def mro(cls) -> list[type]:
            return [cls, *FSDPModule.__mro__[:-1], *kind.__mro__]

    own = {"__deepcopy__": home._unimplemented_deepcopy}
    home.cls_to_fsdp_cls[kind] = FSDPModuleFirst(f"FSDP{kind.__name__}", (kind, FSDPModule), own)


def _begins_without_dict(kind: type) -> bool:
    """Return whether a class that another one's layout is made from has no `__dict__`, `object` left out."""
    base = kind.__base__
    while base is not None and base is not object:
        if not base.__dictoffset__:
            return True
        base = base.__base__
    return False


def gather_outside_of_inference_mode() -> None:
    """Let a model be called under `torch.inference_mode()` before it trains.

    Seen in 2.13: torch gathers parameters into tensors that it makes at the first pass. Made in inference mode,
    they cannot be written outside of it, which the next pass in training does, nor have they the version counter
    that a single rank's are copied with.
    """
    groups: Any = importlib.import_module("torch.distributed.fsdp._fully_shard._fsdp_param_group").FSDPParamGroup
    wait = groups.wait_for_unshard

    @functools.wraps(wait)
    def wait_for_unshard(self: Any) -> None:
        if not torch.is_inference_mode_enabled():
            wait(self)
            return
        with torch.inference_mode(mode=False), torch.no_grad():
            wait(self)

    groups.wait_for_unshard = wait_for_unshard


def mixed_precision_of(group: Any) -> Any:
    """Return the mixed precision policy of a parameter group.

    2.7 to 2.14: the group's; from 2.15: each parameter's, of which the first is returned.
    """
    policy = getattr(group, "mp_policy", None)
    return group.fsdp_params[0].mp_policy if policy is None and group.fsdp_params else policy


def root_mixed_precision(module: Any) -> Any:
    """Return the mixed precision policy that an FSDP2 unit was given; all versions."""
    return module._get_fsdp_state()._mp_policy


def prefetches_forward(module: nn.Module) -> bool:
    """Return whether an FSDP2 unit gathers others ahead in forward; all versions."""
    return bool(module._get_fsdp_state()._states_to_forward_prefetch)  # type: ignore[operator]


def take_for_outermost(module: Any) -> None:
    """Let a sharded model be the outermost, before a part of it that is called first is taken for that."""
    module._get_fsdp_state()._lazy_init()


def is_in_pass(module: nn.Module) -> bool:
    """Return whether an FSDP2 unit computes with gathered parameters, forward or in backward; all versions."""
    return pass_look(module)()


def pass_look(module: Any) -> Callable[[], bool]:
    """Return what tells at any later time whether a unit is in a pass, at the least cost; all versions.

    One that is shown as it was before it was sharded is in none.
    """
    if not hasattr(module, "_get_fsdp_state"):
        return lambda: False
    state = module._get_fsdp_state()
    idle = type(state._training_state).IDLE
    return lambda: state._training_state is not idle


def gather_for_any_output(module: nn.Module) -> None:
    """Let backward gather a unit's parameters whatever its outputs are held by, and if they are changed in place.

    FSDP2 hooks the tensors among the outputs, but those in objects of the script's own (2.13: but dataclasses). A
    view that is changed forgets its hooks; what it is a view of does not.
    All versions; from 2.13 on torch warns of such outputs, which is suppressed.
    """
    state: Any = module._get_fsdp_state()  # type: ignore[operator]
    register = getattr(state, "_register_pre_backward_hook", None)
    if register is None:
        return
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor", UserWarning)

    def register_for_all(output: Any) -> Any:
        if torch.is_grad_enabled():
            alone = isinstance(output, torch.Tensor)
            known = () if alone else set(map(id, tree_leaves(output)))
            for tensor in (output,) if alone else tensors_held(output):
                if not tensor.requires_grad:
                    continue
                if not alone and id(tensor) not in known:
                    tensor.register_hook(state._pre_backward)
                if (
                    tensor._base is not None and tensor._base.requires_grad
                ):  # no view that a function of a script made
                    tensor._base.register_hook(state._pre_backward)
        return register(output)

    state._register_pre_backward_hook = register_for_all


def let_inputs_be_changed(module: nn.Module) -> None:
    """Let a unit change its input in place, as a block that begins with `nn.ReLU(inplace=True)` does.

    FSDP2 passes inputs through a function of its own, to reduce gradients after it in backward; what comes out
    must not be changed. A hook of the input does the same. With several inputs gradients are reduced when backward
    ends. All versions.
    """
    for group in param_groups(module):
        if hasattr(group, "_register_post_backward_hook"):
            group._register_post_backward_hook = _after_backward_of_input(group)


def _after_backward_of_input(group: Any) -> Callable[..., Any]:
    def register(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        trained = [each for each in tensors_held((args, kwargs)) if each.requires_grad]
        if torch.is_grad_enabled() and len(trained) == 1:
            trained[0].register_hook(lambda _gradient: group.post_backward())
        return args, kwargs

    return register


def full_size(fsdp_param: Any) -> torch.Size:
    """Return the full shape of a parameter that FSDP2 holds, also where ranks split layers; all versions."""
    size: torch.Size = fsdp_param.sharded_param.shape
    return size


def put_shard(fsdp_param: Any, param: Any, local: torch.Tensor, given: Any = None) -> None:
    """Give a sharded parameter another local tensor, and let FSDP2 take notice of it; all versions.

    Args:
        fsdp_param: FSDP2's own record of the parameter.
        param: The parameter.
        local: Its new local tensor.
        given: The DTensor whose memory that is, if it is to stay that of both: FSDP2 copies a shard that is
            smaller than other ranks' into memory with padding.
    """
    param._local_tensor = local
    fsdp_param.reset_sharded_param()
    if given is not None and param._local_tensor is not local:
        given._local_tensor = param._local_tensor.detach()


def first_chunk_only(chunk: Callable[..., Any]) -> Any:
    """Return a context in which FSDP2 splits parameters by `chunk`; all versions, without effect on others."""
    present = hasattr(_fsdp_param, "_chunk_with_empty")
    return patch.object(_fsdp_param, "_chunk_with_empty", chunk) if present else nullcontext()


def before_reducing_gradients(module: Any, act: Callable[[Any], None]) -> None:
    """Call `act(group)` before the gradients of each parameter group of an FSDP2 unit are reduced; all versions.

    Args:
        module: Any module; one that is no unit has no groups.
        act: In the place of what was given before. Not called in passes that do not reduce.
    """
    for group in param_groups(module) if hasattr(module, "_get_fsdp_state") else []:
        reduce = getattr(group.post_backward, "fsdplaunch_reduces", group.post_backward)

        def act_and_reduce(*unused: Any, group: Any = group, reduce: Any = reduce) -> Any:
            if group.reduce_grads:
                act(group)
            return reduce(*unused)

        act_and_reduce.fsdplaunch_reduces = reduce  # type: ignore[attr-defined]
        group.post_backward = act_and_reduce


def names_without_gradient(group: Any) -> tuple[str, ...]:
    """Return the names of a group's trained parameters that have no gradient yet; all versions."""
    return tuple(
        each._param_fqn
        for each in group.fsdp_params
        if each.sharded_param.requires_grad
        and each.unsharded_accumulated_grad is None
        and getattr(getattr(each, "_unsharded_param", None), "grad", None) is None
    )


def abandon_pass(model: Any) -> None:
    """Put the units of a model back to where no pass runs, after one that has raised an error; 2.9 to 2.13.

    Args:
        model: Sharded, with all its units.
    """
    for module in model.modules():
        if not hasattr(module, "_get_fsdp_state"):
            continue
        state: Any = module._get_fsdp_state()
        idle = type(state._training_state).IDLE
        state._training_state = idle
        state._state_ctx.iter_forward_root = None
        if hasattr(state, "_modules_to_run_forward"):
            state._modules_to_run_forward.clear()
        for group in param_groups(module):
            group._training_state = idle
            group.wait_for_unshard()
            group.reshard()
    forget_order(model)


def forget_order(model: Any) -> None:
    """Forget in which order units were gathered in passes that no backward follows; all versions.

    Backward gathers ahead by that order.
    """
    for module in model.modules():
        for group in param_groups(module) if hasattr(module, "_get_fsdp_state") else []:
            group._post_forward_indices.clear()
            if hasattr(group, "comm_ctx"):
                group.comm_ctx.post_forward_order.clear()


def begin_unit_pass(unit: Any, args: Any, kwargs: Any) -> Any:
    """Do what FSDP2 does before a unit's forward, for a part of it that is called by itself; 2.9 to 2.13.

    Returns:
        What the part is to be given.
    """
    return unit._get_fsdp_state()._pre_forward(unit, args, kwargs)


def end_unit_pass(unit: Any, args: Any, output: Any) -> Any:
    """Do what FSDP2 does after a unit's forward; returns what the part is to return; 2.9 to 2.13."""
    return unit._get_fsdp_state()._post_forward(unit, args, output)
