"""Shard what a script gives to DistributedDataParallel, and show the script the wrapper that it expects.

The wrapper is a real instance of torch's class, so that `isinstance`, `.module`, `no_sync()`, names in
`state_dict()` and subclasses hold. Its constructor shards the model and builds no reducer; FSDP averages the
gradients.
"""

import functools
import inspect
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Joinable
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from fsdplaunch.errors import ShardingError
from fsdplaunch.runtime import messages
from fsdplaunch.runtime.auto.context import HookContext
from fsdplaunch.runtime.auto.ddp.comm_hooks import leaving_out_comm_hooks
from fsdplaunch.runtime.auto.ddp.forward import (
    Forward,
    averaging_local_gradients,
    clearing_local_gradients,
)
from fsdplaunch.runtime.auto.ddp.joining import joining_alike
from fsdplaunch.runtime.auto.ddp.sent_buffers import keeping_unsent_buffers, sends_buffers, sent_buffers
from fsdplaunch.runtime.auto.ddp.unused_parameters import agree_on_unused
from fsdplaunch.runtime.auto.detect.adopt_model import adopt_model
from fsdplaunch.runtime.auto.detect.optimizers import regroup
from fsdplaunch.runtime.inspection.parameter_names import unwrapped
from fsdplaunch.runtime.inspection.units import has_shards, is_sharded, is_unit
from fsdplaunch.runtime.patch import replaced
from fsdplaunch.runtime.script_line import script_line
from fsdplaunch.runtime.sharding.gradient_hooks import hook_local_gradients
from fsdplaunch.runtime.sharding.optimizer_params import waits_for_shards
from fsdplaunch.runtime.torch_internals.modules import IGNORED_NAMES, SEND_STATES

_IGNORED = "params_and_buffers_to_ignore"
"""The argument by which what sends rank 0's state leaves tensors out."""


@contextmanager
def sharding_replicas(hook_context: HookContext) -> Iterator[None]:
    """Shard where a script, or a library it uses, builds a DistributedDataParallel."""

    def build(original: Any) -> Any:
        signature = inspect.signature(original)

        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
            given = signature.bind(self, *args, **kwargs)
            given.apply_defaults()
            if _shard(given.arguments["module"], given.arguments, hook_context):
                _fill(self, given.arguments)
            else:
                original(self, *args, **kwargs)

        __init__.__signature__ = signature  # type: ignore[attr-defined]
        return __init__

    with (
        replaced(DistributedDataParallel, "__init__", build),
        replaced(DistributedDataParallel, "forward", _forward),
        joining_alike(),
        clearing_local_gradients(),
        averaging_local_gradients(),
        leaving_out_comm_hooks(),
        replaced(*SEND_STATES, _send_all_but_shards),
    ):
        yield


def _shard(module: nn.Module, given: dict[str, Any], hook_context: HookContext) -> bool:
    """Shard a module unless it is; return whether it is sharded now."""
    model = unwrapped(module)
    name = type(model).__name__.removeprefix("FSDP")
    sharded = is_sharded(model) or has_shards(model)
    what = "gives it to DistributedDataParallel"
    if not hook_context.ownership.claim_replicas(what):
        return sharded  # and stays so
    _check(given["process_group"], name, hook_context)
    _check_complete(module, name)
    hook_context.ownership.ranked = True
    hook_context.streams.scripts = True
    if not sharded:
        loose = bool(given["find_unused_parameters"])
        with keeping_unsent_buffers(module, given):
            adopt_model(model, hook_context, what=what, one_unit=loose)
        if loose:
            messages.say(
                f"find_unused_parameters: ranks may use different parts of {name}, so it is gathered at once"
            )
        for optimizer in filter(waits_for_shards, hook_context.built_optimizers()):
            regroup(optimizer, hook_context, now=True)
    hook_local_gradients(filter(is_unit, model.modules()))
    if "replicas" not in hook_context.printed:
        hook_context.printed.add("replicas")
        messages.say(f"{script_line()}: DistributedDataParallel({name}) is the sharded model")
    return True


