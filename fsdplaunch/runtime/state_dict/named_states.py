"""What torch's `get_model_state_dict` and `get_optimizer_state_dict` give, under the names of the user's model.

Torch looks for each parameter's name in the tree of modules four times, which with many small tensors is most of
what a save costs before its first byte. Where no wrapper has names of its own, `named_parameters` has them all.
"""

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from fsdplaunch.runtime.inspection.parameter_names import clean_name

State = dict[str, Any]


def model_state(model: nn.Module) -> State:
    """Return a model's state dict, sharded tensors as this rank has them; every rank calls this."""
    found = model.state_dict() if _keeps_names(model) else get_model_state_dict(model)
    return renamed(found, clean_name)


def optimizer_state(model: nn.Module, optimizer: Optimizer) -> State:
    """Return an optimizer's state, with names for numbers of parameters; every rank calls this.

    Args:
        model: Whose parameters it trains.
        optimizer: One that has made no step yet makes one of zero length, as torch has it.
    """
    known = _names(model, optimizer) if optimizer.state and _keeps_names(model) else None
    if known is None:
        return renamed_optimizer(get_optimizer_state_dict(model, optimizer), clean_name)
    return renamed_optimizer(optimizer.state_dict(), known.__getitem__)


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


def _names(model: nn.Module, optimizer: Optimizer) -> list[str] | None:
    """Return the name of each of an optimizer's parameters, by its number; None where torch has to look."""
    names = {id(param): clean_name(name) for name, param in model.named_parameters()}
    params = [param for group in optimizer.param_groups for param in group["params"]]
    known = {id(param) for param in params}
    if not known <= names.keys() or not {id(param) for param in optimizer.state} <= known:
        return None
    return [names[id(param)] for param in params]
