"""A driver's management library as the probe sees it, a /proc and /sys, and model folders."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from fsdplaunch.probe import hardware


class NVMLError(Exception):
    def __init__(self, text, value=999):
        super().__init__(text)
        self.value = value


class FakeNvml(ModuleType):
    """`cards`: (name, bytes, capability, uuid, processes). `slices`: uuid -> (card number, bytes).

    Bytes of None: the driver does not tell. A card of None does not answer. `driver`: True, or the error's number.
    """

    NVMLError = NVMLError
    NVML_ERROR_DRIVER_NOT_LOADED = 9
    NVML_ERROR_LIBRARY_NOT_FOUND = 12
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC = 1, 0

    def __init__(self, cards, slices=None, *, driver=True):
        super().__init__("pynvml")
        self._cards, self._slices, self._driver = cards, slices or {}, driver
        self.calls = []

    def nvmlInit(self):  # noqa: N802
        self.calls.append("init")
        if self._driver is not True:
            raise NVMLError("Driver/library version mismatch", self._driver)

    def nvmlShutdown(self):  # noqa: N802
        self.calls.append("shutdown")

    def nvmlDeviceGetCount(self):  # noqa: N802
        return len(self._cards)

    def nvmlDeviceGetHandleByIndex(self, index):  # noqa: N802
        if self._cards[index] is None:
            raise NVMLError("GPU is lost")
        return index

    def nvmlDeviceGetMigMode(self, handle):  # noqa: N802
        divided = any(card == handle for card, _ in self._slices.values())
        return [int(divided), int(divided)]

    def nvmlDeviceGetMaxMigDeviceCount(self, handle):  # noqa: N802
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle, number):  # noqa: N802
        made = [uuid for uuid, (card, _) in self._slices.items() if card == handle]
        if number >= len(made):
            raise NVMLError("not found")
        return made[number]

    def nvmlDeviceGetTotalEccErrors(self, handle, kind, since):  # noqa: N802
        raise NVMLError("Not Supported")

    def nvmlDeviceGetIndex(self, handle):  # noqa: N802
        return handle

    def nvmlDeviceGetName(self, handle):  # noqa: N802
        return self._cards[handle][0]

    def nvmlDeviceGetMemoryInfo(self, handle):  # noqa: N802
        total = self._slices[handle][1] if isinstance(handle, str) else self._cards[handle][1]
        if total is None:
            raise NVMLError("Not Supported")
        return SimpleNamespace(total=total)

    NVML_TEMPERATURE_GPU = 0

    def nvmlDeviceGetUtilizationRates(self, handle):  # noqa: N802
        if handle:
            raise NVMLError("Not Supported")
        return SimpleNamespace(gpu=97, memory=30)

    def nvmlDeviceGetTemperature(self, handle, sensor):  # noqa: N802
        return 61 + handle + sensor

    def nvmlDeviceGetCudaComputeCapability(self, handle):  # noqa: N802
        return self._cards[handle][2]

    def nvmlDeviceGetUUID(self, handle):  # noqa: N802
        return handle if isinstance(handle, str) else self._cards[handle][3]

    def nvmlDeviceGetComputeRunningProcesses(self, handle):  # noqa: N802
        if self._cards[handle][4] is None:
            raise NVMLError("no permission")
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in self._cards[handle][4]]


@pytest.fixture
def install_driver(monkeypatch):
    """Put a driver with these cards in place; returns the fake library."""

    def install(cards, slices=None, *, driver=True):
        library = FakeNvml(cards, slices, driver=driver)
        monkeypatch.setitem(sys.modules, "pynvml", library)
        monkeypatch.setattr(hardware, "driver_is_installed", lambda: True)
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
