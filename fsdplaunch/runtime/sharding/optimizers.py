"""Make an optimizer that was built on full parameters train the sharded ones, and step with plain local shards.

Parameters are matched by what they are called in the model, never by address: addresses are reused, names are not.
"""

import importlib
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache, wraps
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.fsdp import FullOptimStateDictConfig, FullStateDictConfig, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as Wrapper
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from fsdplaunch.errors import ShardingError
from fsdplaunch.runtime.inspection import named_parameters, parameters_of
from fsdplaunch.runtime.messages import quiet_torch
from fsdplaunch.runtime.patch import replaced
from fsdplaunch.runtime.torch_internals.distributed import local_tensor, placements_of, with_local_tensor
from fsdplaunch.runtime.torch_internals.tensors import note_changes

ORIGIN = "fsdplaunch_origin"
"""Attribute of a full parameter that says what became of it; optimizers may be prepared later than models."""

State = dict[str, Any]
Home = list["weakref.ref[nn.Module]"]  # the sharded model that full parameters went to; empty until there is one


class FullParameter(NamedTuple):
    """What a full parameter was called in its model, its shape there, and where it went."""

    name: str
    shape: torch.Size
    home: Home


def note_full_parameters(model: nn.Module) -> Home:
    """Note on each full parameter what it is called and shaped; return where to put the sharded model, then."""
    home: Home = []
    for name, tensor in named_parameters(model):
        setattr(tensor, ORIGIN, FullParameter(name, tensor.shape, home))
    return home


@contextmanager
def keep_parameter_attributes(model: nn.Module) -> Iterator[None]:
    """Put on the shards of a model that is sharded inside what is on its parameters: `p.no_decay = True`."""
    full = {name: dict(vars(param)) for name, param in named_parameters(model)}
    yield
    for name, param in named_parameters(model):
        given = {key: value for key, value in full.get(name, {}).items() if not key.startswith("fsdplaunch")}
        vars(param).update(given)


def name_of(param: torch.Tensor) -> str | None:
    """Return what a full parameter was called in the model that `prepare` sharded; None for any other tensor."""
    origin: FullParameter | None = getattr(param, ORIGIN, None)
    return None if origin is None else origin.name


def sharded_home(param: torch.Tensor) -> nn.Module | None:
    """Return the sharded model that a full parameter was part of, if it is alive; None for any other tensor."""
    origin: FullParameter | None = getattr(param, ORIGIN, None)
    return origin.home[0]() if origin is not None and origin.home else None


def waits_for_shards(optimizer: Optimizer) -> bool:
    """Return whether an optimizer has a full parameter of a model that is sharded by now."""
    return any(sharded_home(param) is not None for group in optimizer.param_groups for param in group["params"])


def repoint(optimizer: Optimizer, known: Mapping[int, str]) -> None:
    """Replace an optimizer's parameters, and the state it has for them, by the sharded ones, in place.

    `known` are the names of all sharded parameters of prepared models, by their id. A parameter of no prepared
    model, or groups that flat parameters cannot keep apart, are a ShardingError.
    """
    held = [(param, state) for param, state in optimizer.state.items()]
    named = cache(lambda model: dict(named_parameters(model)))
    for index, group in enumerate(optimizer.param_groups):
        found: dict[int, Any] = {}  # in their order and each once
        for position, param in enumerate(group["params"]):
            if id(param) in known:
                found.setdefault(id(param), param)
                continue
            model = sharded_home(param)
            if model is None:
                where = f"parameter {position} of group {index}, of shape {tuple(param.shape)}"
                msg = f"the optimizer trains {where}, which no prepared model holds"
                raise ShardingError(
                    msg, hint="pass the model it belongs to to fsdplaunch.prepare, before or with it"
                )
            now, name = named(model), name_of(param)
            if name not in now and len(optimizer.param_groups) > 1:
                groups = len(optimizer.param_groups)
                msg = f"the optimizer has {groups} parameter groups, and flat parameters mix them"
                raise ShardingError(msg, hint="set fsdp_use_orig_params to true, or use fsdp_version 2")
            for new in [now[name]] if name in now else parameters_of(model):  # all flat ones for any full one
                found.setdefault(id(new), new)
        group["params"] = list(found.values())
    _move_state(optimizer, held, known, named)


