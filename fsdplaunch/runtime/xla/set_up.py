"""A worker that computes on PyTorch/XLA: its runtime, its mesh, and a group for what is not computed."""

import os

import torch

from fsdplaunch.config.schema.config import Config
from fsdplaunch.config.xla import runs_spmd, shards_on_xla
from fsdplaunch.errors import MachineError, ShardingError
from fsdplaunch.probe.torch_xla_version import installed_problem
from fsdplaunch.runtime.device import join_group
from fsdplaunch.runtime.first_step import check_at_first_step
from fsdplaunch.runtime.rank import world_size
from fsdplaunch.runtime.saving.rng_state import keep_generator
from fsdplaunch.runtime.torch_internals.xla import begin_process
from fsdplaunch.runtime.xla.entry import spawn_here


def set_up_xla(config: Config, script: str) -> None:
    """Begin PyTorch/XLA's runtime as configured, before anything uses a device.

    Ranks, sizes and what checkpoints agree on go through a process group of the CPU; no tensor of a model does.

    Args:
        config: Resolved.
        script: What is run, for errors.

    Raises:
        MachineError: torch_xla is not there, or does not go with the torch that is.
        ShardingError: The processes that were started are not one run to PyTorch/XLA.
    """
    if (found := installed_problem()) is not None:
        raise MachineError(found.message, hint=found.hint)
    from fsdplaunch.runtime.xla import devices

    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    one_each = here > 1 or (shards_on_xla(config) and not runs_spmd(config))
    if one_each:
        _begin()
    if runs_spmd(config):
        devices.use_all_devices()
    join_group(config, torch.device("cpu"))
    _check_one_run(one_each=one_each and not devices.is_spmd())
    spawn_here(devices.spawning_module(), _begin_with_ordinal)
    keep_generator("xm_seed", devices.rng_state, devices.set_rng_state)
    if shards_on_xla(config):
        _watch(config, script)


def _check_one_run(*, one_each: bool) -> None:
    """Refuse to train where PyTorch/XLA does not know the processes that were started as one run.

    Args:
        one_each: Each process drives one device.
    """
    from fsdplaunch.runtime.xla import devices

    started, known = world_size(), devices.processes()
    if known != started:
        msg = f"{started} processes were started, and PyTorch/XLA knows {known}: each would train alone"
        raise ShardingError(msg, hint="start one launcher on each host of the TPU slice, and no other")
    if one_each and (count := devices.participants()) != started:
        msg = f"{started} processes were started for {count} devices, and each drives one only"
        raise ShardingError(msg, hint="use xla_fsdp_v2: true, whose processes drive all devices of their host")


def _begin_with_ordinal() -> int:
    """Tell the runtime who takes part, as torch_xla's own spawn does, and return this process's number."""
    from fsdplaunch.runtime.xla import devices

    _begin()
    return devices.ordinal()


def _begin() -> None:
    """Tell the runtime who takes part, where there are several processes."""
    if world_size() > 1:
        begin_process(int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def _watch(config: Config, script: str) -> None:
    """Notice who shards, have the Trainer do so, and end at the first step where nobody has."""
    from fsdplaunch.runtime.xla import devices
    from fsdplaunch.runtime.xla.trainer import configure_trainer
    from fsdplaunch.runtime.xla.watch import watch_wrappers

    watch_wrappers()
    if config.launch.shard != "off":
        check_at_first_step(script)
    devices.keep_dtypes()
    if devices.is_spmd():
        configure_trainer(config)
    else:
        configure_trainer(config, rank=devices.ordinal(), size=devices.participants())
