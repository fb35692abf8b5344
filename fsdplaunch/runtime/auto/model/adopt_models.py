"""Find the script's models where they are moved, compiled or given to an optimizer, and shard them. Rule 1.

Moving a model to the device is the last moment at which the full model need not be on any one device, and the
first at which it is complete. An optimizer gets parameters only, and a parameter does not know its module: the
modules that exist are recorded, weakly. An optimizer's models are sharded right after its base class has its
groups, so that what a subclass keeps for itself is the shards already.
"""

import os
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader

from fsdplaunch.config.environment import COMPARED
from fsdplaunch.errors import ShardingError
from fsdplaunch.runtime import messages
from fsdplaunch.runtime.api.prepare import prepare
from fsdplaunch.runtime.auto import HookContext, saves
from fsdplaunch.runtime.auto.model.forward_backward import Calls, original_name
from fsdplaunch.runtime.auto.model.parameters import KeptWrites, keeping_references, late_parameter
from fsdplaunch.runtime.auto.rank0.passes import Passes, note_gradients, note_paths
from fsdplaunch.runtime.auto.rank0.position import trains_shards
from fsdplaunch.runtime.auto.rank0.service import open_once
from fsdplaunch.runtime.auto.torch_calls import average_closure
from fsdplaunch.runtime.device import joined_by_script
from fsdplaunch.runtime.inspection import named_parameters, parameters_of, unwrapped
from fsdplaunch.runtime.inspection.describe import announcing
from fsdplaunch.runtime.inspection.units import is_sharded, is_unit, reshard, restore_classes
from fsdplaunch.runtime.messages import being_built, script_line
from fsdplaunch.runtime.patch import replaced
from fsdplaunch.runtime.plugin import FullyShardedDataParallelPlugin, ambient_plugin
from fsdplaunch.runtime.sharding.checks import check_kinds
from fsdplaunch.runtime.sharding.gradients import agree_on_alternatives
from fsdplaunch.runtime.sharding.mesh import shard_target
from fsdplaunch.runtime.sharding.optimizers import repoint, sharded_home
from fsdplaunch.runtime.sharding.registry import AVERAGED, keep_equal, known_parameters
from fsdplaunch.runtime.sharding.wrap import class_name, find_blocks, misses_most, runs, without_shared
from fsdplaunch.runtime.state_dict.deepcopy import allow_deepcopy
from fsdplaunch.runtime.state_dict.gather import await_main_thread
from fsdplaunch.runtime.torch_internals.fsdp import group_refs
from fsdplaunch.runtime.torch_internals.modules import CALL_METHOD, before_state_dict, parse_move


def adopt_model(model: nn.Module, hook_context: HookContext, *, what: str, one_unit: bool = False) -> None:
    """Shard a model that is not sharded yet, in place; a list or dict of models as each of them by itself.

    `what` is what the script does here, for errors. With `one_unit` all of it is gathered at once, because ranks
    may compute with different parts of it.
    """
    if is_sharded(model):
        return
    if isinstance(model, nn.ModuleList | nn.ModuleDict) and not runs(model):  # which `fully_shard` refuses
        for held in model.children():
            if any(param.requires_grad for param in parameters_of(held)):
                adopt_model(held, hook_context, what=what, one_unit=one_unit)
        return
    line = script_line()
    with _naming_line(line, what, model):
        check_kinds(model)
    _check_unsharded(model, hook_context, line)
    _check_no_gradients(class_name(model), parameters_of(model), what)
    compared = os.environ.pop(COMPARED, None)  # whether the launcher knows of a comparison, for the first model
    about = f"for the script, {line}" + (f"; {compared}" if compared else "")
    with _naming_line(line, what, model), keeping_references(model), announcing(about):
        prepare(model, plugin=_one_unit() if one_unit else _plugin(model, hook_context))
    if hook_context.size > 1:
        note_gradients(model, original_name(model))
        agree_on_alternatives(model)
    attach_hooks(model, hook_context, line)


def _check_unsharded(model: nn.Module, hook_context: HookContext, line: str) -> None:
    """Refuse a model with parameters of another that is sharded, or with a part that was moved by itself."""
    params, inside = dict(named_parameters(model)), set(model.modules())
    owners = {id(param): other for other in hook_context.models for param in parameters_of(other)}
    for name, param in params.items():
        owner = owners.get(id(param)) or sharded_home(param)
        if param.requires_grad and owner is not None and owner not in inside:
            earlier = hook_context.models.get(owner, "another line")
            msg = (
                f"{line}: {name} of {class_name(model)} also belongs to {original_name(owner)}, which was"
                f" sharded at {earlier}: the two would be trained separately"
            )
            hint = "make both parts of one module whose forward calls them, or give that one to fsdplaunch.prepare"
            raise ShardingError(msg, hint=hint)
    late = [name for name, param in params.items() if not isinstance(param, DTensor)]
    if len(late) == len(params):
        return
    for submodule in model.modules():
        if submodule in hook_context.models:
            earlier = hook_context.models[submodule]
            msg = f"{line}: {original_name(submodule)} was sharded at {earlier}, before it was part of a model"
            hint = "move the complete model to the device, not its submodules, or call fsdplaunch.prepare(model)"
            raise ShardingError(msg, hint=hint)
    raise late_parameter(model, late[0], line)


