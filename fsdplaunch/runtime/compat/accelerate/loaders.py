"""Change how accelerate makes data loaders, transformers' Trainer included.

Needed because `launch.keep_global_batch` holds for the run, whoever shards: without this each rank would take
batches of the script's size. And because accelerate shuffles by other numbers over ranks than in one process, so
that two runs that are compared would never train the same rows.
"""

import functools
from typing import Any

from fsdplaunch.runtime import messages
from fsdplaunch.runtime.compat.import_hook import once_imported
from fsdplaunch.runtime.data.data_loader import check_divisible
from fsdplaunch.runtime.script_line import script_line

_DIVIDES = (
    "keep_global_batch: accelerate divides each batch over the ranks (split_batches); not as in one process are\n"
    "  dropout and noise, which each rank draws for its own rows, losses that are no mean over the batch,\n"
    "  and the order of shuffled rows without use_seedable_sampler (DataLoaderConfiguration's; Trainers set it)"
)


def divide_batches_of_accelerate() -> None:
    """Have every Accelerator divide its loaders' batches, if and when the script imports accelerate."""
    _set("split_batches", _DIVIDES)
    once_imported("accelerate.accelerator", _refuse_indivisible)


def _refuse_indivisible(module: Any) -> None:
    """Refuse a batch that cannot be divided: accelerate would name an option that the script has not set."""
    accelerator = module.Accelerator
    prepare = accelerator.prepare_data_loader

    @functools.wraps(prepare)
    def prepare_data_loader(self: Any, loader: Any, *args: Any, **kwargs: Any) -> Any:
        check_divisible(getattr(loader, "batch_size", None), self.num_processes, script_line())
        return prepare(self, loader, *args, **kwargs)

    accelerator.prepare_data_loader = prepare_data_loader


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
