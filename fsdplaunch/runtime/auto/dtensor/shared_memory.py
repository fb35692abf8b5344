"""What of a shard would share memory with something that is no tensor: refused, or given to read only.

Needed because one process writes into parameters so, on a CPU: `p.detach().numpy()[0] = 1`.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from torch.distributed.tensor import DTensor

from fsdplaunch.errors import ShardingError
from fsdplaunch.runtime.auto.context import HookContext
from fsdplaunch.runtime.auto.dtensor.shard_handlers import Handler
from fsdplaunch.runtime.auto.dtensor.shard_parts import origin_of
from fsdplaunch.runtime.script_line import script_line
from fsdplaunch.runtime.torch_internals.dtensor import local_tensor
from fsdplaunch.runtime.torch_internals.tensors import storage_identity

_HINT = (
    "read by .numpy() or .tolist(), and write by .copy_() or by an index; a library that saves so: save"
    " model.state_dict() by torch.save, or by safetensors' save_file"
)


def read_only(read: Handler, hook_context: HookContext) -> Handler:
    """Return a handler whose array cannot be written into if it is of a parameter, a gradient or optimizer state.

    Args:
        read: Makes an array of the full tensor.
        hook_context: This worker's.
    """

    def compute(func: Any, args: Any, kwargs: Any) -> Any:
        array = read(func, args, kwargs)
        tensor = args[0]
        if isinstance(tensor, DTensor) and tensor.device.type == tensor.device_mesh.device_type == "cpu":
            own = storage_identity(local_tensor(origin_of(tensor)))
            if any(storage_identity(local_tensor(each)) == own for each in _held(hook_context)):
                array.flags.writeable = False
        return array

    return compute


def _held(hook_context: HookContext) -> Iterator[Any]:
    """Yield the shards that models and optimizers hold."""
    params = [param for model in list(hook_context.models) for param in model.parameters()]
    states = [state for optimizer in hook_context.built_optimizers() for state in optimizer.state.values()]
    values: Iterable[Any] = [*params, *(param.grad for param in params), *(v for s in states for v in _values(s))]
    yield from (value for value in values if isinstance(value, DTensor))


def _values(state: Any) -> Iterable[Any]:
    return state.values() if isinstance(state, dict) else ()


def refuse_memory(func: Any, _args: Any, _kwargs: Any) -> Any:
    """Refuse the memory behind a shard, which torch takes for one that is there, and crashes.

    Raises:
        ShardingError: Always.
    """
    msg = f"{script_line()}: {func.__name__}() of a sharded tensor has no memory of the full one"
    raise ShardingError(msg, hint=_HINT)
