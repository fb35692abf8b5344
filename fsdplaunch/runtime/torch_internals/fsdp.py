"""What torch keeps behind FSDP1's wrappers (flat parameters) and FSDP2's units (groups, policies, shards)."""

from __future__ import annotations

import functools
import importlib
import operator
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, ShardingStrategy

from fsdplaunch.runtime.patch import wrap
from fsdplaunch.runtime.torch_internals.tensors import counted_changes, tensors_held, tree_leaves, tree_map


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatParameter:
    """What FSDP1 knows of one flat parameter."""

    tensor: torch.Tensor  # the flat parameter itself
    shard: torch.Tensor  # this rank's shard of it, flat
    shapes: Sequence[torch.Size]  # of the full parameters in it
    infos: Sequence[Any]  # the module and the attribute of each
    names: Sequence[str]  # their dotted names inside the unit
    shared: Sequence[Any]  # the same as infos for further places of shared parameters
    places: Sequence[Any]  # where in this rank's shard each begins and ends
    params: Sequence[nn.Parameter]  # those that `use_orig_params` shows, else empty


def flat_parameter(unit: nn.Module) -> FlatParameter | None:
    """Describe the flat parameter of one FSDP1 unit; None for a unit without parameters."""
    handle: Any = unit._handle
    if handle is None:
        return None
    flat = handle.flat_param
    return FlatParameter(
        tensor=flat,
        shard=getattr(flat, "_local_shard", flat).detach(),
        shapes=flat._shapes,
        infos=flat._param_infos,
        names=flat._fqns,
        shared=flat._shared_param_infos,
        places=flat._shard_param_infos,
        params=flat._params or (),
    )


def shown_parameters(unit: Any) -> tuple[torch.Tensor, ...]:
    """Return what optimizers may have of an FSDP1 unit: its flat parameter, and what `use_orig_params` shows."""
    handle = unit._handle
    return () if handle is None else (handle.flat_param, *(handle.flat_param._params or ()))


def replica_group(unit: Any) -> Any:
    """Return the ranks that hold the same as this one of an FSDP1 unit; None where each has its own part."""
    is_divided = unit._handle is None or unit._handle.uses_sharded_strategy
    return getattr(unit, "_inter_node_pg", None) if is_divided else unit.process_group


@functools.cache
def mend_flat_parameters() -> None:
    """Have FSDP1 keep parameters where it loses them: frozen ones of NO_SHARD, and what is in host memory already.

    Where all of a unit that is not sharded are frozen and no input has a gradient, torch takes them for shown
    after backward and leaves tensors in their places: a state lacks them, and the next pass takes those for what
    the script has put there. And to 2.13 a state or a summon that is to offload parameters to host memory moves
    those on a CPU to where they are, and gives their memory back.
    """

    def reshard_and_show(reshard: Any, unit: Any) -> None:
        reshard(unit)
        handle = unit._handle
        if handle is not None and unit._use_orig_params and not handle.uses_sharded_strategy:
            handle._use_sharded_views()

    def move_from_gpu(to_cpu: Any, handle: Any) -> Any:
        return nullcontext() if handle.flat_param.is_cpu else to_cpu(handle)

    wrap(importlib.import_module("torch.distributed.fsdp._runtime_utils"), "_catch_all_reshard", reshard_and_show)
    wrap(importlib.import_module("torch.distributed.fsdp._flat_param"), "FlatParamHandle.to_cpu", move_from_gpu)


