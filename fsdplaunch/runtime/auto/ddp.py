"""Scripts for DistributedDataParallel: what they give to it is sharded, and the wrapper is torch's own. Rule 7.

The wrapper is a real instance of torch's class, so that `isinstance`, `.module`, `no_sync()`, names in
`state_dict()` and subclasses hold. Its constructor shards the model and builds no reducer: FSDP averages the
gradients. Ranks that the script would spawn run in the workers that the launcher has started.
"""

import functools
import inspect
import os
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from types import ModuleType, SimpleNamespace
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn
from torch.distributed.algorithms.join import Joinable
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from fsdplaunch.errors import ShardingError
from fsdplaunch.files import flush_both
from fsdplaunch.runtime import messages
from fsdplaunch.runtime.api.gradients import average_gradients
from fsdplaunch.runtime.auto import HookContext
from fsdplaunch.runtime.auto.model.adopt_models import adopt_model, regroup
from fsdplaunch.runtime.auto.rank0.passes import passes_of
from fsdplaunch.runtime.inspection import unwrapped
from fsdplaunch.runtime.inspection.units import has_shards, is_sharded, is_unit
from fsdplaunch.runtime.messages import is_user_file, script_line
from fsdplaunch.runtime.patch import replaced
from fsdplaunch.runtime.sharding.gradients import agree_on_unused, hook_local_gradients
from fsdplaunch.runtime.sharding.optimizers import waits_for_shards
from fsdplaunch.runtime.torch_internals.modules import BUILTIN_HOOK, IGNORED_NAMES, compiled_module, untraced
from fsdplaunch.runtime.torch_internals.tensors import overwriting_uncounted


def build_zero(
    original: Any, hook_context: HookContext, zero: Any, params: Any, optimizer_class: Any, **how: Any
) -> None:
    """Stand for the constructor of ZeroRedundancyOptimizer: the state of every optimizer is divided already."""
    if hook_context.ownership.ours is not False:
        name = getattr(optimizer_class, "__name__", "the optimizer")
        msg = f"{script_line()} builds a ZeroRedundancyOptimizer: FSDP already shards the state of {name}"
        raise ShardingError(msg, hint=f"build {name} itself; or launch with --shard off")
    original(zero, params, optimizer_class, **how)


_REFUSED = 76  # status of a process that would have joined ranks; no shell or interpreter gives it by itself

_started: dict[BaseProcess, str] = {}
"""What is to be said of a process of the script's, if it would have joined ranks."""


def raise_refused() -> None:
    """Wait for the processes that the ended script has started, and raise where one would have joined ranks."""
    for process, message in _started.items():
        process.join(0 if process.daemon else None)
        if process.exitcode == _REFUSED:
            hint = "leave the processes to fsdplaunch launch: call in the script what each of them would run"
            raise ShardingError(message, hint=hint)


def _may_join_ranks(function: Any) -> bool:
    function = getattr(function, "func", function)
    names = getattr(function, "__globals__", {})
    if not dist.is_initialized() or not is_user_file(str(names.get("__file__", "<"))):
        return False
    for value in list(names.values()):
        name = value.__dict__.get("__name__") if isinstance(value, ModuleType) else None
        home = getattr(value, "__module__", None) if isinstance(value, type) or callable(value) else name
        if str(home).startswith(("torch.distributed", "torch.nn.parallel")):
            return True
    return False


class _Ended:
    """What `mp.spawn(..., join=False)` returns here: its function has returned."""

    processes: tuple[()] = ()

    def join(self, *_: Any, **__: Any) -> bool:
        return True


def spawn_ranks(
    original: Any,
    _: HookContext,
    fn: Any,
    args: Any = (),
    nprocs: int = 1,
    join: bool = True,
    *more: Any,
    **kwargs: Any,
) -> Any:
    """Stand for `torch.multiprocessing.spawn`: what a script starts as its ranks this worker runs itself.

    Each of the launcher's workers would start them: these know nothing of the launch, and wait for each other at
    one port. Ranks that are started in another way are refused where they would join a group.
    """
    if not _may_join_ranks(fn):
        return original(fn, args, nprocs, join, *more, **kwargs)
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if nprocs != here:
        msg = f"{script_line()}: mp.spawn starts {nprocs} ranks here, but the launch has {here}"
        raise ShardingError(msg, hint=f"launch with --workers-per-node {nprocs}, or have the script start {here}")
    fn(int(os.environ.get("LOCAL_RANK", "0")), *args)
    return None if join else _Ended()


