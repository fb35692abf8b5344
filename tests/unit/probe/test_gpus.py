"""GPUs as NVIDIA's own bindings read them from a driver's library that was made up for the tests."""

import json
import os
import subprocess
import sys

import pytest

from fsdplaunch.probe import hardware
from fsdplaunch.probe.hardware import Gpu, read_gpus

GIB = 1024**3
READ = """
import json, os, sys
from dataclasses import asdict
from fsdplaunch.probe.hardware import read_gpu_use, read_gpus
for name, environ in json.loads(sys.argv[1]).items():
    for old in [old for old in os.environ if old.startswith("FAKE_NVML")]:
        del os.environ[old]
    os.environ.update(environ)
    gpus, notes = read_gpus(environ)
    print(json.dumps([name, [asdict(gpu) for gpu in gpus], notes, read_gpu_use()]))
"""
VISIBLE = {
    "2,0": ([2, 0], None),
    "": ([], None),
    "-1": ([], None),
    "1,-1,0": ([1], None),
    " 3 , 1 ": ([3, 1], None),
    "GPU-1a2b2002-1111-2222-3333-444444440002": ([2], None),
    "GPU-1a2b2,GPU-1a2b1": ([2, 1], None),
    "0,9,1": ([0], "'9'"),
    "0,GPU-,1": ([0], "'GPU-'"),
    "1,1": ([1], "second time"),
    "banana": ([], "'banana'"),
    "0,MIG-5,1": ([0], "'MIG-5'"),
}
SLICES = ("MIG-7a2b0", "MIG-7a2b0,MIG-7a2b1", "1", None)
MACHINES = {
    "two in use": {"FAKE_NVML": "h100:2", "FAKE_NVML_BUSY": "4711"},
    "memory that is not said": {"FAKE_NVML": "gb10:1"},
    "a lost one": {"FAKE_NVML": "h100:3", "FAKE_NVML_LOST": "2"},
    "no driver loaded": {"FAKE_NVML_INIT": "9", "CUDA_VISIBLE_DEVICES": "0,1"},
    "no library": {"FAKE_NVML_INIT": "12", "CUDA_VISIBLE_DEVICES": "0,1"},
    "updated without a reboot": {"FAKE_NVML_INIT": "18", "CUDA_VISIBLE_DEVICES": "0,1"},
    **{f"four, {visible}": {"FAKE_NVML": "h100:4", "CUDA_VISIBLE_DEVICES": visible} for visible in VISIBLE},
    **{
        f"slices, {visible}": {"FAKE_NVML": "h100:1,h100mig:1"}
        | ({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})
        for visible in SLICES
    },
}


@pytest.fixture(scope="module")
def seen(gpu_driver):
    """What is read on each machine: GPUs, notes, and what each GPU is doing."""
    command = [sys.executable, "-c", READ, json.dumps(MACHINES)]
    environ = {name: text for name, text in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    done = subprocess.run(
        command, env=environ | {"LD_LIBRARY_PATH": gpu_driver}, capture_output=True, text=True, check=True
    )
    return {name: answers for name, *answers in map(json.loads, done.stdout.splitlines())}


def test_each_gpu_is_read_with_what_it_is_doing(seen):
    gpus, notes, use = seen["two in use"]
    assert gpus[0] == {
        "index": 0,
        "name": "NVIDIA H100 80GB HBM3",
        "memory_bytes": 85520809984,
        "compute_capability": [9, 0],
        "uuid": "GPU-1a2b0000-1111-2222-3333-444444440000",
        "busy": [[4711, 3 * GIB]],
        "bus_id": "0000:1b:00.0",
        "bad_memory": 0,
        "is_slice": False,
    }
    assert ([gpu["index"] for gpu in gpus], notes) == ([0, 1], [])
    assert use == {"0": [97, 61], "1": [None, 62]}
    assert list(seen["a lost one"][2]) == ["0", "1"]


def test_memory_that_is_not_said_does_not_hide_the_gpu(seen):
    (gpu,), notes, _ = seen["memory that is not said"]
    assert (gpu["name"], gpu["memory_bytes"], notes) == ("NVIDIA GB10", 0, [])


def test_without_a_driver_that_answers_there_are_none(seen):
    assert seen["no driver loaded"] == seen["no library"] == [[], [], {}]
    gpus, (note,), use = seen["updated without a reboot"]
    assert (gpus, use) == ([], {})
    assert note.startswith("the NVIDIA driver does not answer: ")


def test_without_bindings_there_are_none(monkeypatch):
    monkeypatch.setattr(hardware, "driver_is_installed", lambda: True)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert read_gpus({}) == ((), ())


def test_without_a_library_the_bindings_are_not_loaded(monkeypatch):
    def no_library(name):
        raise OSError(name)

    monkeypatch.setattr(hardware.ctypes, "CDLL", no_library)
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    assert read_gpus({}) == ((), ())
    assert "pynvml" not in sys.modules


@pytest.mark.parametrize("visible", VISIBLE)
def test_visible_devices_are_read_as_cuda_reads_them(seen, visible):
    expected, said = VISIBLE[visible]
    gpus, notes, _ = seen[f"four, {visible}"]
    assert [gpu["index"] for gpu in gpus] == expected
    assert notes[0] == f"CUDA_VISIBLE_DEVICES={visible} shows {len(expected)} of this machine's 4 GPUs"
    assert len(notes) == (1 if said is None else 2)
    assert said is None or said in notes[1]


@pytest.mark.parametrize("visible", SLICES)
def test_a_process_sees_one_slice_with_its_own_memory_and_its_gpus_ability(seen, visible):
    (gpu,), notes, _ = seen[f"slices, {visible}"]
    assert (gpu["index"], gpu["memory_bytes"], gpu["compute_capability"]) == (1, 42140172288, [9, 0])
    assert gpu["uuid"].startswith("MIG-7a2b0000")
    assert any("one MIG slice, here MIG-7a2b0000" in note for note in notes) is (visible in SLICES[1::2])


@pytest.mark.parametrize(
    ("capability", "bf16", "fp8"),
    [((7, 5), False, False), ((8, 0), True, False), ((8, 9), True, True), ((10, 0), True, True)],
)
def test_gpu_formats_follow_the_compute_capability(capability, bf16, fp8):
    gpu = Gpu(index=0, name="x", memory_bytes=1, compute_capability=capability)
    assert (gpu.has_bf16, gpu.has_fp8) == (bf16, fp8)