def is_flat_parameter(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a flat parameter of FSDP1."""
    return bool(getattr(tensor, "_is_flat_param", False))


def is_in_flat_parameter(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a flat parameter of FSDP1, or a parameter that lies in one."""
    return bool(getattr(tensor, "_fsdp_flattened", False))


def divided_over(unit: Any) -> int:
    """Return over how many ranks a unit's parameters are divided, with those of replicas."""
    replicas = getattr(unit, "_inter_node_pg", None)
    return int(unit.process_group.size() * (1 if replicas is None else replicas.size()))


shows_original_parameters: Callable[[Any], bool] = operator.attrgetter("_use_orig_params")
"""Return whether an FSDP1 model was made with `use_orig_params`."""


@contextmanager
def without_mesh(units: Sequence[Any]) -> Iterator[None]:
    """Have FSDP1 forget the mesh its units were made with: with one it writes no local state."""
    meshes = [unit._device_mesh for unit in units]
    for unit in units:
        unit._device_mesh = None
    try:
        yield
    finally:
        for unit, mesh in zip(units, meshes, strict=True):
            unit._device_mesh = mesh


def sharding_strategy(name: str) -> Any:
    """Return FSDP1's strategy by the name the configuration has; HYBRID_SHARD_ZERO2 is private in all versions."""
    return ShardingStrategy["_HYBRID_SHARD_ZERO2" if name == "HYBRID_SHARD_ZERO2" else name]


def wrap_policy_runner(policy: Any) -> Callable[..., Any] | None:
    """Return how a policy object of torch chooses modules; None for a function."""
    return getattr(policy, "_run_policy", None)


def param_groups(module: Any) -> list[Any]:
    """List the parameter groups of one FSDP2 unit.

    To 2.12: the state has one group or None; from 2.13: a list of groups.
    """
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []


def allow_class(kind: type) -> None:
    """Let `fully_shard` shard modules of a class whose first base has no `__dict__`: ABC, Generic, a Protocol.

    It derives a module's new class from FSDPModule and the module's own, in this order. The layout in memory is
    that of the first, and Python refuses to exchange classes of different layouts. Derived in the other order,
    with the same method resolution, it is the module's.
    """
    home: Any = importlib.import_module("torch.distributed.fsdp._fully_shard._fully_shard")
    base = kind.__base__  # what a class's layout is made from, and so on
    while base is not None and base is not object and base.__dictoffset__:
        base = base.__base__
    if kind in home.cls_to_fsdp_cls or base is None or base is object:
        return

    class FSDPModuleFirst(type(kind)):  # type: ignore[misc]
        def mro(cls) -> list[type]:
            return [cls, *FSDPModule.__mro__[:-1], *kind.__mro__]

    own = {"__deepcopy__": home._unimplemented_deepcopy}
    home.cls_to_fsdp_cls[kind] = FSDPModuleFirst(f"FSDP{kind.__name__}", (kind, FSDPModule), own)


def gather_outside_of_inference_mode() -> None:
    """Let a model be called under `torch.inference_mode()` before it trains.

    Seen in 2.13: torch gathers parameters into tensors that it makes at the first pass. Made in inference mode,
    they cannot be written outside of it, which the next pass in training does, nor have they the version counter
    that a single rank's are copied with.
    """
    groups = importlib.import_module("torch.distributed.fsdp._fully_shard._fsdp_param_group")

    def wait_outside(wait: Any, self: Any) -> None:
        if not torch.is_inference_mode_enabled():
            wait(self)
            return
        with torch.inference_mode(mode=False), torch.no_grad():
            wait(self)

    wrap(groups, "FSDPParamGroup.wait_for_unshard", wait_outside)


def mixed_precision_of(group: Any) -> Any:
    """Return the mixed precision policy of a parameter group.

    To 2.14: the group's; from 2.15: each parameter's, of which the first is returned.
    """
    policy = getattr(group, "mp_policy", None)
    return group.fsdp_params[0].mp_policy if policy is None and group.fsdp_params else policy


def root_mixed_precision(module: Any) -> Any:
    """Return the mixed precision policy that an FSDP2 unit was given."""
    return module._get_fsdp_state()._mp_policy


def prefetches_forward(module: nn.Module) -> bool:
    """Return whether an FSDP2 unit gathers others ahead in forward."""
    return bool(module._get_fsdp_state()._states_to_forward_prefetch)  # type: ignore[operator]


def take_for_outermost(module: Any) -> None:
    """Let a sharded model be the outermost, before a part of it that is called first is taken for that."""
    module._get_fsdp_state()._lazy_init()


def is_in_pass(module: nn.Module) -> bool:
    """Return whether an FSDP2 unit computes with gathered parameters, forward or in backward."""
    return pass_look(module)()


def pass_look(module: Any) -> Callable[[], bool]:
    """Return a function that returns at any later time whether a unit is in a pass, at the least cost.

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
    From 2.13 on torch warns of such outputs, which is suppressed.
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
                base = tensor._base  # of a view that a function of a script made it has no gradient
                if base is not None and base.requires_grad:
                    base.register_hook(state._pre_backward)
        return register(output)

    state._register_pre_backward_hook = register_for_all


def put_shard(fsdp_param: Any, param: Any, local: torch.Tensor, given: Any = None) -> None:
    """Give a sharded parameter another local tensor, and let FSDP2's own record of it take notice.

    `given` is the DTensor whose memory that is, if it is to stay that of both: FSDP2 copies a shard that is
    smaller than other ranks' into memory with padding.
    """
    param._local_tensor = local
    fsdp_param.reset_sharded_param()
    if given is not None and param._local_tensor is not local:
        given._local_tensor = param._local_tensor.detach()


def before_reducing_gradients(module: Any, act: Callable[[Any], None]) -> None:
    """Call `act(group)` before the gradients of each parameter group of a module, if it is a unit, are reduced.

    In the place of what was given before, and not in passes that do not reduce.
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
    """Return the names of a group's trained parameters that have no gradient yet."""
    return tuple(
        each._param_fqn
        for each in group.fsdp_params
        if each.sharded_param.requires_grad
        and each.unsharded_accumulated_grad is None
        and getattr(getattr(each, "_unsharded_param", None), "grad", None) is None
    )


def abandon_pass(model: Any) -> None:
    """Put the units of a model back to where no pass runs, after one that has raised an error; 2.9 to 2.13."""
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
    """Forget in which order units were gathered in passes that no backward follows.

    Backward gathers ahead by that order.
    """
    for module in model.modules():
        for group in param_groups(module) if hasattr(module, "_get_fsdp_state") else []:
            group._post_forward_indices.clear()
            if hasattr(group, "comm_ctx"):
                group.comm_ctx.post_forward_order.clear()


def begin_unit_pass(unit: Any, args: Any, kwargs: Any) -> Any:
    """Do what FSDP2 does before a unit's forward for a part that is called alone; returns what to give it."""
    return unit._get_fsdp_state()._pre_forward(unit, args, kwargs)


def end_unit_pass(unit: Any, args: Any, output: Any) -> Any:
    """Do what FSDP2 does after a unit's forward; returns what the part is to return; both seen in 2.9 to 2.13."""
    return unit._get_fsdp_state()._post_forward(unit, args, output)


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
    """Return the parameter groups of an FSDP2 unit, held weakly."""
    return [weakref.ref(group) for group in param_groups(unit)]


def take_local_gradients(ref: weakref.ref[Any], shards: set[int]) -> list[tuple[Any, torch.Tensor]]:
    """Return what passes without averaging have added up on this rank for shards (ids), each with its shard.

    It is forgotten here. To 2.13 torch keeps a sum beside the gradient; in 2.15 the gradient is the sum.
    """
    group = ref()
    pending: list[tuple[Any, torch.Tensor]] = []
    for param in () if group is None else group.fsdp_params:
        if id(param.sharded_param) in shards and hasattr(param, "_unsharded_param"):
            apart, gradient = param.unsharded_accumulated_grad, param._unsharded_param.grad
            found = (gradient,) if apart is gradient else (apart, gradient)
            pending += [(param.sharded_param, each) for each in found if each is not None]
            param._unsharded_param.grad = None
            if param.unsharded_accumulated_grad is not None:
                param.unsharded_accumulated_grad = None
    return pending


def gathered_now(ref: weakref.ref[Any]) -> list[tuple[Any, Any]]:
    """List the parameters of a group, each with its shard, if they are gathered now."""
    group = ref()
    if group is None or not group.is_unsharded:
        return []
    return [(param._unsharded_param, param.sharded_param) for param in group.fsdp_params]


def still_gathered(refs: list[weakref.ref[Any]]) -> list[weakref.ref[Any]]:
    """Return those groups whose parameters are gathered now."""
    return [ref for ref in refs if (group := ref()) is not None and group.is_unsharded]


def gathered_parameters(module: Any) -> list[tuple[Any, Any]]:
    """List the parameters that an FSDP2 unit has gathered before, each with its shard."""
    held = [param for group in param_groups(module) for param in group.fsdp_params]
    return [(param._unsharded_param, param.sharded_param) for param in held if hasattr(param, "_unsharded_param")]


def on_first_gather(module: Any) -> Iterator[tuple[Any, Callable[[Callable[[Any], None]], None]]]:
    """Yield the shards of an FSDP2 unit, each with what calls a function with its full parameter.

    At once where it was gathered before, else when it first is. Torch gathers into the same tensor from then on.
    """
    for group in param_groups(module):
        for held in group.fsdp_params:
            yield held.sharded_param, functools.partial(_call_when_gathered, held)


def call_when_gathered(ref: weakref.ref[Any], act: Callable[[Any], None]) -> None:
    """Call a function with each full parameter of a group, in order, when it is first gathered."""
    group = ref()
    for held in () if group is None else group.fsdp_params:
        _call_when_gathered(held, act)


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


def before_giving_back(
    ref: weakref.ref[Any],
    gathered: list[torch.Tensor],
    counts: list[int],
    marked: set[int],
    act: Callable[[], None],
) -> None:
    """Call `act` where a group is to give back gathered parameters that were changed.

    Looked at after each pass, also where they stay gathered until backward, and after backward, by no call of a
    function. Gathering is not a change that torch counts. What was given back has no memory. `counts` is how often
    each was changed until last time, which `act` brings up to date, `marked` what is changed uncounted.
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


def places_of_shards(module: Any) -> Iterator[tuple[Any, list[tuple[Any, str]]]]:
    """Yield the shards of an FSDP2 unit, each with the modules and names by which it is gathered."""
    for group in param_groups(module):
        for held in group.fsdp_params:
            info = held._module_info
            shared = zip(info.shared_modules, info.shared_param_names, strict=True)
            yield held.sharded_param, [(info.module, info.param_name), *shared]


def count_shard_changes(refs: list[weakref.ref[Any]]) -> int:
    """Return how often the shards of groups were changed in place, at little cost: each pass asks.

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

    In a pass the modules have gathered ones in their place.
    """
    return {(id(holder), name): shard for shard, places in places_of_shards(module) for holder, name in places}


def suspend_unit(unit: Any) -> Callable[[], None]:
    """Let a unit's hooks gather nothing and give nothing back, until what is returned is called.

    As in a backward, in which torch's hooks of a forward that is made again leave parameters as they are.
    To 2.12: a state has one group or None; from 2.13 on a list, which it gathers in a backward as well.
    """
    state = unit._get_fsdp_state()
    name = "_fsdp_param_groups" if hasattr(state, "_fsdp_param_groups") else "_fsdp_param_group"
    groups, before = getattr(state, name), state._training_state
    setattr(state, name, [] if isinstance(groups, list) else None)
    state._training_state = type(before).PRE_BACKWARD

    def resume() -> None:
        setattr(state, name, groups)
        state._training_state = before

    return resume


def cast_inputs(unit: nn.Module, given: Any) -> Any:
    """Return what a unit's forward is given, in the dtype that its mixed precision has it in."""
    policy = unit._get_fsdp_state()._mp_policy  # type: ignore[operator]
    return _cast(policy.param_dtype if policy.cast_forward_inputs else None, given)


def cast_output(unit: nn.Module, output: Any) -> Any:
    """Return what a unit returns, in the dtype that its mixed precision has it in."""
    return _cast(unit._get_fsdp_state()._mp_policy.output_dtype, output)  # type: ignore[operator]


def _cast(dtype: torch.dtype | None, value: Any) -> Any:
    def cast(leaf: Any) -> Any:
        return leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf

    return value if dtype is None else tree_map(cast, value)
