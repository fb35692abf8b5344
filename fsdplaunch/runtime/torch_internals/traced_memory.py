"""A step that is traced without a device: ranks and tensors that are not there, and the memory they would take."""

from collections.abc import Mapping
from typing import Any

from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.testing._internal.distributed.fake_pg import FakeStore

__all__ = ["FSDPMemTracker", "FakeStore", "FakeTensorMode"]
"""Torch's own, under plain names."""


def tracked_memory(tracker: Any) -> Mapping[Any, Mapping[Any, int]]:
    """Return bytes alive now by device and kind, `Total` among the kinds, from an FSDPMemTracker."""
    snapshot: Mapping[Any, Mapping[Any, int]] = tracker._curr_mem_snap
    return snapshot


def note_peak(tracker: Any, device: Any, now: Mapping[Any, int]) -> bool:
    """Keep `now` as the peak of a device if it is higher, and return whether it is."""
    if now["Total"] <= tracker._peak_mem.get(device, 0):
        return False
    tracker._peak_mem[device] = now["Total"]
    tracker._peak_mem_snap[device] = dict(now)
    return True


def modules_running(tracker: Any) -> list[str]:
    """Return the names of the modules inside which the last operation of a tracked step ran."""
    return [name for name in tracker._mod_tracker.parents if name != "Global"]
