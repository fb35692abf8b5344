"""Parameters that have everything but memory, and FSDP1 made to flatten them without touching any.

FSDP2 shards parameters on the meta device. FSDP1 insists on real ones, joins all of a unit's into one and
keeps its own part of that: three copies of a unit in memory, for values that are about to be read from a file.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


def empty_storage(shape: Iterable[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a tensor on a real device whose storage holds nothing; reading or writing it is forbidden."""
    tensor = torch.empty(tuple(shape), dtype=dtype, device=device)
    tensor.untyped_storage().resize_(0)
    return tensor


def has_empty_storage(tensor: Any) -> bool:
    """Say whether a tensor has elements and no memory for them."""
    return (
        isinstance(tensor, torch.Tensor)
        and not tensor.is_meta
        and tensor.numel() > 0
        and tensor.untyped_storage().nbytes() == 0
    )


class EmptyFlattening(TorchFunctionMode):
    """While this is active, joining such tensors writes nothing, and neither does copying a part of the result.

    These two functions, `torch.cat` and `Tensor.clone`, are all that FullyShardedDataParallel's constructor does
    with the values of its parameters. The joined tensor is never written, so that on a CPU it takes no memory, and
    the wrapper frees it itself; the copy, which is this rank's shard, is to be filled later.
    """

    def __init__(self) -> None:
        super().__init__()
        self.joined: set[int] = set()

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.cat and any(map(has_empty_storage, args[0])):
            like, numel = args[0][0], sum(tensor.numel() for tensor in args[0])
            joined = torch.empty(numel, dtype=like.dtype, device=like.device)
            self.joined.add(joined.data_ptr())
            return joined
        if func is torch.Tensor.clone and args[0].untyped_storage().data_ptr() in self.joined:
            return torch.empty(args[0].shape, dtype=args[0].dtype, device=args[0].device)
        return func(*args, **(kwargs or {}))
