"""Show a script whose ranks are hidden no process group: optimizers and metrics ask for one and take another way.

`torch.distributed.is_initialized()` is what they ask, nanochat's optimizer for one. This package and torch itself
still find the group, and so do libraries that shard by it.
"""

import functools
import sys

import torch.distributed as dist

_SEEING = ("torch", "fsdplaunch", "accelerate", "transformers")


def hide_group() -> None:
    """Let `torch.distributed.is_initialized()` be False for the script and for what it uses."""
    initialized = dist.is_initialized

    @functools.wraps(initialized)
    def is_initialized() -> bool:
        caller = str(sys._getframe(1).f_globals.get("__name__", ""))
        return caller.partition(".")[0] in _SEEING and initialized()

    dist.is_initialized = is_initialized
