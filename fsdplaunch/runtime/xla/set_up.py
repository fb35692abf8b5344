"""A worker that computes on PyTorch/XLA: its runtime, its mesh, and a group for what is not computed."""

import os

import torch

from fsdplaunch.config.schema.config import Config
from fsdplaunch.config.xla import runs_spmd, shards_on_xla
from fsdplaunch.errors import MachineError, ShardingError
from fsdplaunch.probe.torch_xla_version import installed_problem
from fsdplaunch.runtime.device import join_group
from fsdplaunch.runtime.rank import world_size


def set_up_xla(config: Config) -> None:
    """Begin PyTorch/XLA's runtime as configured, before anything uses a device.

    Ranks, sizes and what checkpoints agree on go through a process group of the CPU; no tensor of a model does.

    Raises:
        MachineError: torch_xla is not there, or does not go with the torch that is.
        ShardingError: The processes that were started are not one run to PyTorch/XLA.
    """
    if (found := installed_problem()) is not None:
        raise MachineError(found.message, hint=found.hint)
    from fsdplaunch.runtime.xla.devices import begin, processes, take_over_spawn, use_all_devices

    begin(int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    if runs_spmd(config):
        use_all_devices()
    join_group(config, torch.device("cpu"))
    if processes() != world_size():
        msg = f"{world_size()} processes were started, and PyTorch/XLA knows {processes()}: each would train alone"
        raise ShardingError(msg, hint="start one launcher on each host of the TPU slice, and no other")
    take_over_spawn()
    if shards_on_xla(config):
        from fsdplaunch.runtime.xla.trainer import configure_trainer
        from fsdplaunch.runtime.xla.watch import watch_wrappers

        watch_wrappers()
        configure_trainer(config)
