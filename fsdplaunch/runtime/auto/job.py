"""What the hooks of one worker share: the decision who shards, the models found, and the random streams."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn

from fsdplaunch.config.schema import Config
from fsdplaunch.runtime.auto.births import Births
from fsdplaunch.runtime.auto.ownership import Ownership
from fsdplaunch.runtime.auto.randomness import Streams


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One worker's run of one script.

    Attributes:
        config: As launched.
        device: This worker's own.
        rank: Among all workers.
        size: How many workers there are.
        ownership: Who shards.
        births: The modules that exist.
        streams: The random generators.
        models: The models sharded for the script, and the line where.
        complete: For each of them, what to call to check that no parameter was added since.
        said: What has been said once.
    """

    config: Config
    device: torch.device
    rank: int
    size: int
    ownership: Ownership
    births: Births
    streams: Streams
    models: "weakref.WeakKeyDictionary[nn.Module, str]" = field(default_factory=weakref.WeakKeyDictionary)

    complete: "weakref.WeakKeyDictionary[nn.Module, Callable[[], None]]" = field(
        default_factory=weakref.WeakKeyDictionary
    )
    said: set[str] = field(default_factory=set)

    @property
    def keeps_batch(self) -> bool:
        """Whether batches are divided over the workers, so that the run computes what one process would."""
        return self.config.launch.keep_global_batch

    def evaluating(self) -> bool:
        """Whether the script computes without training: gradients are off, or no model is in training mode."""
        return not torch.is_grad_enabled() or not any(model.training for model in list(self.models))


def job_of(config: Config, device: torch.device, *, rank: int, size: int) -> Job:
    """A worker's job at its start: nothing decided, nothing found."""
    return Job(
        config=config,
        device=device,
        rank=rank,
        size=size,
        ownership=Ownership(config),
        births=Births(),
        streams=Streams(rank=rank, kept=config.launch.keep_global_batch or size == 1),
    )
