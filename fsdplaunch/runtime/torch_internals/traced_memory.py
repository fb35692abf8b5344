"""A step that is traced without a device: ranks and tensors that are not there, and the memory they would take."""

from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.testing._internal.distributed.fake_pg import FakeStore

__all__ = ["FSDPMemTracker", "FakeStore", "FakeTensorMode"]
"""Torch's own, under plain names."""
