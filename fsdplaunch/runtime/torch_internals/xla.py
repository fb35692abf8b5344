"""What torch_xla offers in no other way: its runtime's processes, and what a shard of its FSDP is. Seen in 2.9."""

from typing import Any

import torch


def begin_process(local_rank: int, local_processes: int) -> None:
    """Tell torch_xla's runtime which of its host's processes this is, before anything uses a device."""
    from torch_xla._internal import pjrt

    pjrt.initialize_multiprocess(local_rank, local_processes)


def is_xla_shard(tensor: torch.Tensor) -> bool:
    """Tell whether a parameter is a shard that `XlaFullyShardedDataParallel` keeps."""
    return hasattr(tensor, "_is_sharded")


def name_in_unit(shard: Any) -> str:
    """Return the dotted name, inside its unit, of the parameter that a shard is of."""
    return str(shard._orig_name)