def _check_no_gradients(whose: str, params: Iterable[nn.Parameter], what: str) -> None:
    if any(param.grad is not None and (param.grad.is_sparse or param.grad.any()) for param in params):
        msg = f"{script_line()} {what} after a backward pass: {whose} has gradients, of each rank's own rows"
        hint = (
            "build the optimizer, or move the model to its device (model.to(device)), before the first backward"
            " pass; or call fsdplaunch.prepare(model) there. If its gradients are not needed: model.zero_grad()"
        )
        raise ShardingError(msg, hint=hint)


@contextmanager
def _naming_line(line: str, what: str, model: nn.Module) -> Iterator[None]:
    """Say in an error where the script has a model sharded, and what else it can do."""
    try:
        yield
    except ShardingError as error:
        msg = f"{line} {what}, and {class_name(model)} cannot be sharded there: {error.message}"
        ways = "or call fsdplaunch.prepare(model, optimizer) in the script where it should be"
        raise ShardingError(msg, hint=f"{error.hint}; {ways}" if error.hint else ways) from error


def attach_hooks(model: nn.Module, hook_context: HookContext, line: str) -> None:
    """Make a model that was just sharded behave as the script expects of the one it wrote."""
    name, ownership = original_name(model), hook_context.ownership
    hook_context.note_model(model, line)
    ownership.adopted = ownership.adopted or line
    open_once(hook_context)
    allow_deepcopy(model, lambda copied, of: attach_hooks(copied, hook_context, hook_context.models[of]))
    passes = Passes(model, name, hook_context)
    if hook_context.size > 1:
        note_paths(model, name)  # before the hooks of passes, which then come before these
    divided = None
    if hook_context.keeps_batch and hook_context.data.size > 1 and not ownership.ranked:
        from fsdplaunch.runtime.auto.batch.divided_pass import DividedPasses
        from fsdplaunch.runtime.auto.batch.rank_rows import data_group

        group = data_group(hook_context.rank, hook_context.size, hook_context.data.size)
        divided = DividedPasses(model, name, hook_context.data, group, hook_context.learning_rates)
    hook_context.complete[model] = Calls(model, line, hook_context, passes, divided).check
    for unit in filter(is_unit, model.modules()):
        # In which torch reshards the unit.
        before_state_dict(unit, lambda: await_main_thread(f"state_dict() at {script_line()}"))
        for ref in group_refs(unit):
            KeptWrites(ref)
    # It is pickled, scripted and saved as what it was before: on all ranks, or on rank 0 alone.
    for module in model.modules():
        module.__dict__["__reduce_ex__"] = _of_saves(saves.reduce_module, module)
        module.__dict__["__prepare_scriptable__"] = _of_saves(saves.scriptable, module)
    if hasattr(model, "save_pretrained"):
        model.__dict__["save_pretrained"] = _of_saves(saves.save_pretrained, model)
    restore_classes(model)


def _of_saves(function: Callable[..., Any], module: nn.Module) -> Callable[..., Any]:
    held = weakref.ref(module)

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(held(), *args, **kwargs)

    return call


def _plugin(model: nn.Module, hook_context: HookContext) -> FullyShardedDataParallelPlugin:
    """Return the launch's plugin; for a model that is not of repeated blocks one that makes it a single unit."""
    plugin = ambient_plugin()
    settings = plugin.settings()
    if settings.wrap != "TRANSFORMER_BASED_WRAP" or (settings.block_classes and not hook_context.models):
        return plugin
    with suppress(ShardingError):
        blocks = find_blocks(model, settings.block_classes)
        if settings.block_classes or not misses_most(model, without_shared(model, blocks)):
            return plugin
    return _one_unit()


def _one_unit() -> FullyShardedDataParallelPlugin:
    version = ambient_plugin().settings().version
    return FullyShardedDataParallelPlugin(fsdp_version=version, auto_wrap_policy="no_wrap")


