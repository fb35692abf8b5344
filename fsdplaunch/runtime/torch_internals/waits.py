"""Where all waiting for batches and for other ranks passes, whichever of torch's functions a script calls."""

from collections.abc import Callable

from torch.autograd import Variable
from torch.utils.data import dataloader

WAITS = (
    ("torch.distributed", "Work.wait"),
    ("torch.distributed", "_broadcast_coalesced"),
    ("torch.distributed._functional_collectives", "wait_tensor"),
)
"""Modules, and their functions in which a rank waits for others.

Every collective of `torch.distributed` ends in the first, that of gloo blocks there; DistributedDataParallel sends
buffers by the second; DTensors wait in the third.
"""
NEXT_BATCH = (dataloader, "_BaseDataLoaderIter.__next__")
"""What every DataLoader's iterator has, with worker processes or without."""


def call_after_backward(function: Callable[[], None]) -> None:
    """Call a function at the end of the running backward pass, after what has been asked for so before."""
    Variable._execution_engine.queue_callback(function)