def _move_state(
    optimizer: Optimizer, held: list[tuple[Any, State]], known: Mapping[int, str], named: Callable[..., Any]
) -> None:
    """Give the sharded parameters their shards of the full state that is known by name."""
    optimizer.state.clear()
    flat: dict[Wrapper, dict[str, State]] = {}
    for param, state in held:
        model, origin = sharded_home(param), getattr(param, ORIGIN, None)
        shape = None if origin is None else origin.shape
        is_cut = id(param) not in known or (isinstance(model, Wrapper) and param.shape != shape)
        if model is None or origin is None or not is_cut:
            optimizer.state[param] = state
        elif isinstance(model, Wrapper):
            flat.setdefault(model, {})[origin.name] = state
        else:
            new = named(model)[origin.name]
            optimizer.state[new] = {key: _like(value, new) for key, value in state.items()}
    for wrapper, states in flat.items():  # only torch knows where flat shards begin and end
        group = {**optimizer.param_groups[0], "params": list(states)}
        cut = cut_to_flat(wrapper, optimizer, {"state": states, "param_groups": [group]})
        params = [param for each in optimizer.param_groups for param in each["params"]]
        optimizer.state.update({params[index]: state for index, state in cut["state"].items()})


def _like(value: Any, param: nn.Parameter) -> Any:
    """Return a state value split as its parameter is, if it has the parameter's shape; anything else as it is."""
    if not isinstance(value, torch.Tensor) or value.shape != param.shape or not isinstance(param, DTensor):
        return value
    dtype = param.dtype if value.is_floating_point() else value.dtype
    return distribute_tensor(value.to(param.to_local().device, dtype), param.device_mesh, param.placements)


def cut_to_flat(model: nn.Module, optimizer: Optimizer, full: State) -> State:
    """Return what of a full optimizer state this rank's flat shards of an FSDP1 model need, as torch cuts it."""
    options = (FullStateDictConfig(rank0_only=False), FullOptimStateDictConfig(rank0_only=False))
    with quiet_torch(), Wrapper.state_dict_type(model, StateDictType.FULL_STATE_DICT, *options):
        flat: State = Wrapper.optim_state_dict_to_load(model, optimizer, full)
    return flat


_FUNCTIONS = (
    *("adadelta", "adagrad", "adam", "adamax", "adamw", "asgd"),
    *("nadam", "radam", "rmsprop", "rprop", "sgd"),
)
"""Each in a module of its name: it gets lists of parameters, gradients and state, and goes by element."""


@contextmanager
def stepping_with_local_shards() -> Iterator[None]:
    """Have torch's optimizers, and those of scripts that call their functions, compute with local shards."""
    with ExitStack() as stack:
        for name in _FUNCTIONS:
            module = importlib.import_module(f"torch.optim.{name}")
            stack.enter_context(replaced(module, name, _with_local_shards))
        yield


@cache
def step_with_local_shards() -> None:
    """Do so until the process ends."""
    _until_the_end.enter_context(stepping_with_local_shards())


_until_the_end = ExitStack()


def _with_local_shards(function: Callable[..., None]) -> Callable[..., None]:
    @wraps(function)
    def compute(*args: Any, **kwargs: Any) -> None:
        local = None if torch.compiler.is_compiling() else _local_lists(args, kwargs)
        if local is None:
            function(*args, **kwargs)
            return
        function(*local, **kwargs)
        params = args[0]
        changed: list[Any] = list(params)
        for given, now in zip(args[2:], local[2:], strict=True):
            if isinstance(given, list):
                for place, (value, made, param) in enumerate(zip(given, now, params, strict=False)):
                    if value is None and made is not None:  # a momentum of the first step, for its optimizer
                        given[place] = with_local_tensor(param, made) if isinstance(param, DTensor) else made
                changed += given
        note_changes([value for value in changed if isinstance(value, DTensor)])

    return compute


def _local_lists(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any] | None:
    """Return arguments with local tensors in their lists; None where not all is divided as the parameters are.

    By few calls of functions: steps are often small. Plain parameters may be among them, which torch's loops over
    many at once do not take beside shards.
    """
    if not args or not isinstance(args[0], list) or not _have_shards(args[0]) or kwargs.get("differentiable"):
        return None
    for value in kwargs.values():
        if isinstance(value, DTensor):
            return None
    found: list[Any] = []
    for given in args:
        local = _local(given, args[0]) if isinstance(given, list) else given
        if local is None and given is not None:
            return None
        found.append(local)
    return found


def _have_shards(params: list[Any]) -> bool:
    """Return whether some are shards and none is partial."""
    found = False
    for param in params:
        if isinstance(param, DTensor):
            found = True
            for placement in placements_of(param):
                if placement.is_partial():
                    return False
    return found


def _local(given: list[Any], params: list[Any]) -> list[Any] | None:
    """Return the local tensors of a list that has one entry for each parameter, or is empty.

    None where one of them is divided otherwise. Counts of steps are plain tensors of one number. A momentum is
    None before the first step.
    """
    local: list[Any] = []
    for value, param in zip(given, params, strict=False):
        if isinstance(value, DTensor):
            if not isinstance(param, DTensor) or placements_of(value) != placements_of(param):
                return None
            local.append(local_tensor(value))
        elif isinstance(value, torch.Tensor) and value.dim() and isinstance(param, DTensor):
            return None
        else:
            local.append(value)
    return local