def note_module(original: Any, hook_context: HookContext, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Record a module where it is made, by `__init__` or `__setstate__`."""
    hook_context.module_registry.note(module)
    return original(module, *args, **kwargs)


def move(original: Any, hook_context: HookContext, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Stand for `Module.to`."""
    device, dtype = parse_move(args, kwargs)
    if _is_ours(module, hook_context, device, f"moves {type(module).__name__} to {device}"):
        if dtype is not None:
            original(module, dtype)
        adopt_model(unwrapped(module), hook_context, what=f"moves it to {device}")
    return original(module, *args, **kwargs)


def move_to_gpu(original: Any, hook_context: HookContext, module: nn.Module, device: Any = None) -> Any:
    """Stand for `Module.cuda`."""
    at = torch.device("cuda") if device is None else torch.device("cuda", torch.device(device).index)
    if _is_ours(module, hook_context, at, f"moves {type(module).__name__}"):
        adopt_model(unwrapped(module), hook_context, what="moves it to the GPU")
    return original(module, device)


def give_storage(
    original: Any, hook_context: HookContext, module: nn.Module, *, device: Any, recurse: bool = True
) -> Any:
    """Stand for `Module.to_empty`: storage is in host memory, because on the device it would be in full."""
    on_gpu = hook_context.device.type == "cuda" and device is not None
    if on_gpu and _is_ours(module, hook_context, torch.device(device), f"gives {type(module).__name__} storage"):
        device = "cpu"
    return original(module, device=device, recurse=recurse)


def compile_model(original: Any, hook_context: HookContext, model: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Stand for `torch.compile`."""
    module = getattr(model, "__self__", model)  # `model.compile()` compiles one of its methods
    if isinstance(module, nn.Module):
        if _is_ours(module, hook_context, hook_context.device, f"compiles {type(module).__name__}"):
            adopt_model(unwrapped(module), hook_context, what="compiles it")
        name = getattr(model, "__name__", "")
        hooked = name == CALL_METHOD or any(  # of `model.compile()`: all modules' hooks, too
            is_unit(part) and not (name == "forward" and part is module) for part in module.modules()
        )
        if kwargs.get("fullgraph") and hooked:
            about = f"{class_name(module)} is compiled without fullgraph: no graph holds the hooks that gather it"
            messages.say(f"{script_line()}: {about}")
            kwargs = {**kwargs, "fullgraph": False}
    return original(model, *args, **kwargs)


def _is_ours(module: nn.Module, hook_context: HookContext, device: torch.device | None, what: str) -> bool:
    """Return whether a module goes to the kind of device that this worker computes on, and is to be sharded.

    It is complete and has something to train: no submodule, nor a part of a larger module that is being built.
    """
    own, ownership = hook_context.device, hook_context.ownership
    if device is None or device.type != own.type or is_sharded(module):
        return False
    if isinstance(module, DistributedDataParallel) or ownership.only_replicas:
        return False
    params = list(nn.Module.parameters(module))
    if not any(param.requires_grad for param in params) or any(is_lazy(param) for param in params):
        return False  # lazy ones get their shapes in a first pass
    # Python has no event for a constructor's end: only its frame says that a larger module is being built.
    inside = any(isinstance(each, nn.Module) for each in being_built())
    if inside or not hook_context.module_registry.is_root(unwrapped(module)) or not ownership.claim(what):
        return False
    if device.index not in (None, own.index) and device not in hook_context.own_names:
        hook_context.own_names.add(device)
        hook_context.undo.enter_context(OwnGpu(device, own))
    return True


def set_gpu(original: Any, hook_context: HookContext, device: Any) -> None:
    """Stand for `torch.cuda.set_device`: whichever number a script says, a worker computes on its own GPU."""
    original(hook_context.device if hook_context.device.type == "cuda" else device)


class OwnGpu(TorchFunctionMode):
    """Read a GPU that the script names by a number of its own, `cuda:0`, as this worker's.

    Entered when the first model is moved there: a script that says `cuda`, or counts ranks, does not pay for it.
    """

    def __init__(self, said: torch.device, own: torch.device) -> None:
        super().__init__()
        self._said, self._own = said, own

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch with this worker's GPU in the place of the other."""
        by_number = func in (torch.Tensor.to, torch.Tensor.cuda)
        args = [self._read(value, by_number=by_number and place == 1) for place, value in enumerate(args)]
        named = kwargs or {}
        return func(*args, **{name: self._read(named[name], by_number=name == "device") for name in named})

    def _read(self, value: Any, *, by_number: bool) -> Any:
        if isinstance(value, torch.device | str):
            return self._own if str(value) == str(self._said) else value
        return self._own if by_number and type(value) is int and value == self._said.index else value


_building: set[int] = set()  # the optimizers whose base class gives them their groups


def build_optimizer(
    original: Any, hook_context: HookContext, optimizer: Optimizer, params: Any, defaults: dict[str, Any]
) -> None:
    """Stand for `Optimizer.__init__`."""
    for model in list(hook_context.models):
        reshard(model)  # parameters that are read now must be the shards
    _building.add(id(optimizer))
    try:
        original(optimizer, params, defaults)
    finally:
        _building.discard(id(optimizer))
    hook_context.note_optimizer(optimizer)
    regroup(optimizer, hook_context)


def extend_optimizer(
    original: Any, hook_context: HookContext, optimizer: Optimizer, param_group: dict[str, Any]
) -> None:
    """Stand for `Optimizer.add_param_group`."""
    original(optimizer, param_group)
    if id(optimizer) not in _building:
        regroup(optimizer, hook_context)


def regroup(optimizer: Optimizer, hook_context: HookContext, *, now: bool = False) -> None:
    """Shard the models whose parameters an optimizer has, and let it train the shards, if this is ours to do."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    known = known_parameters()
    new = [p for p in params if id(p) not in known and not hasattr(p, "fsdplaunch_origin")]
    what = f"builds {type(optimizer).__name__}"
    if all(isinstance(p, DTensor) for p in params) and not hook_context.models:
        return  # sharded by other means
    if not hook_context.ownership.claim(what, now=now):
        return
    for check in hook_context.complete.values():
        check()
    scripts = hook_context.ownership.only_replicas  # it keeps equal what it gives to no one
    roots, bare = ([], new) if scripts else hook_context.module_registry.roots_of(new)
    for root in roots:
        adopt_model(root, hook_context, what=what)
    if bare and not scripts:
        _keep_unsharded(bare, what)
    repoint(optimizer, known_parameters() | {id(param): "" for param in bare})
    if optimizer not in hook_context.optimizers and trains_shards(optimizer):
        hook_context.optimizers.add(optimizer)
        average_closure(optimizer, hook_context)


def _keep_unsharded(bare: list[Any], what: str) -> None:
    """Keep parameters of no module equal on all workers: rank 0's values, gradients averaged."""
    if any(param.numel() and not param.untyped_storage().size() for param in bare if not param.is_meta):
        # A library has taken them out of a pass; their memory has been given back.
        msg = f"{script_line()} {what} from parameters that were gathered for a pass"
        raise ShardingError(msg, hint="build it from model.parameters(), before the first pass")
    mesh = shard_target(ambient_plugin().settings(), mesh=None, process_group=None, device=None).mesh
    fresh = [param for param in bare if not hasattr(param, AVERAGED)]
    _check_no_gradients("a parameter of no module", fresh, what)
    if count := keep_equal(fresh, mesh):
        messages.say(
            f"{script_line()}: {count} parameters of no module stay unsharded, their gradients are averaged"
        )


def decide_when_training_begins(hook_context: HookContext) -> None:
    """Shard where training begins what nobody has sharded until then. Rule 1.

    Training begins where a module is called, or a loader read, after an optimizer was built on full parameters.
    The hooks stand only while the decision is put off: every module's call passes them.
    """
    waiting, ownership = _Waiting(hook_context), hook_context.ownership
    ownership.put_off, ownership.on_decision = waiting.start, waiting.stop
    hook_context.undo.callback(waiting.stop)


class _Waiting:
    """The hooks of one worker while the decision is open."""

    def __init__(self, hook_context: HookContext) -> None:
        self.hook_context, self.hooks, self.started = hook_context, ExitStack(), False

    def start(self) -> None:
        if not self.started:
            self.started = True
            self.hooks.enter_context(replaced(nn.Module, "__call__", self._calling))
            self.hooks.enter_context(replaced(DataLoader, "__iter__", self._reading))

    def stop(self) -> None:
        self.started = False
        self.hooks.close()

    def _calling(self, original: Any) -> Any:
        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if module.training:
                self._look(lambda trained: any(id(param) in trained for param in nn.Module.parameters(module)))
            return original(module, *args, **kwargs)

        return call

    def _reading(self, original: Any) -> Any:
        def iterate(loader: Any) -> Any:
            self._look(lambda _: not joined_by_script())
            return original(loader)

        return iterate

    def _look(self, begins: Callable[[set[int]], bool]) -> None:
        """Shard what optimizers train in full, if training begins with it."""
        if not self.started or not torch.is_grad_enabled():
            return
        optimizers = self.hook_context.built_optimizers()
        params = [param for each in optimizers for group in each.param_groups for param in group["params"]]
        trained = {id(param) for param in params if not isinstance(param, DTensor)}
        if trained and begins(trained):
            for optimizer in optimizers:
                regroup(optimizer, self.hook_context, now=True)