def start_process(original: Any, _: HookContext, process: Any) -> None:
    """Stand for `Process.start`: a process of the script's may do anything but join ranks."""
    target = getattr(process, "_target", None)
    if _may_join_ranks(target):
        what = "starts a process that calls init_process_group: the launch has started the ranks"
        _started[process] = message = f"{script_line()} {what}"
        process._target = _WithoutGroup(target, message)
    original(process)


class _WithoutGroup:
    """What a process that the script has started runs: it may do anything but join ranks."""

    def __init__(self, target: Any, message: str) -> None:
        self.target, self.message = target, message

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        def leave(*_: Any, **__: Any) -> None:  # an error scripts catch, and go on to train a copy in each process
            messages.say_anywhere(f"{self.message}; this process ends")
            flush_both()
            os._exit(_REFUSED)

        dist.init_process_group = dist.distributed_c10d.init_process_group = leave
        return self.target(*args, **kwargs)


def construct(original: Any, hook_context: HookContext, ddp: Any, *args: Any, **kwargs: Any) -> None:
    """Stand for the constructor of DistributedDataParallel, which shards what it is given."""
    bound = inspect.signature(original).bind(ddp, *args, **kwargs)
    bound.apply_defaults()
    given: dict[str, Any] = bound.arguments
    model, what = unwrapped(given["module"]), "gives it to DistributedDataParallel"
    sharded = is_sharded(model) or has_shards(model)
    ours = hook_context.ownership.claim_replicas(what)
    if ours:
        _check(given["module"], given["process_group"], hook_context)
        hook_context.streams.scripts = True
        if not sharded:
            with _keeping_unsent_buffers(given):
                adopt_model(model, hook_context, what=what, one_unit=bool(given["find_unused_parameters"]))
            for optimizer in filter(waits_for_shards, hook_context.built_optimizers()):
                regroup(optimizer, hook_context, now=True)
        hook_local_gradients(filter(is_unit, model.modules()))
    elif not sharded:  # what is, by others, stays so
        original(ddp, *args, **kwargs)
        return
    if "fsdplaunch" not in str(DistributedDataParallel.forward.__module__):
        hook_context.undo.enter_context(replaced(DistributedDataParallel, "forward", _forward))
    # Give a wrapper the attributes that scripts read, and what its forward needs.
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
    ddp.reducer = ddp.logger = _Nothing()
    for name, (what, hint) in _REFUSED_METHODS.items():
        ddp.__dict__[name] = functools.partial(_refuse, what, hint)
    ddp.__dict__["fsdplaunch_forward"] = Forward(unwrapped(ddp.module), [*_sent_buffers(given).values()])
    # It is pickled as the call that makes one of its module: it has nothing of torch's own.
    chosen = {name: given[name] for name in ("find_unused_parameters", "static_graph") if given.get(name)}
    wrapper: Any = weakref.ref(ddp)
    make = functools.partial(DistributedDataParallel, **chosen)
    ddp.__dict__["__reduce_ex__"] = lambda _: (make, (wrapper().module,))
    if given["find_unused_parameters"]:
        agree_on_unused(unwrapped(ddp.module))


def _check(module: nn.Module, group: dist.ProcessGroup | None, hook_context: HookContext) -> None:
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
            f"{line} gives {name} to DistributedDataParallel: the script divides its data itself,"
            " so launch.keep_global_batch cannot be used"
        )
        hint = (
            "add --hide-ranks (launch.hide_ranks) if the script can run as one process; or divide its batch"
            " size by the number of ranks, and launch without the key"
        )
        raise ShardingError(msg, hint=hint)
    ignored = getattr(module, IGNORED_NAMES, ())
    trained = (each for each, param in nn.Module.named_parameters(module) if param.requires_grad)
    if alone := next((each for each in trained if each in ignored), None):
        msg = f"{line} leaves {alone} of {name} out of DistributedDataParallel, to be trained by each rank"
        raise ShardingError(msg, hint="launch with --shard off, which leaves all to the script")


class _Nothing:
    """Stands where torch has its reducer and logger, whose methods scripts call."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: SimpleNamespace(strs_map={}, ints_map={})  # timings, of which there are none


def send_all_but_shards(original: Any, _: HookContext, *args: Any, **kwargs: Any) -> None:
    """Leave out shards where rank 0's state is sent, as Lightning does before it evaluates."""
    call = inspect.signature(original).bind(*args, **kwargs)
    params = call.arguments["module"].named_parameters()
    shards = {name for name, param in params if isinstance(param, DTensor)}
    name = "params_and_buffers_to_ignore"
    call.arguments[name] = {*call.arguments[name], *shards}
    original(*call.args, **call.kwargs)


