"""Keep the learning rates of all ranks the same: each of them trains its part of every parameter by its own."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from fsdplaunch.errors import ShardingError
from fsdplaunch.runtime import messages
from fsdplaunch.runtime.auto.context import HookContext
from fsdplaunch.runtime.auto.state.rank0.passes import check_all_ranks
from fsdplaunch.runtime.auto.state.rank0.position import trains_shards
from fsdplaunch.runtime.collectives.rank_group import from_all
from fsdplaunch.runtime.patch import replaced
from fsdplaunch.runtime.script_line import script_line

_HINT = "call scheduler.step(metric) on all ranks, with a metric that all of them have"


@contextmanager
def lowering_rates_alike(hook_context: HookContext) -> Iterator[None]:
    """Exchange what `ReduceLROnPlateau` decides by, and take the mean where ranks have different numbers."""

    def stepping(original: Any) -> Any:
        @wraps(original)
        def step(self: Any, metrics: Any, *args: Any, **kwargs: Any) -> Any:
            if hook_context.size > 1 and hook_context.ownership.ours and trains_shards(self.optimizer):
                metrics = _of_all_ranks(float(metrics), hook_context)
            return original(self, metrics, *args, **kwargs)

        return step

    with replaced(ReduceLROnPlateau, "step", stepping):
        yield


def _of_all_ranks(metric: float, hook_context: HookContext) -> float:
    """Return a metric, or its mean where ranks have different ones, which is told. Collective."""
    check_all_ranks("ReduceLROnPlateau.step", _HINT)
    ranks: list[float] = from_all(metric)
    if all(each == metric or (each != each and metric != metric) for each in ranks):  # noqa: PLR0124  (no number)
        return metric
    if "plateau" not in hook_context.printed:
        hook_context.printed.add("plateau")
        one, other = ranks[0], next(each for each in ranks if each != ranks[0])
        messages.say(
            f"{script_line()}: ReduceLROnPlateau is given {one:.6g} on rank 0 and {other:.6g} on another, each of"
            " its own rows: the mean of all ranks decides\n"
            "  try  give it a loss on validation data, or with --keep-global-batch one read after loss.backward()"
        )
    return float(torch.tensor(ranks, dtype=torch.float64).mean())


class LastRates:
    """The learning rates of a rank's last step of shards."""

    def __init__(self) -> None:
        self.rates: list[float] = []

    def note(self, optimizer: Optimizer, *_: Any) -> None:
        """Note a step."""
        if trains_shards(optimizer):
            rates = (group.get("lr") for group in optimizer.param_groups)
            self.rates = [float(rate) for rate in rates if isinstance(rate, float | int)]

    def check(self, digests: Sequence[float], line: str) -> None:
        """Check that all ranks have made it by the same rates; collective where they have not.

        Args:
            digests: Of the rates of each rank.
            line: Of the script, that calls backward.

        Raises:
            ShardingError: They have not.
        """
        if len(set(digests)) == 1:
            return
        ranks: list[list[float]] = from_all(self.rates)
        rank = next(rank for rank, each in enumerate(ranks) if each != ranks[0])
        pairs = zip(ranks[0], ranks[rank], strict=False)
        one, other = next((pair for pair in pairs if pair[0] != pair[1]), (0.0, 0.0))
        msg = f"{line}: rank 0 has stepped with a learning rate of {one:.6g} and rank {rank} of {other:.6g}"
        hint = (
            "change it by what all ranks have alike: a loss on validation data, or one read after loss.backward()"
        )
        raise ShardingError(msg, hint=hint)
