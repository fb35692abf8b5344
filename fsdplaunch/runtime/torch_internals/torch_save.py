"""What `torch.save` writes its file with, and the functions that such a file names."""

from collections.abc import Callable
from typing import Any

import torch
from torch._utils import _rebuild_tensor_v2, _rebuild_tensor_v3


def zip_writer(path: str) -> Any:
    """Return torch's writer of the file that `torch.save` writes; all versions."""
    return torch._C.PyTorchFileWriter(path)


def tensor_builder(*, with_dtype: bool) -> Callable[..., Any]:
    """Return the function that files of `torch.save` name to build a tensor from its storage; all versions."""
    return _rebuild_tensor_v3 if with_dtype else _rebuild_tensor_v2