def _sends_buffers(given: dict[str, Any]) -> bool:
    values = [given.get(name) for name in ("forward_sync_buffers", "broadcast_buffers")]
    return bool(next((each for each in values if each is not None), True))


def _sent_buffers(given: dict[str, Any]) -> dict[str, torch.Tensor]:
    ignored = getattr(given["module"], IGNORED_NAMES, ())
    named = given["module"].named_buffers() if _sends_buffers(given) else ()
    return {name: buffer for name, buffer in named if name not in ignored and buffer.numel()}


@contextmanager
def _keeping_unsent_buffers(given: dict[str, Any]) -> Iterator[None]:
    """Give each rank back its own of the other buffers, which are rank 0's once a model is sharded."""
    module, sent = given["module"], _sent_buffers(given)
    own = {name: buffer.clone() for name, buffer in module.named_buffers() if name not in sent}
    yield
    with torch.no_grad():
        for name, buffer in module.named_buffers():
            if name in own and own[name].shape == buffer.shape and not own[name].is_meta:
                buffer.copy_(own[name])


class Forward:
    """One wrapper's passes."""

    def __init__(self, model: nn.Module, buffers: Sequence[torch.Tensor]) -> None:
        self.model, self.buffers = model, buffers
        self.syncs, self.is_alone = True, False
        self.before, self.after = untraced(self._begin), untraced(self._end)  # made once: that takes long

    def _begin(self, ddp: Any) -> None:
        if self.model not in _trained and self.model.training and torch.is_grad_enabled():
            _trained.add(self.model)
            passes_of(self.model).turn(self.model)
        if ddp.require_backward_grad_sync != self.syncs:
            self.syncs = bool(ddp.require_backward_grad_sync)
            average_gradients(self.model, on=self.syncs)
        self.is_alone = False
        if ddp.require_forward_param_sync and self.buffers:
            self.is_alone = not passes_of(self.model).turn(self.model)
            if not self.is_alone:
                self._send_buffers()

    def computing(self, module: nn.Module) -> nn.Module:
        """Return what computes a pass: the model itself, not compiled, where rank 0 makes it alone."""
        trains = self.model.training and torch.is_grad_enabled()
        if compiled_module(module) is not self.model or trains:
            return module
        return self.model if passes_of(self.model).is_alone_without_compiling(self.model) else module

    def _end(self, ddp: Any) -> None:
        """Note whether the next pass is to begin with rank 0's buffers: after one that averages, as torch does."""
        if not self.is_alone:  # the other ranks do not note it
            ddp.require_forward_param_sync = torch.is_grad_enabled() and ddp.require_backward_grad_sync

    @torch.no_grad()
    def _send_buffers(self) -> None:
        """Overwrite buffers with rank 0's, all of one dtype and device at once. Collective.

        Not counted as a change, as under torch's wrapper: an earlier pass may still wait for its backward.
        """
        kinds: dict[Any, list[torch.Tensor]] = {}
        for buffer in self.buffers:
            kinds.setdefault((buffer.dtype, buffer.device), []).append(buffer)
        for kind in kinds.values():
            flat = torch.cat([buffer.reshape(-1) for buffer in kind])
            dist.broadcast(flat, src=0)
            with overwriting_uncounted(kind):
                for buffer, part in zip(kind, flat.split([each.numel() for each in kind]), strict=True):
                    buffer.copy_(part.view_as(buffer))


_trained: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()  # models that were called in training mode


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


def _refuse(what: str, hint: str, *_: Any, **__: Any) -> NoReturn:
    msg = f"{script_line()} {what}"
    raise ShardingError(msg, hint=hint)


_HOOK = (
    "registers a hook for communication, and FSDP averages the gradients",
    "leave it out; precision.reduce sets the dtype that gradients are averaged in",
)
_JOIN = (
    "enters join(): every pass needs every rank, even one without a batch left",
    "give all ranks the same number of batches (drop_last=True, DistributedSampler), and leave join() out",
)
_REFUSED_METHODS = {"join_hook": _JOIN, "register_comm_hook": _HOOK, BUILTIN_HOOK: _HOOK}
