"""Reads of shards by the script: by all ranks, or by rank 0 alone, as in `if rank == 0: print(p.norm())`."""

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fsdplaunch.runtime.auto.script_line import calling_lines
from fsdplaunch.runtime.auto.state.gather import ShardGatherer
from fsdplaunch.runtime.auto.state.rank0.position import Position
from fsdplaunch.runtime.auto.state.rank0.pulling import rank0_saves
from fsdplaunch.runtime.torch_internals.tensors import tree_map

_together: set[str] = set()
"""The script's lines that all ranks were seen to reach together; asked once, as a read may stand in every step.

With those that led to them: a function that all ranks have called may be called by rank 0 alone elsewhere.
"""
_alone_at: tuple[Any, ...] | None = None
"""The line at which rank 0 was seen to read alone, and how far it was: its next shards are read so, too."""


def by_all_or_rank0(compute: Callable[[Any, Any, Any], Any]) -> Callable[[Any, Any, Any], Any]:
    """Return a handler that knows, at a line's first read, whether all ranks have come to it.

    Where rank 0 alone has, the others hand over their shards while they wait for it, as for a save.

    Args:
        compute: The handler for all ranks together; collective.
    """

    def read(func: Any, args: Any, kwargs: Any) -> Any:
        saves = None if torch.compiler.is_compiling() else rank0_saves()
        if saves is None:
            return compute(func, args, kwargs)
        line = calling_lines()
        if line in _together:
            return compute(func, args, kwargs)
        gathering = ShardGatherer(f"{func.__name__}() of a shard", keep=True, at=line)
        if not _come_together(gathering, line, saves.position):
            return _alone(gathering, func, args, kwargs)
        _together.add(line)
        return compute(func, args, kwargs)

    return read


def _come_together(gathering: ShardGatherer, line: str, position: Position) -> bool:
    global _alone_at  # noqa: PLW0603  (one script, one position)
    at = (line, *position.counts(), position.steps, position.met)
    if at == _alone_at:
        gathering.together = False
    else:
        gathering.meet()
        _alone_at = None if gathering.together else at
    return gathering.together


def _alone(gathering: ShardGatherer, func: Any, args: Any, kwargs: Any) -> Any:
    def full(value: Any) -> Any:
        if not isinstance(value, DTensor):
            return value
        return gathering.gather(value).to(value.device).requires_grad_(value.requires_grad)

    with gathering.finish("read a shard"):
        args, kwargs = tree_map(full, (args, kwargs))
    return func(*args, **kwargs)
