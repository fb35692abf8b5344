"""Shard what a script gives to DistributedDataParallel, and give the script the wrapper that it expects. Rule 7.

The wrapper is a real instance of torch's class, so that `isinstance`, `.module`, `no_sync()`, names in
`state_dict()` and subclasses hold. Its constructor shards the model and builds no reducer: FSDP averages the
gradients.
"""

import functools
import inspect
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Joinable
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from fsdplaunch.errors import ShardingError
from fsdplaunch.runtime.auto.context import HookContext
from fsdplaunch.runtime.auto.ddp.spawned_ranks import running_spawned_ranks
from fsdplaunch.runtime.auto.ddp.zero_redundancy import stepping_shards_plainly
from fsdplaunch.runtime.patch import replaced
from fsdplaunch.runtime.script_line import script_line
from fsdplaunch.runtime.torch_internals.modules import IGNORED_NAMES, SEND_STATES

_IGNORED = "params_and_buffers_to_ignore"
"""The argument by which what sends rank 0's state leaves tensors out."""


@contextmanager
def sharding_replicas(hook_context: HookContext) -> Iterator[None]:
    """Shard what a script, or a library, gives to DistributedDataParallel; run the ranks that a script spawns."""

    def build(original: Any) -> Any:
        signature = inspect.signature(original)

        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
            bound = signature.bind(self, *args, **kwargs)
            bound.apply_defaults()
            if _shard(bound.arguments["module"], bound.arguments, hook_context):
                patch_wrappers()
                _fill(self, bound.arguments)
            else:
                original(self, *args, **kwargs)

        __init__.__signature__ = signature  # type: ignore[attr-defined]
        return __init__

    @functools.cache
    def patch_wrappers() -> None:
        from fsdplaunch.runtime.auto.ddp.forward import METHODS

        for name, make in METHODS.items():
            stack.enter_context(replaced(DistributedDataParallel, name, make))

    with ExitStack() as stack:
        stack.enter_context(replaced(DistributedDataParallel, "__init__", build))
        stack.enter_context(replaced(*SEND_STATES, _send_all_but_shards))
        stack.enter_context(stepping_shards_plainly(hook_context.ownership))
        stack.enter_context(running_spawned_ranks())
        yield


def _shard(module: nn.Module, given: dict[str, Any], hook_context: HookContext) -> bool:
    """Shard a module unless it is; return whether it is sharded now."""
    from fsdplaunch.runtime.auto.model.adopt_model import adopt_model
    from fsdplaunch.runtime.auto.model.train_shards import regroup
    from fsdplaunch.runtime.inspection.parameter_names import unwrapped
    from fsdplaunch.runtime.inspection.units import has_shards, is_sharded, is_unit
    from fsdplaunch.runtime.sharding.gradient_hooks import hook_local_gradients
    from fsdplaunch.runtime.sharding.optimizer_params import waits_for_shards

    model, what = unwrapped(module), "gives it to DistributedDataParallel"
    sharded = is_sharded(model) or has_shards(model)
    if not hook_context.ownership.claim_replicas(what):
        return sharded  # and stays so
    _check(module, given["process_group"], hook_context)
    hook_context.streams.scripts = True
    if not sharded:
        with _keeping_unsent_buffers(module, given):
            adopt_model(model, hook_context, what=what, one_unit=bool(given["find_unused_parameters"]))
        for optimizer in filter(waits_for_shards, hook_context.built_optimizers()):
            regroup(optimizer, hook_context, now=True)
    hook_local_gradients(filter(is_unit, model.modules()))
    return True


