"""Which weight files a call of `prepare` means."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torch import nn

from fsdplaunch.config.environment import decode
from fsdplaunch.errors import UsageError

_used: list[Path] = []
"""What was loaded, so that a wish of the configuration that was not heard is known at the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pretrained:
    """A model folder or a weight file to load one model from, and whether names must be the same."""

    where: Path
    strict: bool


def pretrained_for(
    models: Sequence[nn.Module], *, weights: str | os.PathLike[str] | Literal[False] | None, strict: bool | None
) -> Pretrained | None:
    """Decide what to load the models of one call from: what the call says, else what the configuration says.

    False stands for no weights. Raises a UsageError for weights without exactly one model to load them into.
    """
    configured = decode().checkpoint
    where = configured.weights if weights is None else weights
    if where is False or where is None or (weights is None and not models):
        if strict is not None:
            msg = "strict was given without weights"
            raise UsageError(msg, hint="give weights=FOLDER, or set checkpoint.weights")
        return None
    if len(models) != 1:
        named = "checkpoint.weights" if weights is None else "weights"
        msg = f"{named} is for one model, and prepare was given {len(models)}"
        raise UsageError(msg, hint="prepare each model in a call of its own, those without with weights=False")
    _used.append(Path(where))
    return Pretrained(where=Path(where), strict=configured.weights_strict if strict is None else strict)


def weights_used() -> bool:
    """Return whether any weights were loaded in this process."""
    return bool(_used)
