import importlib
import sys

import pytest

from fsdplaunch.probe import hardware
from fsdplaunch.probe.hardware import Gpu, GpuUse, read_gpu_use, read_gpus

GIB = 1024**3


def cards(count, **remarks):
    name = remarks.get("name", "NVIDIA H100 80GB HBM3")
    capability = remarks.get("capability", (9, 0))
    processes = remarks.get("processes", ())
    return [(name, 80 * GIB, capability, f"GPU-{i:04x}aaaa-11", processes) for i in range(count)]


def test_read_gpus_two_cards_reports_each_and_closes_the_library(install_driver):
    nvml = install_driver(cards(2, processes=[(4711, 3 * GIB)]))
    found, notes = read_gpus({})
    assert [gpu.index for gpu in found] == [0, 1]
    assert found[0] == Gpu(
        index=0,
        name="NVIDIA H100 80GB HBM3",
        memory_bytes=80 * GIB,
        compute_capability=(9, 0),
        uuid="GPU-0000aaaa-11",
        busy=((4711, 3 * GIB),),
    )
    assert notes == ()
    assert nvml.calls == ["init", "shutdown"]


def test_read_gpus_old_library_giving_bytes_reports_text(install_driver):
    install_driver([(b"Tesla T4", 15 * GIB, (7, 5), b"GPU-77", None)])
    found, _ = read_gpus({})
    assert (found[0].name, found[0].uuid, found[0].busy) == ("Tesla T4", "GPU-77", ())


@pytest.mark.parametrize(
    ("number", "notes"),
    [
        (9, ()),  # the driver is not loaded
        (12, ()),  # there is no library
        (18, ("the NVIDIA driver does not answer: Driver/library version mismatch",)),  # updated without a reboot
    ],
)
def test_read_gpus_without_a_driver_that_answers_reports_none(install_driver, number, notes):
    install_driver(cards(2), driver=number)
    assert read_gpus({"CUDA_VISIBLE_DEVICES": "0,1"}) == ((), notes)


def test_read_gpus_memory_that_is_not_told_does_not_hide_the_gpu(install_driver):
    install_driver([("NVIDIA GB10", None, (12, 1), "GPU-1", ())])
    found, notes = read_gpus({})
    assert (found[0].name, found[0].memory_bytes, notes) == ("NVIDIA GB10", 0, ())


def test_read_gpus_calls_exist_in_the_real_library(install_driver):
    fake = install_driver(cards(1))
    del sys.modules["pynvml"]
    real = importlib.import_module("pynvml")
    names = [name for name in dir(type(fake)) if name.startswith(("nvml", "NVML_"))]
    assert len(names) > 10
    assert [name for name in names if not hasattr(real, name)] == []
    assert real.NVML_ERROR_DRIVER_NOT_LOADED == fake.NVML_ERROR_DRIVER_NOT_LOADED
    assert real.NVML_ERROR_LIBRARY_NOT_FOUND == fake.NVML_ERROR_LIBRARY_NOT_FOUND


def test_read_gpus_without_bindings_reports_none(monkeypatch):
    monkeypatch.setattr(hardware, "driver_is_installed", lambda: True)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert read_gpus({}) == ((), ())


def test_read_gpus_without_driver_library_does_not_load_the_bindings(monkeypatch):
    def no_library(name):
        raise OSError(name)

    monkeypatch.setattr(hardware.ctypes, "CDLL", no_library)
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    assert read_gpus({}) == ((), ())
    assert "pynvml" not in sys.modules


@pytest.mark.parametrize(
    ("visible", "expected", "said"),
    [
        ("2,0", [2, 0], None),
        ("", [], None),
        ("-1", [], None),
        ("1,-1,0", [1], None),
        (" 3 , 1 ", [3, 1], None),
        ("GPU-0002aaaa-11", [2], None),
        ("GPU-0002,GPU-0001", [2, 1], None),
        ("0,9,1", [0], "'9'"),
        ("0,GPU-,1", [0], "'GPU-'"),
        ("1,1", [1], "second time"),
        ("banana", [], "'banana'"),
        ("0,MIG-5,1", [0], "'MIG-5'"),
    ],
)
def test_read_gpus_visible_devices_are_read_as_cuda_reads_them(install_driver, visible, expected, said):
    install_driver(cards(4))
    found, notes = read_gpus({"CUDA_VISIBLE_DEVICES": visible})
    assert [gpu.index for gpu in found] == expected
    assert notes[0] == f"CUDA_VISIBLE_DEVICES={visible} shows {len(expected)} of this machine's 4 GPUs"
    assert len(notes) == (1 if said is None else 2)
    assert said is None or said in notes[1]


@pytest.mark.parametrize("visible", ["MIG-5", "MIG-5,MIG-6", "1", None])
def test_read_gpus_process_sees_one_slice_with_its_own_memory_and_its_gpus_ability(install_driver, visible):
    install_driver(cards(2), {"MIG-5": (1, 10 * GIB), "MIG-6": (1, 10 * GIB)})
    found, notes = read_gpus({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})
    assert [(gpu.index, gpu.memory_bytes, gpu.compute_capability, gpu.visible_name) for gpu in found] == [
        (1, 10 * GIB, (9, 0), "MIG-5")
    ]
    assert any("one MIG slice, here MIG-5" in note for note in notes) is (visible in (None, "MIG-5,MIG-6"))


@pytest.mark.parametrize(
    ("capability", "bf16", "fp8"),
    [((7, 5), False, False), ((8, 0), True, False), ((8, 9), True, True), ((10, 0), True, True)],
)
def test_gpu_formats_follow_the_compute_capability(capability, bf16, fp8):
    gpu = Gpu(index=0, name="x", memory_bytes=1, compute_capability=capability)
    assert (gpu.has_bf16, gpu.has_fp8) == (bf16, fp8)


def test_use_of_each_gpu_as_far_as_the_driver_says_it(install_driver):
    nvml = install_driver([*cards(2), None])
    assert read_gpu_use() == {
        "0": GpuUse(percent=97, celsius=61, memory_bytes=80 * GIB),
        "1": GpuUse(percent=None, celsius=62, memory_bytes=80 * GIB),
    }
    assert nvml.calls == ["init", "shutdown"]
    install_driver(cards(1), driver=9)
    assert read_gpu_use() == {}
