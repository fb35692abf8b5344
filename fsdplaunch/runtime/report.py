"""What the runtime tells the person who launched it: a few lines on rank 0's stderr."""

import sys
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from fsdplaunch.runtime.process import rank

if TYPE_CHECKING:
    from torch import nn

    from fsdplaunch.runtime.prepared import Prepared


def say(text: str) -> None:
    """Write one line to stderr, on rank 0 only."""
    if rank() == 0:
        sys.stderr.write(f"fsdplaunch: {text}\n")
        sys.stderr.flush()


def say_anywhere(text: str) -> None:
    """Write one line to stderr, on whichever rank finds something out that rank 0 may not know."""
    sys.stderr.write(f"fsdplaunch: rank {rank()}: {text}\n")
    sys.stderr.flush()


def describe(model: "nn.Module", prepared: "Prepared", *, name: str, kinds: Iterable[str], total: str) -> str:
    """Say in one line what was sharded and how, with the formats the sharded model really has.

    Args:
        model: Sharded.
        prepared: How.
        name: The model's class, as the user wrote it.
        kinds: The class of each unit.
        total: The number of parameters, in words.
    """
    settings, formats = prepared.settings, prepared.settings.dtypes
    units = ", ".join(f"{number} x {kind}" for kind, number in Counter(kinds).items()) or "one unit"
    ranks = " x ".join(str(size) for size in prepared.mesh.shape)
    words = [
        f"sharded {name}: {units}",
        f"{total} parameters",
        f"FSDP{settings.version} {settings.strategy} over {ranks} ranks",
        f"{'/'.join(sorted({_word(param.dtype) for param in model.parameters()}))} kept",
    ]
    words += [f"{_word(formats.param)} compute"] if formats.param is not None else []
    words += [f"{_word(formats.reduce)} reduce"] if formats.reduce is not None else []
    return ", ".join(words)


def _word(dtype: object) -> str:
    return {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}.get(
        str(dtype).removeprefix("torch."), str(dtype).removeprefix("torch.")
    )
