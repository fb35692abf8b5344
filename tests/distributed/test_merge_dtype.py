"""Conversion while merging, against torch's own casts."""

import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from fsdplaunch.checkpoint.dtypes import DTYPES, convert
from fsdplaunch.checkpoint.merge.merge import MergeOptions, merge
from fsdplaunch.errors import CheckpointError

TORCH = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def every_rounding(dtype: torch.dtype) -> torch.Tensor:
    """Every 16-bit value, or every upper half of a float with the lower halves where rounding turns."""
    upper = np.arange(65536, dtype=np.uint32)
    if dtype.itemsize == 2:
        return torch.from_numpy(upper.astype(np.uint16).view(np.int16)).view(dtype)
    lower = np.array(
        [0, 1, 0xFFF, 0x1000, 0x1001, 0x2FFF, 0x3000, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=np.uint32
    )
    wide = torch.from_numpy(((upper << 16)[:, None] | lower).reshape(-1).view(np.int32)).view(torch.float32)
    if dtype == torch.float64:
        near = torch.tensor([0.0, 1e-9, -1e-9, 3e-8], dtype=torch.float64)
        return (wide[::7].double()[:, None] * (1 + near)).reshape(-1)
    return wide


@pytest.mark.parametrize("source", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("target", TORCH)
def test_convert_equals_torch_on_every_kind_of_value(source, target):
    numbers = every_rounding(source)
    wanted = numbers.to(TORCH[target])
    fits = ~numbers.isfinite() | wanted.isfinite()
    numbers, wanted = numbers[fits].contiguous(), wanted[fits]
    names = [str(dtype).removeprefix("torch.") for dtype in (source, TORCH[target])]
    raw = convert(numbers.view(torch.uint8).numpy().tobytes(), DTYPES[names[0]], DTYPES[names[1]], name="w")
    found = torch.frombuffer(bytearray(raw), dtype=TORCH[target])
    broken = numbers.isnan()
    assert broken.any()
    assert torch.equal(found.isnan(), broken)
    bits = torch.int32 if target == "fp32" else torch.int16
    assert torch.equal(found[~broken].view(bits), wanted[~broken].view(bits))


@pytest.mark.parametrize(
    ("source", "target"), [("float32", "float16"), ("float32", "bfloat16"), ("float64", "float32")]
)
def test_convert_of_a_value_that_is_too_large_is_refused(source, target):
    dtype = getattr(torch, source)
    largest = torch.tensor([1.0, torch.finfo(dtype).max], dtype=dtype).view(torch.uint8).numpy().tobytes()
    with pytest.raises(CheckpointError, match=f"'layer.w' holds a value that {target} cannot hold"):
        convert(largest, DTYPES[source], DTYPES[target], name="layer.w")


def state() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "big": torch.randn(3001, 701),
        "turned": torch.randn(1500, 901).t(),
        "double": torch.randn(5, dtype=torch.float64),
        "half": torch.randn(5).half(),
        "brain": torch.randn(5).bfloat16(),
        "scalar": torch.tensor(3.14159),
        "empty": torch.empty(0, 4),
        "steps": torch.tensor(7),
        "truth": torch.tensor([True, False]),
        "complex": torch.randn(3, dtype=torch.complex64),
        "quantized": torch.randn(4).to(torch.float8_e4m3fn),
    }


def raw(tensor: torch.Tensor) -> bytes:
    """A tensor's bytes in row-major order."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("target", TORCH)
def test_merge_with_dtype_equals_torch_casts_and_leaves_other_types(target, tmp_path):
    dcp.save({"model": state()}, checkpoint_id=tmp_path / "ckpt", no_dist=True)
    result = merge(tmp_path / "ckpt", tmp_path / "out", options=MergeOptions(dtype=target, verify=True))
    found = load_file(tmp_path / "out/model.safetensors")
    floats = {"big", "turned", "double", "half", "brain", "scalar", "empty"}
    for name, tensor in state().items():
        wanted = tensor.to(TORCH[target]) if name in floats else tensor
        assert found[name].dtype == wanted.dtype, name
        assert raw(found[name]) == raw(wanted), name
    assert result.dtypes[str(TORCH[target]).removeprefix("torch.")] == len(floats)
    assert result.nbytes == (tmp_path / "out/model.safetensors").stat().st_size


def test_merge_with_dtype_that_overflows_leaves_nothing(tmp_path):
    dcp.save({"model": {"w": torch.tensor([1e30])}}, checkpoint_id=tmp_path / "ckpt", no_dist=True)
    with pytest.raises(CheckpointError, match="float16 cannot hold: it would become infinite") as caught:
        merge(tmp_path / "ckpt", tmp_path / "out", options=MergeOptions(dtype="fp16"))
    assert "bf16" in caught.value.hint
    assert [path.name for path in tmp_path.iterdir()] == ["ckpt"]


def test_merge_with_dtype_needs_neither_torch_nor_the_memory_of_the_model(tmp_path):
    dcp.save({"model": {"w": torch.ones(25_000_000)}}, checkpoint_id=tmp_path / "ckpt", no_dist=True)
    script = (
        "import sys; from pathlib import Path\n"
        "from fsdplaunch.checkpoint.merge.merge import MergeOptions, merge\n"
        "merge(Path(sys.argv[1]), Path(sys.argv[2]), options=MergeOptions(dtype='bf16'))\n"
        "peak = next(line for line in open('/proc/self/status') if line.startswith('VmHWM'))\n"
        "print('torch' in sys.modules, peak.split()[1])"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "ckpt"), str(tmp_path / "out")]
    run = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    imported, peak = run.stdout.split()
    assert imported == "False"
    assert int(peak) < 70_000  # KiB; the source has 100 MB
