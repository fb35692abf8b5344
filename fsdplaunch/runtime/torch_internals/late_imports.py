"""What torch imports late: its compiler, by the first optimizer, and its checkpoint formats, by the first save.

Imported in the fork server, before workers are forked, or each would take half a second for it.
"""

import encodings.idna  # noqa: F401  (as the first name of a host that is looked up)
from contextlib import suppress

import torch._dynamo
import torch.utils.serialization.config
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo

__all__ = ["StorageInfo", "flatten_state_dict", "set_element"]
"""Torch's own, under plain names."""

FORMAT_VERSION: str | None = getattr(filesystem, "CURRENT_DCP_VERSION", None)
"""What an index says of its format; None in versions that say nothing."""
with suppress(ImportError):  # not in torch 2.9
    import torch.profiler._cupti_monitor  # noqa: F401  (as the first step does)
