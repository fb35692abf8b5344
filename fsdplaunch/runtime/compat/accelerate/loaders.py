"""Change how accelerate makes data loaders, transformers' Trainer included.

Needed because `launch.keep_global_batch` holds for the run, whoever shards: without this each rank would take
batches of the script's size. And because accelerate shuffles by other numbers over ranks than in one process, so
that two runs that are compared would never train the same rows.
"""

import functools
from typing import Any

from fsdplaunch.runtime import messages
from fsdplaunch.runtime.compat.import_hook import once_imported

_DIVIDES = (
    "keep_global_batch: accelerate divides each batch over the ranks (split_batches); not as in one process are\n"
    "  dropout and noise, which each rank draws for its own rows, and losses that are no mean over the batch"
)


def divide_batches_of_accelerate() -> None:
    """Have every Accelerator divide its loaders' batches, if and when the script imports accelerate."""
    _set("split_batches", _DIVIDES)


def shuffle_alike_of_accelerate() -> None:
    """Have every Accelerator shuffle by the seed alone, whatever the number of ranks."""
    _set("use_seedable_sampler")


def _set(option: str, announcement: str = "") -> None:
    """Switch on an option of accelerate's DataLoaderConfiguration, and print that it was."""
    once_imported("accelerate.accelerator", functools.partial(_adapt, option=option, announcement=announcement))


def _adapt(module: Any, *, option: str, announcement: str) -> None:
    accelerator = module.Accelerator
    build = accelerator.__init__

    @functools.wraps(build)
    def build_with_option(self: Any, *args: Any, **kwargs: Any) -> None:
        if option not in kwargs:  # older versions take it there
            loaders = kwargs.get("dataloader_config") or module.DataLoaderConfiguration()
            setattr(loaders, option, True)
            kwargs["dataloader_config"] = loaders
        build(self, *args, **kwargs)
        if announcement:
            messages.say(announcement)

    accelerator.__init__ = build_with_option