def _check(group: dist.ProcessGroup | None, name: str, hook_context: HookContext) -> None:
    """Refuse what cannot be kept.

    Raises:
        ShardingError: Replicas over some of the ranks, or a global batch that the script divides itself.
    """
    if group is not None and dist.get_world_size(group) != hook_context.size:
        msg = f"{script_line()} replicates {name} over {dist.get_world_size(group)} of {hook_context.size} ranks"
        hint = "leave process_group out, or call fsdplaunch.prepare(model, process_group=...) in the script"
        raise ShardingError(msg, hint=hint)
    if hook_context.keeps_batch and hook_context.size > 1:
        msg = (
            f"{script_line()} gives {name} to DistributedDataParallel: the script divides its data by itself,"
            " so launch.keep_global_batch cannot"
        )
        hint = (
            "give --hide-ranks (launch.hide_ranks) if the script has a way for one process; or divide its batch"
            " size by the number of ranks, and launch without the key"
        )
        raise ShardingError(msg, hint=hint)


def _check_complete(module: nn.Module, name: str) -> None:
    """Refuse parameters that the script has torch's wrapper leave alone.

    Raises:
        ShardingError: There are some, of which each rank would train its own.
    """
    ignored = getattr(module, IGNORED_NAMES, ())
    alone = next(
        (each for each, param in module.named_parameters() if each in ignored and param.requires_grad), None
    )
    if alone is not None:
        msg = (
            f"{script_line()} leaves {alone} of {name} out of DistributedDataParallel, to be trained by each rank"
        )
        raise ShardingError(msg, hint="launch with --shard off, which leaves all to the script")


def _fill(ddp: Any, given: dict[str, Any]) -> None:
    """Give a wrapper the attributes that scripts read, and what its forward needs."""
    nn.Module.__init__(ddp)
    Joinable.__init__(ddp)
    ddp.module = given["module"]
    first = next(given["module"].parameters(), None)
    ddp.dim, ddp.device_ids, ddp.output_device = given["dim"], given["device_ids"], given["output_device"]
    ddp.device = None if first is None else first.device
    ddp.device_type = None if first is None else first.device.type
    ddp.is_multi_device_module = False
    ddp.process_group = given["process_group"] or dist.group.WORLD
    ddp.__dict__["forward_sync_buffers"] = ddp.__dict__["broadcast_buffers"] = sends_buffers(given)
    for name in ("find_unused_parameters", "gradient_as_bucket_view", "static_graph"):
        ddp.__dict__[name] = given.get(name)
    ddp.require_backward_grad_sync = ddp.require_forward_param_sync = True
    ddp.mixed_precision, ddp.parameters_to_ignore = given.get("mixed_precision"), set()
    buffers = [*sent_buffers(ddp.module, given).values()]
    ddp.reducer = ddp.logger = _NOTHING
    ddp.__dict__["fsdplaunch_forward"] = Forward(unwrapped(ddp.module), buffers=buffers)
    ddp.__dict__["__reduce_ex__"] = _reducer(weakref.ref(ddp), given)
    if given["find_unused_parameters"]:
        agree_on_unused(unwrapped(ddp.module))


def _reducer(ddp: "weakref.ref[Any]", given: dict[str, Any]) -> Any:
    """Let a wrapper be pickled as the call that makes one of its module: it has nothing of torch's own."""
    chosen = {name: given[name] for name in ("find_unused_parameters", "static_graph") if given.get(name)}

    def reduce_ex(_protocol: int) -> Any:
        wrapper: Any = ddp()
        return functools.partial(DistributedDataParallel, **chosen), (wrapper.module,)

    return reduce_ex


def _send_all_but_shards(original: Any) -> Any:
    """Leave out shards where rank 0's state is sent, as Lightning does before it evaluates."""
    signature = inspect.signature(original)

    def send(*args: Any, **kwargs: Any) -> None:
        call = signature.bind(*args, **kwargs)
        params = call.arguments["module"].named_parameters()
        shards = {name for name, param in params if isinstance(param, DTensor)}
        call.arguments[_IGNORED] = {*call.arguments[_IGNORED], *shards}
        original(*call.args, **call.kwargs)

    return send


class _Nothing:
    """Stands where torch has its reducer and logger, which scripts tell the graph and ask for timings."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: SimpleNamespace(strs_map={}, ints_map={})  # timings, of which there are none


_NOTHING = _Nothing()


def _forward(original: Any) -> Any:
    def forward(self: Any, *inputs: Any, **kwargs: Any) -> Any:
        ours: Forward | None = self.__dict__.get("fsdplaunch_forward")
        if ours is None:
            return original(self, *inputs, **kwargs)
        ours.before(self)
        module = self.module
        output = (module if module is ours.model else ours.computing(module))(*inputs, **kwargs)
        ours.after(self)
        return output

    return forward
