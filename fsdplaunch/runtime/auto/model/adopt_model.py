"""Shard one model of the script: what the hooks found, given to `prepare`."""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from fsdplaunch.config.environment import COMPARED
from fsdplaunch.errors import ShardingError
from fsdplaunch.runtime.api.prepare import prepare
from fsdplaunch.runtime.auto.batch.divided_pass import DividedPasses
from fsdplaunch.runtime.auto.batch.rank_rows import data_group
from fsdplaunch.runtime.auto.context import HookContext
from fsdplaunch.runtime.auto.model.calls import Calls, original_name
from fsdplaunch.runtime.auto.model.written_in_passes import keep_written
from fsdplaunch.runtime.auto.rank0.passes import Passes, note_passes
from fsdplaunch.runtime.auto.rank0.service import open_once
from fsdplaunch.runtime.auto.rank0.ways import note_gradients, note_paths
from fsdplaunch.runtime.auto.saves.whole_models import let_model_leave
from fsdplaunch.runtime.auto.shards.references import keeping_references, late_parameter
from fsdplaunch.runtime.compute.unused_parameters import agree_on_alternatives
from fsdplaunch.runtime.inspection.announce import announcing
from fsdplaunch.runtime.inspection.parameter_names import named_parameters, parameters_of
from fsdplaunch.runtime.inspection.units import is_sharded, is_unit, restore_classes
from fsdplaunch.runtime.plugin.plugin import FullyShardedDataParallelPlugin, ambient_plugin
from fsdplaunch.runtime.script_line import calling_library, script_line
from fsdplaunch.runtime.sharding.blocks import class_name, find_blocks, runs
from fsdplaunch.runtime.sharding.checks import check_kinds
from fsdplaunch.runtime.sharding.optimizer_params import sharded_home
from fsdplaunch.runtime.sharding.root_unit import misses_most
from fsdplaunch.runtime.sharding.wrap import without_shared
from fsdplaunch.runtime.state_dict.deepcopy import allow_deepcopy
from fsdplaunch.runtime.state_dict.gather import await_main_thread
from fsdplaunch.runtime.torch_internals.modules import before_state_dict
from fsdplaunch.runtime.torch_internals.wrappers import untraced


def adopt_model(model: nn.Module, hook_context: HookContext, *, what: str, one_unit: bool = False) -> None:
    """Shard a model that is not sharded yet, in place; a list or dict of models as each of them by itself.

    Args:
        model: Complete, with all its parameters.
        hook_context: This worker's.
        what: What the script does here, for errors.
        one_unit: Gather all of it at once, because ranks may compute with different parts of it.

    Raises:
        ShardingError: It cannot be sharded; the error names the script's line.
    """
    if is_sharded(model):
        return
    if _only_holds(model):
        for held in model.children():
            if any(param.requires_grad for param in parameters_of(held)):
                adopt_model(held, hook_context, what=what, one_unit=one_unit)
        return
    line = script_line()
    with _naming_line(line, what, model):
        check_kinds(model)
    _check_unsharded(model, hook_context, line)
    check_no_gradients(class_name(model), parameters_of(model), what=what)
    with _naming_line(line, what, model), keeping_references(model), announcing(_about(line)):
        prepare(model, plugin=_one_unit() if one_unit else _plugin(model, hook_context))
    if hook_context.size > 1:
        note_gradients(model, original_name(model))
        agree_on_alternatives(model)
    attach_hooks(model, hook_context, line)


def _about(line: str) -> str:
    """Return for whom a model is sharded; the first time, also whether the launcher knows of a comparison."""
    compared = os.environ.pop(COMPARED, None)
    return f"for the script, {line}" + (f"; {compared}" if compared else "")


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
    """Make a model that was just sharded behave as the script expects of the one it wrote.

    Args:
        model: Sharded.
        hook_context: This worker's.
        line: Where the script had it sharded.
    """
    hook_context.note_model(model, line)
    hook_context.ownership.note_adopted(line)
    open_once(hook_context)
    allow_deepcopy(model, lambda copied, of: attach_hooks(copied, hook_context, hook_context.models[of]))
    passes = Passes(original_name(model), hook_context)
    note_passes(model, passes)
    if hook_context.size > 1:
        note_paths(model, original_name(model))  # before the hooks of passes, which then come before these
    calls = Calls(
        model,
        line,
        begin_pass=untraced(passes.begin),
        begin_training=hook_context.streams.diverge,
        trains=lambda: bool(hook_context.batches.backwards or hook_context.optimizers),
        divided=_divided(model, hook_context),
        note=hook_context.batches.enter,
    )
    hook_context.complete[model] = calls.check
    for unit in filter(is_unit, model.modules()):
        before_state_dict(unit, _await_main_thread)  # torch reshards the unit in it
    keep_written(model)
    let_model_leave(model)
    restore_classes(model)


def _await_main_thread() -> None:
    await_main_thread(f"state_dict() at {script_line()}")


