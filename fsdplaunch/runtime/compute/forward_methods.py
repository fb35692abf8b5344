"""Methods other than forward that compute with a model's parameters, such as generate."""

from functools import partial
from typing import Any

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, register_fsdp_forward_method

from fsdplaunch.errors import ShardingError
from fsdplaunch.runtime.sharding.blocks import class_name
from fsdplaunch.runtime.sharding.settings import Settings


def forward_methods(model: nn.Module, settings: Settings) -> tuple[str, ...]:
    """Return the methods to gather parameters for: those configured, and generate where the model has it.

    Raises:
        ShardingError: The model has no such method.
    """
    for name in settings.forward_methods:
        if not callable(getattr(model, name, None)):
            msg = f"sharding.forward_methods: {class_name(model)} has no method {name}"
            raise ShardingError(msg, hint="name methods of the model that prepare is given")
    own = ("generate",) if callable(getattr(model, "generate", None)) else ()
    return tuple(dict.fromkeys((*own, *settings.forward_methods)))


def register(sharded: nn.Module, model: nn.Module, names: tuple[str, ...]) -> None:
    """Make the methods gather the root's parameters first, as forward does.

    Args:
        sharded: What prepare returns: the model itself, or FSDP1's wrapper around it.
        model: The user's model.
        names: The methods.
    """
    for name in names:
        if isinstance(sharded, FullyShardedDataParallel):
            object.__setattr__(sharded, name, partial(_as_forward, sharded, model, name))
        else:
            register_fsdp_forward_method(sharded, name)


def _as_forward(
    wrapper: FullyShardedDataParallel, model: nn.Module, name: str, /, *args: Any, **kwargs: Any
) -> Any:
    """Run a method in the place of the model's forward, so that the wrapper does for it what it does for forward.

    The method may call the model itself, whose forward is back in its place by then.
    """
    held = model.__dict__.get("forward")

    def run(*inner_args: Any, **inner_kwargs: Any) -> Any:
        _put_back(model, held)
        return getattr(model, name)(*inner_args, **inner_kwargs)

    model.__dict__["forward"] = run
    try:
        return wrapper(*args, **kwargs)
    finally:
        _put_back(model, held)


def _put_back(model: nn.Module, held: Any) -> None:
    if held is None:
        model.__dict__.pop("forward", None)
    else:
        model.__dict__["forward"] = held
