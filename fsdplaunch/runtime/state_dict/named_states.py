"""State dicts under the names of the user's model, and full optimizer states by the reference's function names."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.fsdp import FullOptimStateDictConfig, FullyShardedDataParallel, OptimStateKeyType
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from fsdplaunch.errors import UsageError
from fsdplaunch.runtime.collectives.rank_group import RankGroup
from fsdplaunch.runtime.inspection import clean_name, named_parameters
from fsdplaunch.runtime.inspection.units import fsdp1_wrappers, refuse_of_xla
from fsdplaunch.runtime.messages import quiet_torch
from fsdplaunch.runtime.sharding.optimizers import cut_to_flat
from fsdplaunch.runtime.sharding.registry import registered
from fsdplaunch.runtime.state_dict.gather import cut_to_shard
from fsdplaunch.runtime.torch_internals.fsdp import flat_parameter


@contextmanager
def left_out_frozen(model: nn.Module, optimizer: Optimizer) -> Iterator[None]:
    """Have FSDP1 take parameters that an optimizer leaves out for frozen, while its state is gathered or split."""
    trained = {id(param) for group in optimizer.param_groups for param in group["params"]}
    flats = [flat for flat in map(flat_parameter, fsdp1_wrappers(model)) if flat is not None]
    shown = [param for flat in flats for param in flat.params]  # what `use_orig_params` shows as the user's own
    left_out = [param for param in shown if param.requires_grad and id(param) not in trained]
    for param in left_out:
        param.requires_grad_(False)
    try:
        yield
    finally:
        for param in left_out:
            param.requires_grad_(True)


State = dict[str, Any]


def model_state(model: nn.Module) -> State:
    """Return a model's state dict, sharded tensors as this rank has them; every rank calls this."""
    found = model.state_dict() if _keeps_names(model) else get_model_state_dict(model)
    return renamed(found, clean_name)


def optimizer_state(model: nn.Module, optimizer: Optimizer) -> State:
    """Return an optimizer's state, with names for numbers of parameters; every rank calls this.

    One that has made no step yet makes one of zero length, as torch has it.
    """
    if optimizer.state and _keeps_names(model):
        names = {id(param): clean_name(name) for name, param in model.named_parameters()}
        params = [param for group in optimizer.param_groups for param in group["params"]]
        known = {id(param) for param in params}
        if known <= names.keys() and {id(param) for param in optimizer.state} <= known:
            by_number = [names[id(param)] for param in params]
            return renamed_optimizer(optimizer.state_dict(), by_number.__getitem__)
    return renamed_optimizer(get_optimizer_state_dict(model, optimizer), clean_name)


def renamed(state: State, rename: Callable[[Any], str]) -> State:
    """Return a state under other names."""
    return {rename(name): value for name, value in state.items()}


def renamed_optimizer(state: State, rename: Callable[[Any], str]) -> State:
    """Return an optimizer's state under other names of parameters."""
    if not state:
        return state
    groups = [{**group, "params": [rename(name) for name in group["params"]]} for group in state["param_groups"]]
    return {"state": renamed(state["state"], rename), "param_groups": groups}


def _keeps_names(model: nn.Module) -> bool:
    """Return whether no wrapper of torch's in it gives state dicts that are not simply the modules' own."""
    return not any(
        isinstance(each, FullyShardedDataParallel | DistributedDataParallel) for each in model.modules()
    )


OptimInput = Iterable[Any] | None


def full_optim_state_dict(
    model: nn.Module,
    optim: Optimizer,
    optim_input: OptimInput = None,  # noqa: ARG001  (the optimizer itself knows its groups; kept for old calls)
    rank0_only: bool | None = None,
) -> State:
    """Gather the full state of an optimizer, under parameter names; every rank calls this.

    Args:
        model: Sharded by either version, or holding sharded modules.
        optim: Its optimizer.
        optim_input: Not needed any more; the optimizer knows its parameter groups.
        rank0_only: Return an empty mapping on all ranks but the first. Left out, as the plugin's
            `optim_state_dict_config` says, and so where it says nothing.

    Returns:
        `state` and `param_groups`, as `Optimizer.state_dict` has them but for the names.
    """
    refuse_of_xla(model, "full_optim_state_dict")
    if rank0_only is None:
        prepared = registered(model)
        configured = None if prepared is None else prepared.plugin.optim_state_dict_config
        rank0_only = configured.rank0_only if isinstance(configured, FullOptimStateDictConfig) else True
    # With the move to the host torch gathers on rank 0 only. FSDP1 must not move what is there already: up to
    # torch 2.13 the process dies of it.
    to_host = rank0_only and not (fsdp1_wrappers(model) and not torch.cuda.is_available())
    options = StateDictOptions(full_state_dict=True, cpu_offload=to_host)
    with quiet_torch(), left_out_frozen(model, optim):
        state: State = get_optimizer_state_dict(model, optim, options=options)
    return unshare_counts(state) if dist.get_rank() == 0 or not rank0_only else {}


def unshare_counts(full: State) -> State:
    """Give each parameter of a full state a step count of its own, in place, and return the state.

    Parameters that came from one flat parameter share its count; a plain optimizer would count once for each.
    """
    for values in full.get("state", {}).values():
        for key, value in values.items():
            if isinstance(value, torch.Tensor) and value.dim() == 0:
                values[key] = value.clone()
    return full


