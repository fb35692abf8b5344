"""Shard one model of the script: what the hooks found, given to `prepare`."""

from torch import nn
from torch.distributed.tensor import DTensor

from fsdplaunch.errors import ShardingError
from fsdplaunch.runtime import report
from fsdplaunch.runtime.auto.copies import allow_copies
from fsdplaunch.runtime.auto.job import Job
from fsdplaunch.runtime.auto.ownership import script_line
from fsdplaunch.runtime.auto.saving import save_whole
from fsdplaunch.runtime.auto.visits import Visits, late_parameter, original_name
from fsdplaunch.runtime.blocks import class_name, find_blocks
from fsdplaunch.runtime.names import named_parameters
from fsdplaunch.runtime.plugin import FullyShardedDataParallelPlugin, ambient_plugin
from fsdplaunch.runtime.prepare import prepare
from fsdplaunch.runtime.shard import is_sharded


def adopt(model: nn.Module, job: Job, *, what: str) -> None:
    """Shard a model that is not sharded yet, in place.

    Args:
        model: The whole of it, with all its parameters.
        job: This worker's.
        what: What the script does here, for errors.

    Raises:
        ShardingError: It cannot be sharded; the error names the script's line.
    """
    if is_sharded(model):
        return
    line = script_line()
    _check_unsharded(model, job, line)
    try:
        prepare(model, plugin=_plugin(model, job))
    except ShardingError as error:
        msg = f"{line} {what}, and {class_name(model)} cannot be sharded there: {error.message}"
        ways = "or call fsdplaunch.prepare(model, optimizer) in the script where it should be"
        raise ShardingError(msg, hint=f"{error.hint}; {ways}" if error.hint else ways) from error
    settle(model, job, line)


def settle(model: nn.Module, job: Job, line: str) -> None:
    """Make a model that was just sharded behave as the script expects of the one it wrote.

    Args:
        model: Sharded.
        job: This worker's.
        line: Where the script had it sharded.
    """
    job.models[model] = line
    allow_copies(model, job)
    save_whole(model, job)
    job.complete[model] = Visits(model, line, job.streams.part).check


def _check_unsharded(model: nn.Module, job: Job, line: str) -> None:
    """A part that was sharded, because the script moved it by itself, cannot become part of a whole."""
    params = dict(named_parameters(model))
    sharded = [name for name, param in params.items() if isinstance(param, DTensor)]
    if not sharded:
        return
    for part in model.modules():
        if part in job.models:
            msg = f"{line}: {original_name(part)} was sharded at {job.models[part]}, before it was part of a model"
            hint = "move the whole model to the device, not its parts, or call fsdplaunch.prepare(model)"
            raise ShardingError(msg, hint=hint)
    late = next(name for name in params if name not in sharded)
    raise late_parameter(model, late, line)


def _plugin(model: nn.Module, job: Job) -> FullyShardedDataParallelPlugin:
    """The launch's plugin; for a model without repeated blocks one that makes it a single unit."""
    plugin = ambient_plugin()
    settings = plugin.settings()
    if settings.wrap != "TRANSFORMER_BASED_WRAP" or (settings.block_classes and not job.models):
        return plugin
    try:
        find_blocks(model, settings.block_classes)
    except ShardingError:
        why = "the named block classes" if settings.block_classes else "repeated blocks"
        report.say(f"{class_name(model)} has no {why}: it is gathered as one unit")
        return FullyShardedDataParallelPlugin(auto_wrap_policy="no_wrap")
    return plugin
