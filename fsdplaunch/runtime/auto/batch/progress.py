"""How far one worker's training is, and what its passes are given: what its hooks look at in common."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from fsdplaunch.config.schema.config import Config
from fsdplaunch.runtime import messages
from fsdplaunch.runtime.script_line import script_line
from fsdplaunch.runtime.torch_internals.held_tensors import tensors_held

_LOOKED_AT = 2
"""Backward passes at which ranks compare their rows: once training draws for each rank, the second has others."""


@dataclass(slots=True)
class Progress:
    """One worker's.

    Attributes:
        backwards: Backward passes that have begun.
        passes: Passes in training since the last of them.
        divided: Whether a loader gave this rank its share of something.
        complete: Whether the loader that was read last gave all ranks the same rows, to evaluate by.
        read_by: Why what was read was not divided, where a loader read it.
        fingerprint: A number made of what the last pass was given; None before the first, and once compared.
    """

    backwards: int = 0
    passes: int = 0
    divided: bool = False
    complete: bool = False
    read_by: str = ""
    fingerprint: float | None = None

    def enter(self, given: Iterable[Any]) -> None:
        """Note what a pass in training with gradients is given."""
        self.passes += 1
        if self.backwards < _LOOKED_AT and not self.divided:
            self.fingerprint = float(sum(_fingerprint(tensor) for tensor in tensors_held(tuple(given))))

    def await_backward(self) -> bool:
        """Return whether a pass was made that no backward has followed."""
        return self.passes > 0

    def leave(self) -> None:
        """Note that a backward begins, which the passes so far belong to."""
        self.passes = 0
        self.backwards += 1


class SameRows:
    """Warns where all ranks compute the same rows in the default mode, because nothing divides them.

    Args:
        progress: This worker's.
        config: As launched.
        compares: Whether ranks are to have different rows at all.
    """

    def __init__(self, progress: Progress, config: Config, *, compares: bool) -> None:
        self.progress, self.config, self.compares = progress, config, compares

    def check(self, device: torch.device, *, ranked: bool) -> None:
        """Compare over ranks what passes were given, before a backward. Collective at the second one.

        Args:
            device: This worker's.
            ranked: Whether the script has ranks, and divides its data itself.
        """
        progress = self.progress
        if not self.compares or progress.divided or progress.fingerprint is None or not progress.await_backward():
            return
        if progress.backwards + 1 < _LOOKED_AT:
            return
        self.compares = False
        own, progress.fingerprint = progress.fingerprint, None
        extremes = torch.tensor([own, -own], dtype=torch.float64, device=device)
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
        if extremes[0] == -extremes[1]:
            why = "the script has no DistributedSampler" if ranked else "no DataLoader divides them"
            advice = "" if ranked else ": as slow as one process; --keep-global-batch divides the model's passes"
            line, ranks = script_line(), dist.get_world_size()
            messages.say(
                f"{line}: all {ranks} ranks compute the same rows, because {progress.read_by or why}{advice}"
            )


def _fingerprint(tensor: torch.Tensor) -> float:
    """Return a sum in which each place has a weight of its own: sums of few words are soon alike."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        return float(tensor.detach().double().sum())
    values = tensor.detach().double().flatten()
    return float(values @ torch.arange(1, len(values) + 1, dtype=torch.float64, device=values.device).sqrt())
