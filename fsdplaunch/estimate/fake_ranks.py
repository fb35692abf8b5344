"""One process in the place of all ranks: torch's fake process group, and what the other ranks would have answered.

Runs in the tracing process only. Collectives on tensors are answered by torch's fake group. Those on Python
objects read tensors' values, which a traced run does not have: every rank builds the same model, so each answer is
our own.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist


@contextmanager
def fake_ranks(world: int, *, per_node: int) -> Iterator[None]:
    """Be rank 0 of `world` ranks for as long as the context lasts.

    Args:
        world: Ranks over all nodes.
        per_node: Ranks on each node.
    """
    from fsdplaunch.runtime.sharding import shard
    from fsdplaunch.runtime.torch_internals.fsdp.fsdp2 import first_chunk_only
    from fsdplaunch.runtime.torch_internals.traced_memory import FakeStore

    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(per_node)}
    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    try:
        with (
            patch.dict(os.environ, ranks),
            patch.object(dist, "broadcast_object_list", _keep),
            patch.object(dist, "all_gather_object", _repeat),
            patch.object(dist, "broadcast", _keep),
            patch.object(shard, "check_sharded_model", _keep),  # adds up the shards of all ranks
            first_chunk_only(_first_part),
        ):
            yield
    finally:
        dist.destroy_process_group()


def _keep(*_: Any, **__: Any) -> None:
    """Leave everything as it is: ours is what the first rank sends."""


def _repeat(answers: list[Any], mine: Any, **_: Any) -> None:
    answers[:] = [mine] * len(answers)


def _first_part(tensor: torch.Tensor, num_chunks: int, dim: int) -> list[torch.Tensor]:
    """Make only the first rank's part of a parameter; torch makes those of all ranks and keeps one.

    With 1,024 ranks and 700 parameters these parts are most of the time that tracing takes.
    """
    return [tensor.narrow(dim, 0, -(-tensor.size(dim) // num_chunks))]
