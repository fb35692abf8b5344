"""A driver's management library as the probe sees it, a /proc and /sys, and model folders."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from fsdplaunch.probe import gpus


class NVMLError(Exception):
    pass


def fake_nvml(cards, slices=None, *, driver=True):
    """`cards`: (name, bytes, capability, uuid, processes). `slices`: uuid -> (card number, bytes)."""
    nvml = ModuleType("pynvml")
    nvml.NVMLError = NVMLError
    nvml.calls = []

    def init():
        nvml.calls.append("init")
        if not driver:
            raise NVMLError("library not found")

    def by_uuid(uuid):
        if uuid not in (slices or {}):
            raise NVMLError("not found")
        return uuid

    def memory(handle):
        total = slices[handle][1] if isinstance(handle, str) else cards[handle][1]
        return SimpleNamespace(total=total)

    def processes(handle):
        if cards[handle][4] is None:
            raise NVMLError("no permission")
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in cards[handle][4]]

    nvml.nvmlInit = init
    nvml.nvmlShutdown = lambda: nvml.calls.append("shutdown")
    nvml.nvmlDeviceGetCount = lambda: len(cards)
    nvml.nvmlDeviceGetHandleByIndex = lambda index: index
    nvml.nvmlDeviceGetIndex = lambda handle: handle
    nvml.nvmlDeviceGetName = lambda handle: cards[handle][0]
    nvml.nvmlDeviceGetMemoryInfo = memory
    nvml.nvmlDeviceGetCudaComputeCapability = lambda handle: cards[handle][2]
    nvml.nvmlDeviceGetUUID = lambda handle: cards[handle][3]
    nvml.nvmlDeviceGetComputeRunningProcesses = processes
    nvml.nvmlDeviceGetHandleByUUID = by_uuid
    nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle = lambda handle: slices[handle][0]
    return nvml


@pytest.fixture
def install_driver(monkeypatch):
    """Put a driver with these cards in place; returns the fake library."""

    def install(cards, slices=None, *, driver=True):
        library = fake_nvml(cards, slices, driver=driver)
        monkeypatch.setitem(sys.modules, "pynvml", library)
        monkeypatch.setattr(gpus, "driver_is_installed", lambda: True)
        return library

    return install


@pytest.fixture
def make_root(tmp_path):
    """Write files below a folder that stands for `/`; returns the folder."""

    def make(files):
        for name, text in files.items():
            path = tmp_path / "root" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path / "root"

    return make


@pytest.fixture
def tiny_llama():
    """Tensors of a three-block decoder, as {name: (dtype, shape)}."""
    tensors = {"model.embed_tokens.weight": ("BF16", (50, 8)), "model.norm.weight": ("BF16", (8,))}
    for block in range(3):
        for part, shape in (("self_attn.q_proj.weight", (8, 8)), ("mlp.up_proj.weight", (16, 8))):
            tensors[f"model.layers.{block}.{part}"] = ("BF16", shape)
    return tensors
