"""A worker on PyTorch/XLA: its runtime and its group, and how its script starts.

Needs torch_xla only once `set_up_xla` is called.
"""

import inspect
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import optimizer

from fsdplaunch.config.resolve import runs_spmd, shards_on_xla
from fsdplaunch.config.schema.config import Config
from fsdplaunch.errors import MachineError, ShardingError, UsageError
from fsdplaunch.probe.torch_version import installed_problem
from fsdplaunch.runtime import messages
from fsdplaunch.runtime.device import join_group
from fsdplaunch.runtime.patch import before_first_step
from fsdplaunch.runtime.rank import world_size
from fsdplaunch.runtime.saving.plain_files import keep_generator
from fsdplaunch.runtime.sharding_watch import check_at_first_step, ever_sharded
from fsdplaunch.runtime.torch_internals.modules import begin_process

_stepped: list[bool] = []


def call_untrained(function: str) -> None:
    """Call a function of a script that has trained nothing, as `accelerate launch` does on a TPU."""
    found = vars(sys.modules["__main__"]).get(function)
    if ever_sharded() or _stepped or not inspect.isfunction(found) or found.__module__ != "__main__":
        return
    wanted = [
        name
        for name, each in inspect.signature(found).parameters.items()
        if each.default is each.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    ]
    if wanted:
        msg = (
            f"the script has trained nothing, and {function} cannot be called for it: it needs {', '.join(wanted)}"
        )
        raise UsageError(msg, hint="call it at the script's end, under if __name__ == '__main__'")
    messages.say(f"the script has trained nothing: {function} is called now, as main_training_function")
    found()


def spawn_here(spawning: Any, ordinal: Callable[[], int]) -> None:
    """Have the `spawn` of torch_xla's module call its function here, in a process that was started for it."""

    def spawn(fn: Callable[..., Any], args: Sequence[Any] = (), *_: Any, **__: Any) -> None:
        fn(ordinal(), *args)

    spawning.spawn = spawn


def set_up_xla(config: Config, script: str) -> None:
    """Begin PyTorch/XLA's runtime as configured, before anything of the script uses a device.

    Ranks, sizes and what checkpoints agree on go through a process group of the CPU; no tensor of a model does.
    """
    if (found := installed_problem()) is not None:
        raise MachineError(found.message, hint=found.hint)
    from torch_xla import runtime
    from torch_xla.core import xla_model
    from torch_xla.distributed import xla_multiprocessing

    from fsdplaunch.runtime.xla import devices

    def begin() -> None:
        """Tell the runtime who takes part, where there are several processes."""
        if world_size() > 1:
            begin_process(int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1")))

    def begin_with_ordinal() -> int:
        """Do so, as torch_xla's own spawn does, and return this process's number."""
        begin()
        return int(runtime.global_ordinal())

    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    one_each = here > 1 or (shards_on_xla(config) and not runs_spmd(config))
    if one_each:
        begin()
    if runs_spmd(config):
        devices.use_all_devices()
    join_group(config, torch.device("cpu"))
    _check_one_run(runtime, one_each=one_each and not runtime.is_spmd())
    spawn_here(xla_multiprocessing, begin_with_ordinal)
    before_first_step(optimizer, lambda: _stepped.append(True))
    keep_generator("xm_seed", lambda: int(xla_model.get_rng_state()), xla_model.set_rng_state)
    if shards_on_xla(config):
        _watch(config, script)


def prepare_on_xla(objects: Sequence[Any], plugin: Any, unsupported: dict[str, Any]) -> tuple[Any, ...]:
    """Do what `fsdplaunch.prepare` does, on PyTorch/XLA's devices: see `prepare`."""
    from fsdplaunch.runtime.xla.prepare import prepare_on_xla as prepare

    return prepare(objects, plugin, unsupported)


def _check_one_run(runtime: Any, *, one_each: bool) -> None:
    started, known = world_size(), runtime.process_count()
    if known != started:
        msg = f"{started} processes were started, and PyTorch/XLA knows {known}: each would train alone"
        raise ShardingError(msg, hint="start one launcher on each host of the TPU slice, and no other")
    if one_each and (count := runtime.world_size()) != started:
        msg = f"{started} processes were started for {count} devices, and each drives one only"
        raise ShardingError(msg, hint="use xla_fsdp_v2: true, whose processes drive all devices of their host")


def _watch(config: Config, script: str) -> None:
    """Notice who shards, have the Trainer do so, and end at the first step where nobody has."""
    from fsdplaunch.runtime.xla import devices
    from fsdplaunch.runtime.xla.wrappers import configure_trainer, watch_wrappers

    watch_wrappers()
    if config.launch.shard != "off":
        check_at_first_step(script)
    devices.keep_dtypes()
    configure_trainer(config)
