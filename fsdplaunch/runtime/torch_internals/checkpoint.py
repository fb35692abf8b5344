"""What torch keeps of its checkpoint formats: DCP's index and flattening, and the files of `torch.save`."""

from collections.abc import Callable
from typing import Any

import torch
from torch._utils import _rebuild_tensor_v2, _rebuild_tensor_v3
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo

__all__ = ["StorageInfo", "flatten_state_dict", "set_element"]
"""Torch's own, under plain names."""

FORMAT_VERSION: str | None = getattr(filesystem, "CURRENT_DCP_VERSION", None)
"""What an index says of its format; None in versions that say nothing."""


def zip_writer(path: str) -> Any:
    """Return torch's writer of the file that `torch.save` writes."""
    return torch._C.PyTorchFileWriter(path)


def tensor_builder(*, with_dtype: bool) -> Callable[..., Any]:
    """Return the function that files of `torch.save` name to build a tensor from its storage."""
    return _rebuild_tensor_v3 if with_dtype else _rebuild_tensor_v2