def _only_holds(model: nn.Module) -> bool:
    """Return whether a module computes nothing by itself, so that `fully_shard` refuses it: a list or dict."""
    return isinstance(model, nn.ModuleList | nn.ModuleDict) and not runs(model)


def _divided(model: nn.Module, hook_context: HookContext) -> DividedPasses | None:
    """Return what divides a model's passes, where the script runs on the global batch on every rank."""
    if not hook_context.keeps_batch or hook_context.data.size == 1 or hook_context.ownership.ranked:
        return None
    group = data_group(hook_context.rank, hook_context.size, hook_context.data.size)
    return DividedPasses(model, original_name(model), hook_context.data, group, hook_context.learning_rates)


def _check_unsharded(model: nn.Module, hook_context: HookContext, line: str) -> None:
    """Refuse a model of which a submodule was sharded before, because the script moved it by itself."""
    params = dict(named_parameters(model))
    _check_unshared(model, params, hook_context, line)
    sharded = [name for name, param in params.items() if isinstance(param, DTensor)]
    if not sharded:
        return
    for submodule in model.modules():
        if submodule in hook_context.models:
            earlier = hook_context.models[submodule]
            msg = f"{line}: {original_name(submodule)} was sharded at {earlier}, before it was part of a model"
            hint = "move the complete model to the device, not its submodules, or call fsdplaunch.prepare(model)"
            raise ShardingError(msg, hint=hint)
    late = next(name for name in params if name not in sharded)
    raise late_parameter(model, late, line)


def check_no_gradients(whose: str, params: Iterable[nn.Parameter], *, what: str) -> None:
    """Refuse parameters that a backward pass gave gradients before they were sharded, or averaged over ranks.

    Args:
        whose: What has the parameters, for the error.
        params: Not sharded yet.
        what: What the script does here, for the error.

    Raises:
        ShardingError: The next optimizer step would be made with each rank's own gradients, or with none.
    """
    if any(param.grad is not None and (param.grad.is_sparse or param.grad.any()) for param in params):
        msg = f"{script_line()} {what} after a backward pass: {whose} has gradients, of each rank's own rows"
        hint = (
            "build the optimizer, or move the model to its device (model.to(device)), before the first backward"
            " pass; or call fsdplaunch.prepare(model) there. Gradients of no use: model.zero_grad()"
        )
        raise ShardingError(msg, hint=_for_library() or hint)


def check_not_gathered(params: Iterable[nn.Parameter], *, what: str) -> None:
    """Refuse parameters that a library has taken out of a pass, in which they were gathered.

    Args:
        params: Of no module.
        what: What the script does here, for the error.

    Raises:
        ShardingError: Their memory has been given back, and shards are what an optimizer trains.
    """
    if any(param.numel() and not param.untyped_storage().size() for param in params if not param.is_meta):
        msg = f"{script_line()} {what} of parameters as they were gathered for a pass"
        raise ShardingError(msg, hint=_for_library() or "build it of model.parameters(), before the first pass")


def _for_library() -> str | None:
    """Return what to try where a library builds an optimizer in its step; None where the user does."""
    library = calling_library()
    return library and (
        f"{library} builds the optimizer in the step that computes: build one of torch's of model.parameters()"
        " in the script, before training, and call backward() of the library's loss and step() there"
    )


def _check_unshared(model: nn.Module, params: dict[str, Any], hook_context: HookContext, line: str) -> None:
    """Refuse a model that has trained parameters of another one, which is sharded: each would train its own.

    Raises:
        ShardingError: It has one.
    """
    inside = set(model.modules())
    owners = {id(param): other for other in hook_context.models for param in parameters_of(other)}
    for name, param in params.items():
        owner = owners.get(id(param)) or sharded_home(param)
        if param.requires_grad and owner is not None and owner not in inside:
            earlier = hook_context.models.get(owner, "another line")
            msg = (
                f"{line}: {name} of {class_name(model)} is one of {original_name(owner)} as well, which was"
                f" sharded at {earlier}: they would be trained apart"
            )
            hint = "make both parts of one module whose forward calls them, or give that one to fsdplaunch.prepare"
            raise ShardingError(msg, hint=hint)


def _plugin(model: nn.Module, hook_context: HookContext) -> FullyShardedDataParallelPlugin:
    """Return the launch's plugin; for a model that is not of repeated blocks one that makes it a single unit."""
    plugin = ambient_plugin()
    settings = plugin.settings()
    if settings.wrap != "TRANSFORMER_BASED_WRAP" or (settings.block_classes and not hook_context.models):
        return plugin
    try:
        blocks = find_blocks(model, settings.block_classes)
    except ShardingError:
        return _one_unit()
    if not settings.block_classes and misses_most(model, without_shared(model, blocks)):
        return _one_unit()
    return plugin


def _one_unit() -> FullyShardedDataParallelPlugin:
    version = ambient_plugin().settings().version
    return FullyShardedDataParallelPlugin(fsdp_version=version, auto_wrap_policy="no_wrap")
