"""Let accelerate shard without a GPU.

There `Accelerator()` takes itself for a single process: every rank would train a full model of its own, and
nothing would report it. What accelerate lacks there is small. It has to learn that this is one of its distributed
runs, and of FSDP1 two options that torch refuses on a CPU are carried out here: sending rank 0's values
(`sync_module_states`) and offloading, which has nothing to do where parameters are in host memory anyway.
"""

import functools
import os
from collections.abc import Callable
from typing import Any

from fsdplaunch.errors import ShardingError
from fsdplaunch.runtime import messages
from fsdplaunch.runtime.compat.import_hook import once_imported


def adapt_accelerate_to_cpu() -> None:
    """Adapt accelerate, if and when the script imports it, so that what the file sets for sharding is done.

    For workers whose device is the CPU, before the script runs.
    """
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    once_imported("accelerate.state", _adapt_state)
    once_imported("accelerate.utils.dataclasses", _adapt_plugin)
    once_imported("accelerate.accelerator", _adapt_accelerator)


def keep_accelerate_on_cpu() -> None:
    """Have accelerate's state know from its first use that the run is on the CPU, where it does not shard.

    It reads ACCELERATE_USE_CPU in `Accelerator` and the Trainer only. A script's `PartialState()`, if it came
    first, would make every worker a single process.
    """
    once_imported("accelerate.state", _keep_state_on_cpu)


def _keep_state_on_cpu(state: Any) -> None:
    construct = state.PartialState.__init__

    @functools.wraps(construct)
    def construct_on_cpu(self: Any, cpu: bool = False, **kwargs: Any) -> None:  # noqa: ARG001
        construct(self, cpu=True, **kwargs)

    state.PartialState.__init__ = construct_on_cpu


def _adapt_state(state: Any) -> None:
    """Adapt its state, which considers FSDP only where an accelerator is named; the device is set beside it."""

    def prepare_backend(*_: Any, **__: Any) -> tuple[str, Any]:
        return "gloo", state.DistributedType.MULTI_GPU

    state.PartialState._prepare_backend = prepare_backend


def _adapt_plugin(dataclasses: Any) -> None:
    """Adapt its plugin, whose construction ends by choosing the accelerator for `sync_module_states`.

    Every field is set by then. The function it would have made is not needed: the values are sent here.
    """
    plugin = dataclasses.FullyShardedDataParallelPlugin
    finish = plugin.__post_init__

    @functools.wraps(finish)
    def finish_without_device(self: Any) -> None:
        try:
            finish(self)
        except RuntimeError as failure:
            if not self.sync_module_states or "no available devices" not in str(failure):
                raise

    plugin.__post_init__ = finish_without_device


def _adapt_accelerator(accelerator: Any) -> None:
    prepare = accelerator.Accelerator.prepare_model

    @functools.wraps(prepare)
    def prepare_on_cpu(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        plugin = getattr(self.state, "fsdp_plugin", None)
        if plugin is None or plugin.fsdp_version != 1:
            return prepare(self, model, *args, **kwargs)
        return _with_what_torch_can(plugin, model, lambda: prepare(self, model, *args, **kwargs))

    accelerator.Accelerator.prepare_model = prepare_on_cpu
    if hasattr(accelerator.Accelerator, "_prepare_cp"):  # 1.10 and newer
        accelerator.Accelerator._prepare_cp = _refuse_split_sequences


def _refuse_split_sequences(self: Any, *_prepared: Any) -> Any:
    """Refuse what torch cannot compute: it splits the sequences of accelerate's scripts.

    Raises:
        ShardingError: Always.
    """
    size = self.parallelism_config.cp_size
    msg = (
        f"accelerate splits sequences (cp_size {size}) by torch's ring attention, which has no kernel for the CPU"
    )
    raise ShardingError(msg, hint="run it on GPUs; fsdplaunch.prepare splits sequences on the CPU, too")


def _with_what_torch_can(plugin: Any, model: Any, prepare: Callable[[], Any]) -> Any:
    """Prepare with the two options off that torch's FSDP1 refuses on a CPU, and on again in the plugin after."""
    sync, offload = plugin.sync_module_states, plugin.cpu_offload
    if sync:
        _send_from_rank_0(model)
    if offload is not None and offload.offload_params:
        messages.say("parameters are in host memory already: offloading has nothing to do here")
    plugin.sync_module_states, plugin.cpu_offload = False, None
    try:
        return prepare()
    finally:
        plugin.sync_module_states, plugin.cpu_offload = sync, offload


def _send_from_rank_0(model: Any) -> None:
    from fsdplaunch.runtime.compat.fsdp1_cpu import send_from_rank_0  # imports torch
    from fsdplaunch.runtime.inspection.units import fsdp1_wrappers

    if not fsdp1_wrappers(model):
        send_from_rank_0(model)
