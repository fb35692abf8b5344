"""Let rank 0 save alone what accelerate or the script itself has sharded, and not evaluate alone.

Needed because scripts save `if accelerator.is_main_process:` and `if rank == 0:`.
"""

import functools
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.optim import optimizer as optimizers

from fsdplaunch.runtime.auto.context import HookContext
from fsdplaunch.runtime.auto.state.rank0.flat_shards import is_divided_over_all, number_units
from fsdplaunch.runtime.auto.state.rank0.full_passes import FullPasses
from fsdplaunch.runtime.auto.state.rank0.passes import Passes, note_passes
from fsdplaunch.runtime.auto.state.rank0.pulling import open_once
from fsdplaunch.runtime.auto.state.rank0.shard_names import count_changes_from_now, is_over_all_ranks
from fsdplaunch.runtime.compat.import_hook import once_imported
from fsdplaunch.runtime.inspection.parameter_names import unwrapped
from fsdplaunch.runtime.inspection.units import original_class
from fsdplaunch.runtime.step_hooks import before_first_step
from fsdplaunch.runtime.torch_internals.fsdp.fsdp1 import is_in_flat_parameter
from fsdplaunch.runtime.torch_internals.wrappers import is_compiled, untraced


def serve_models_of_others(hook_context: HookContext) -> None:
    """Note the models that accelerate shards, if the script imports it, and those of the script itself."""
    if hook_context.size > 1:
        once_imported("accelerate.accelerator", functools.partial(_adapt, hook_context=hook_context))
        before_first_step(optimizers, functools.partial(_note_trained, hook_context))


def _adapt(module: Any, *, hook_context: HookContext) -> None:
    accelerator = module.Accelerator
    prepare = accelerator.prepare

    @functools.wraps(prepare)
    def prepare_and_note(self: Any, *args: Any, **kwargs: Any) -> Any:
        prepared = prepare(self, *args, **kwargs)
        for each in prepared if isinstance(prepared, (tuple, list)) else (prepared,):
            if isinstance(each, nn.Module):
                serve(unwrapped(each), hook_context)
        return prepared

    accelerator.prepare = prepare_and_note


def _note_trained(hook_context: HookContext) -> None:
    """Note the models whose shards optimizers train, at the first step, to which all ranks come.

    In the order in which their modules were made, the same on all ranks.
    """
    if hook_context.ownership.ours:
        return
    noted = {id(param) for model in hook_context.numbers for param in model.parameters()}
    params = [
        param
        for optimizer in hook_context.built_optimizers()
        for group in optimizer.param_groups
        for param in group["params"]
        if id(param) not in noted and _is_shard(param)
    ]
    for model in hook_context.module_registry.roots_of(params)[0] if params else ():
        serve(model, hook_context)


def _is_shard(param: Any) -> bool:
    """Return whether an optimizer trains a shard of what all ranks have parts of; under FSDP1, of some ranks."""
    return is_over_all_ranks(param) if isinstance(param, DTensor) else is_in_flat_parameter(param)


def serve(model: nn.Module, hook_context: HookContext) -> None:
    """Let the ranks hand over their shards of a model. Collective."""
    shards = [param for param in model.parameters() if isinstance(param, DTensor)]
    if model in hook_context.numbers or not (shards or is_divided_over_all(model)):
        return
    for shard in shards:  # rank 0 had the values when they were divided, the others received them
        count_changes_from_now(shard)
    hook_context.number_model(model)
    number_units(model, hook_context.numbers[model])
    open_once(hook_context)
    if is_compiled(model, hook_context.module_registry.alive()):
        return  # a hook would have it compiled again
    wrapped = model.module if isinstance(model, FullyShardedDataParallel) else model
    passes = Passes(original_class(wrapped).__name__, hook_context)
    note_passes(model, passes)
    _hook_passes(model, untraced(passes.begin))


def _hook_passes(model: nn.Module, begin: Callable[[nn.Module], FullPasses | None]) -> None:
    """Begin each pass of a model so, and end those that rank 0 makes alone."""
    passes: list[FullPasses | None] = []

    def enter(module: nn.Module, args: Any, kwargs: Any) -> Any:
        full = None if any(passes) else begin(module)  # a model may call itself
        passes.append(full)
        return None if full is None else full.inputs(module, args, kwargs)

    def leave(module: nn.Module, _args: Any, output: Any) -> Any:
        full = passes.pop() if passes else None
        return None if full is None else full.end(module, output)

    model.register_forward_pre_hook(enter, prepend=True, with_kwargs=True)
    model.register_forward_hook(leave, always_call=True)
