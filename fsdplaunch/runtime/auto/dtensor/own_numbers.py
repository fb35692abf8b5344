"""Tell of numbers that differ by rank and that the script computes with shards: each rank would scale its part.

`p.grad.mul_(loss.detach())` by hand, or a step whose size is the loss: the loss is that of the rank's own rows.
Numbers are remembered until the first optimizer step, and compared there, where all ranks come.
"""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fsdplaunch.runtime import messages
from fsdplaunch.runtime.auto.state.rank0.position import trains_shards
from fsdplaunch.runtime.collectives.rank_group import from_all
from fsdplaunch.runtime.script_line import script_line

_MOST = 32
"""Numbers of a line that are compared."""
_COMPARED_BACKWARD = 2
"""Without an optimizer the second backward compares: what is done by hand after the first is then known."""
_CLOSE = 1e-5

_noted: dict[str, list[float]] | None = None
"""By the script's lines; None where nothing is remembered."""
_backwards = 0


@contextmanager
def telling_own_numbers() -> Iterator[None]:
    """Compare at the first step of an optimizer of shards what was computed with them until then."""
    global _noted, _backwards  # noqa: PLW0603  (one script)
    _noted, _backwards = {}, 0

    def compare(optimizer: Optimizer, *_: Any) -> None:
        if _noted is not None and trains_shards(optimizer):
            _compare(ends=True)

    hook = register_optimizer_step_pre_hook(compare)
    try:
        yield
    finally:
        hook.remove()
        _noted = None


def note_numbers(values: Iterable[Any]) -> None:
    """Remember the numbers among what is computed with a shard."""
    if _noted is None or torch.compiler.is_compiling():
        return
    numbers = [float(value) for value in values if _is_number(value)]
    if numbers:
        line = _noted.setdefault(script_line(), [])
        line += numbers[: max(_MOST - len(line), 0)]


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and not isinstance(value, DTensor) and value.device.type != "meta"
    return isinstance(value, float)


def compare_at_backward() -> None:
    """Compare where there is no optimizer; called by all ranks before a backward."""
    global _backwards  # noqa: PLW0603
    _backwards += 1
    if _noted is not None and _backwards == _COMPARED_BACKWARD:
        _compare(ends=False)


def _compare(*, ends: bool) -> None:
    """Tell of the first line whose numbers are not the same on all ranks. Collective."""
    global _noted  # noqa: PLW0603
    ranks = from_all(_noted or {})
    _noted = None if ends else {}
    for line, own in ranks[0].items():
        for rank, other in enumerate(ranks):
            pairs = zip(own, other.get(line, []), strict=False)
            found = next((pair for pair in pairs if not _are_close(*pair)), None)
            if found is not None:
                _tell(line, rank, *found)
                return


def _tell(line: str, rank: int, own: float, other: float) -> None:
    messages.say_unequal(
        f"{line}: {own:.6g} on rank 0 and {other:.6g} on rank {rank} is computed with a sharded parameter or"
        " gradient: each rank changes its part by a number of its own rows, as one process does not\n"
        "  try  average it over ranks before, as by torch.distributed.all_reduce(loss) and a division"
    )


def _are_close(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=_CLOSE) or (math.isnan(one) and math.isnan(other))