def _check(module: nn.Module, group: dist.ProcessGroup | None, hook_context: HookContext) -> None:
    """Refuse what cannot be kept.

    Raises:
        ShardingError: Replicas over some of the ranks, a global batch that the script divides itself, parameters
            that the script has torch's wrapper leave alone, or no model at all.
    """
    name, line = type(module).__name__.removeprefix("FSDP"), script_line()
    if isinstance(module, nn.ParameterList | nn.ParameterDict):
        msg = f"{line} replicates parameters without their model"
        raise ShardingError(msg, hint="give the model to DistributedDataParallel; or launch with --shard off")
    if group is not None and dist.get_world_size(group) != hook_context.size:
        msg = f"{line} replicates {name} over {dist.get_world_size(group)} of {hook_context.size} ranks"
        hint = "leave process_group out, or call fsdplaunch.prepare(model, process_group=...) in the script"
        raise ShardingError(msg, hint=hint)
    if hook_context.keeps_batch and hook_context.size > 1:
        msg = (
            f"{line} gives {name} to DistributedDataParallel: the script divides its data by itself,"
            " so launch.keep_global_batch cannot"
        )
        hint = (
            "give --hide-ranks (launch.hide_ranks) if the script has a way for one process; or divide its batch"
            " size by the number of ranks, and launch without the key"
        )
        raise ShardingError(msg, hint=hint)
    ignored = getattr(module, IGNORED_NAMES, ())
    trained = (each for each, param in nn.Module.named_parameters(module) if param.requires_grad)
    if alone := next((each for each in trained if each in ignored), None):
        msg = f"{line} leaves {alone} of {name} out of DistributedDataParallel, to be trained by each rank"
        raise ShardingError(msg, hint="launch with --shard off, which leaves all to the script")


def _fill(ddp: Any, given: dict[str, Any]) -> None:
    """Give a wrapper the attributes that scripts read, and what its forward needs."""
    from fsdplaunch.runtime.auto.ddp.forward import Forward
    from fsdplaunch.runtime.compute.unused_parameters import agree_on_unused
    from fsdplaunch.runtime.inspection.parameter_names import unwrapped

    nn.Module.__init__(ddp)
    Joinable.__init__(ddp)
    ddp.module = given["module"]
    first = next(nn.Module.parameters(ddp.module), None)
    ddp.dim, ddp.device_ids, ddp.output_device = given["dim"], given["device_ids"], given["output_device"]
    ddp.device = None if first is None else first.device
    ddp.device_type = None if first is None else first.device.type
    ddp.is_multi_device_module = False
    ddp.process_group = given["process_group"] or dist.group.WORLD
    ddp.__dict__["forward_sync_buffers"] = ddp.__dict__["broadcast_buffers"] = _sends_buffers(given)
    for name in ("find_unused_parameters", "gradient_as_bucket_view", "static_graph"):
        ddp.__dict__[name] = given.get(name)
    ddp.require_backward_grad_sync = ddp.require_forward_param_sync = True
    ddp.mixed_precision, ddp.parameters_to_ignore = given.get("mixed_precision"), set()
    buffers = [*_sent_buffers(ddp.module, given).values()]
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


class _Nothing:
    """Stands where torch has its reducer and logger, which scripts tell the graph and ask for timings."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: SimpleNamespace(strs_map={}, ints_map={})  # timings, of which there are none


_NOTHING = _Nothing()


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


def _sends_buffers(given: dict[str, Any]) -> bool:
    """Return whether passes begin with rank 0's buffers: set under a newer name, an older one, or not at all."""
    values = [given.get(name) for name in ("forward_sync_buffers", "broadcast_buffers")]
    return bool(next((each for each in values if each is not None), True))


def _sent_buffers(module: nn.Module, given: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the buffers, by name, that a wrapper of a module sends before its passes."""
    ignored = getattr(module, IGNORED_NAMES, ())
    named = module.named_buffers() if _sends_buffers(given) else ()
    return {name: buffer for name, buffer in named if name not in ignored and buffer.numel()}


@contextmanager
def _keeping_unsent_buffers(module: nn.Module, given: dict[str, Any]) -> Iterator[None]:
    """Give each rank back its own of the other buffers, which are rank 0's once a model is sharded."""
    sent = _sent_buffers(module, given)
    own = {name: buffer.clone() for name, buffer in module.named_buffers() if name not in sent}
    yield
    with torch.no_grad():
        for name, buffer in module.named_buffers():
            if name in own and own[name].shape == buffer.shape and not own[name].is_meta:
                buffer.copy_(own[name])
