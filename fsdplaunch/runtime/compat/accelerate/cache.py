"""Let models of transformers train under the activation checkpointing that accelerate applies.

They keep keys and values of attention, unless they are told not to, and a block that is computed again appends to
them again: torch finds that tensors differ. transformers' Trainer turns that off from version 5 on.
"""

import functools
from typing import Any

from torch import nn

from fsdplaunch.runtime.compat.import_hook import once_imported


def keep_no_cache_for_accelerate() -> None:
    """Turn off the cache of what accelerate prepares so, if and when the script imports it."""
    once_imported("accelerate.accelerator", _adapt)


def _adapt(module: Any) -> None:
    from fsdplaunch.runtime.compute.activation_checkpointing import keep_no_cache

    kind = module.Accelerator
    prepare = kind.prepare

    @functools.wraps(prepare)
    def prepare_without_cache(self: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(getattr(self.state, "fsdp_plugin", None), "activation_checkpointing", False):
            for model in (each for each in args if isinstance(each, nn.Module)):
                keep_no_cache(model)
        return prepare(self, *args, **kwargs)

    kind.prepare = prepare_without_cache