def shard_full_optim_state_dict(
    full_optim_state_dict: State, model: nn.Module, optim_input: OptimInput = None, optim: Optimizer | None = None
) -> State:
    """Cut a full state, which every rank holds, to what this rank's optimizer loads.

    Args:
        full_optim_state_dict: From `full_optim_state_dict`, on every rank.
        model: Sharded; of any number of ranks.
        optim_input: What the optimizer was built on, if that was not `model.parameters()`.
        optim: The optimizer that will load it, instead of `optim_input`.
    """
    refuse_of_xla(model, "shard_full_optim_state_dict")
    if fsdp1_wrappers(model):
        return _cut_flat(full_optim_state_dict, model, optim_input, optim)
    params = dict(named_parameters(model))
    state = {
        name: {key: cut_to_shard(value, params[name]) for key, value in values.items()}
        for name, values in full_optim_state_dict["state"].items()
    }
    named = {"state": state, "param_groups": full_optim_state_dict["param_groups"]}
    return rekey_optim_state_dict(named, OptimStateKeyType.PARAM_ID, model, optim_input, optim)


def scatter_full_optim_state_dict(
    full_optim_state_dict: State | None,
    model: nn.Module,
    optim_input: OptimInput = None,
    group: dist.ProcessGroup | None = None,
    optim: Optimizer | None = None,
) -> State:
    """Send each rank its shard of a full state that only rank 0 holds; every rank calls this.

    Under FSDP2 tensors travel one at a time, so no other rank ever holds more than one of them;
    under FSDP1 all travel at once.

    Args:
        full_optim_state_dict: From `full_optim_state_dict` on rank 0; ignored elsewhere.
        model: Sharded.
        optim_input: As in `shard_full_optim_state_dict`.
        group: The model's ranks, if they are not all.
        optim: As in `shard_full_optim_state_dict`.
    """
    ranks = RankGroup([group])
    given = dict(full_optim_state_dict or {}) if ranks.is_first else {}
    if fsdp1_wrappers(model):
        return _cut_flat(ranks.from_first(given), model, optim_input, optim)
    full = {"state": given.get("state", {}), "param_groups": given.get("param_groups", [])}
    outlines = {  # the state without its tensors' values: small enough to send as an object
        name: {k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in values.items()}
        for name, values in full["state"].items()
    }
    outlines, groups = ranks.from_first((outlines, full["param_groups"]))
    params = dict(named_parameters(model))
    state: dict[str, State] = {name: {} for name in outlines}
    for name, key, outline in [(name, *entry) for name, values in outlines.items() for entry in values.items()]:
        value = full["state"][name][key] if ranks.is_first else outline
        if isinstance(outline, torch.Tensor):
            param = params[name]
            device = param.to_local().device if isinstance(param, DTensor) else param.device
            sent = value.to(device).contiguous() if ranks.is_first else torch.empty_like(outline, device=device)
            ranks.send(sent)
            value = cut_to_shard(sent, param)
            del sent  # no rank holds two
        state[name][key] = value
    named = {"state": state, "param_groups": groups}
    return rekey_optim_state_dict(named, OptimStateKeyType.PARAM_ID, model, optim_input, optim)


def rekey_optim_state_dict(
    optim_state_dict: State,
    optim_state_key_type: OptimStateKeyType,
    model: nn.Module,
    optim_input: OptimInput = None,
    optim: Optimizer | None = None,
) -> State:
    """Exchange parameter numbers for names or names for numbers, to move a state between wrapped and plain models.

    Args:
        optim_state_dict: A full state.
        optim_state_key_type: `OptimStateKeyType.PARAM_NAME` or `PARAM_ID`.
        model: Whose names they are.
        optim_input: What the optimizer was built on, if that was not `model.parameters()`.
        optim: The optimizer itself, instead of `optim_input`.

    Raises:
        UsageError: The state names a parameter the model does not have.
    """
    by_param = {id(param): clean_name(name) for name, param in model.named_parameters()}
    given = optim.param_groups if optim is not None else _given(model, optim_input)
    groups = [each["params"] for each in given] if given and isinstance(given[0], Mapping) else [given]
    names = [by_param[id(param)] for params in groups for param in params]
    numbers = {name: number for number, name in enumerate(names)}
    to_names = optim_state_key_type is OptimStateKeyType.PARAM_NAME
    keys: dict[Any, Any] = dict(enumerate(names)) if to_names else numbers
    unknown = [key for key in optim_state_dict["state"] if key not in keys]
    if unknown:
        msg = f"the optimizer state has {unknown[0]!r}, which {type(model).__name__} does not have"
        raise UsageError(
            msg,
            hint="give the model the state belongs to, and optim_input if it was built on some of its parameters",
        )
    # An optimizer takes each group's parameters by their place, and states list them in another order.
    renumbered = [
        {**each, "params": [keys[key] for key in sorted(each["params"], key=lambda key: numbers.get(key, key))]}
        for each in optim_state_dict["param_groups"]
    ]
    return {
        "state": {keys[key]: value for key, value in optim_state_dict["state"].items()},
        "param_groups": renumbered,
    }


def _cut_flat(full: State, model: nn.Module, optim_input: OptimInput, optim: Optimizer | None) -> State:
    """Let FSDP1 cut to its flat shards; only torch knows where they begin and end."""
    holder = optim or torch.optim.SGD(_given(model, optim_input), lr=0.0)
    with left_out_frozen(model, holder):
        cut: State = cut_to_flat(model, holder, full)
    return unshare_counts(cut)  # else two optimizers that load one full state would count on one tensor


def _given(model: nn.Module, optim_input: OptimInput) -> list[Any]:
    return list(model.parameters()) if optim_input is None else list(optim_input)
