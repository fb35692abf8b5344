"""Make an optimizer that was built on full parameters train the sharded ones, and step with plain local shards.

Parameters are matched by what they are called in the model, never by address: addresses are reused, names are not.
"""

import importlib
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, wraps
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullOptimStateDictConfig, FullStateDictConfig, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as Wrapper
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from fsdplaunch.errors import ShardingError
from fsdplaunch.runtime.inspection.parameters import named_parameters, parameters_of
from fsdplaunch.runtime.messages import quiet_torch
from fsdplaunch.runtime.patch import replaced
from fsdplaunch.runtime.torch_internals.distributed import local_tensor, placements_of, with_local_tensor
from fsdplaunch.runtime.torch_internals.tensors import note_changes

ORIGIN = "fsdplaunch_origin"
"""Attribute of a full parameter that says what became of it; optimizers may be prepared later than models."""

State = dict[str, Any]


@dataclass(slots=True)
class ShardedHome:
    """The model that holds full parameters sharded; None until it is."""

    model: "weakref.ref[nn.Module] | None" = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FullParameter:
    """What a full parameter was called in which model, and its shape there."""

    name: str
    shape: torch.Size
    home: ShardedHome

    @property
    def model(self) -> nn.Module | None:
        """Return the sharded model, if it is alive."""
        return None if self.home.model is None else self.home.model()


def note_full_parameters(full: Mapping[str, torch.Tensor]) -> ShardedHome:
    """Remember on each full parameter, given by clean name, what it is called and shaped, before it is sharded.

    Returns:
        Where to put the sharded model when there is one. The parameters themselves are not kept.
    """
    home = ShardedHome()
    for name, tensor in full.items():
        setattr(tensor, ORIGIN, FullParameter(name=name, shape=tensor.shape, home=home))
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
    return None if origin is None else origin.model


def repoint(optimizer: Optimizer, known: Mapping[int, str]) -> None:
    """Replace an optimizer's parameters, and the state it has for them, by the sharded ones, in place.

    Args:
        optimizer: Built on the full parameters, or already on the sharded ones.
        known: The names of all sharded parameters of prepared models, by their id.

    Raises:
        ShardingError: It holds a parameter of no prepared model, or groups that flat parameters cannot keep apart.
    """
    held = {id(param): (param, state) for param, state in optimizer.state.items()}
    moves = _Moves(optimizer, known)
    for index, group in enumerate(optimizer.param_groups):
        group["params"] = moves.exchange(group["params"], index)
    optimizer.state.clear()
    pending: dict[nn.Module, dict[str, State]] = {}
    for param, state in held.values():
        origin: FullParameter | None = getattr(param, ORIGIN, None)
        model = None if origin is None else origin.model
        if origin is None or model is None:
            optimizer.state[param] = state
        elif (isinstance(model, Wrapper) and param.shape != origin.shape) or id(param) not in known:
            pending.setdefault(model, {})[origin.name] = state
        else:
            optimizer.state[param] = state
    for model, states in pending.items():
        _split_state(optimizer, model, states)


def waits_for_shards(optimizer: Optimizer) -> bool:
    """Return whether an optimizer has a full parameter of a model that is sharded by now."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    origins: list[FullParameter | None] = [getattr(param, ORIGIN, None) for param in params]
    return any(origin is not None and origin.model is not None for origin in origins)


class _Moves:
    """One optimizer's parameters on their way to the sharded models."""

    def __init__(self, optimizer: Optimizer, known: Mapping[int, str]) -> None:
        self.optimizer = optimizer
        self.known = known
        self.now: dict[nn.Module, dict[str, nn.Parameter]] = {}

    def exchange(self, params: list[Any], group: int) -> list[Any]:
        """Return the sharded parameters for a group's full ones, in their order and each once."""
        found: dict[int, Any] = {}
        for position, param in enumerate(params):
            for new in self._sharded(param, f"parameter {position} of group {group}"):
                found.setdefault(id(new), new)
        return list(found.values())

    def _sharded(self, param: Any, where: str) -> list[Any]:
        if id(param) in self.known:
            return [param]
        origin: FullParameter | None = getattr(param, ORIGIN, None)
        model = None if origin is None else origin.model
        if origin is None or model is None:
            msg = f"the optimizer trains {where}, of shape {tuple(param.shape)}, that no prepared model holds"
            raise ShardingError(msg, hint="pass the model it belongs to to fsdplaunch.prepare, before or with it")
        now = self.now.setdefault(model, dict(named_parameters(model)))
        return [now[origin.name]] if origin.name in now else self._flat(model)

    def _flat(self, model: nn.Module) -> list[Any]:
        """Return all flat parameters of a model, in the place of its own ones."""
        groups = len(self.optimizer.param_groups)
        if groups > 1:
            msg = f"the optimizer has {groups} parameter groups, and flat parameters mix them"
            raise ShardingError(msg, hint="set fsdp_use_orig_params to true, or use fsdp_version 2")
        return list(parameters_of(model))


def _split_state(optimizer: Optimizer, model: nn.Module, states: dict[str, State]) -> None:
    """Give the sharded parameters of a model their shards of the full state that is known by name."""
    if isinstance(model, Wrapper):
        _split_flat_state(optimizer, model, states)
        return
    now = dict(named_parameters(model))
    for name, state in states.items():
        optimizer.state[now[name]] = {key: _like(value, now[name]) for key, value in state.items()}


def _like(value: Any, param: nn.Parameter) -> Any:
    """Return a state value split as its parameter is, if it has the parameter's shape; anything else as it is."""
    if not isinstance(value, torch.Tensor) or value.shape != param.shape or not isinstance(param, DTensor):
        return value
    dtype = param.dtype if value.is_floating_point() else value.dtype
    return distribute_tensor(value.to(param.to_local().device, dtype), param.device_mesh, param.placements)


def _split_flat_state(optimizer: Optimizer, model: Wrapper, states: dict[str, State]) -> None:
    """Let FSDP1 cut full state to its flat shards; only torch knows where they begin and end."""
    group = {**optimizer.param_groups[0], "params": list(states)}
    flat = cut_to_flat(model, optimizer, {"state": states, "param_groups": [group]})
    params = [param for each in optimizer.param_groups for param in each["params"]]
    for index, state in flat["state"].items():
        optimizer.state[params[index]] = state


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
        changed: list[Any] = list(args[0])
        for given, now in zip(args[2:], local[2:], strict=True):
            if isinstance(given, list):
                _put_new(given, now, args[0])
                changed += given
        note_changes([value for value in changed if isinstance(value, DTensor)])

    return compute


def _local_lists(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any] | None:
    """Return arguments with local tensors in their lists; None where not all is divided as the parameters are.

    Plain parameters may be among them, which torch's loops over many at once do not take beside shards.
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
    """Return whether some are shards and none is partial, by few calls of functions: steps are often small."""
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


def _put_new(given: list[Any], local: list[Any], params: list[Any]) -> None:
    """Put what a function has made in the place of None where its optimizer looks for it, as shards."""
    for place, (value, made, param) in enumerate(zip(given, local, params, strict=False)):
        if value is None and made is not None:
            given[place] = with_local_tensor(param, made) if isinstance(param, DTensor) else made
