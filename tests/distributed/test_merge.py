"""Checkpoints written by real torch on gloo ranks, merged and compared bit for bit with torch's own loader."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    StateDictType,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from fsdplaunch.checkpoint.dtypes import DTYPES as KINDS
from fsdplaunch.checkpoint.dtypes import convert
from fsdplaunch.checkpoint.merge.merge import MergeOptions, merge, merge_fsdp_weights
from fsdplaunch.errors import CheckpointError
from tests.distributed.pool import RankPool
from tests.distributed.test_accelerate_functions import accelerator
from tests.distributed.tiny import words_of

STRIDED = {"strided_even": 8, "strided": 9}
"""Other meshes and placements of every kind: tests/distributed/test_merge_generated.py."""
DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64),
    *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.bool, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu),
    *(torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
]


def values(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The same pseudo-random tensor on every rank."""
    bits = torch.arange(torch.Size(shape).numel() * dtype.itemsize, dtype=torch.int64)
    noise = (bits * 2654435761 % 251).to(torch.uint8)
    if dtype.is_floating_point or dtype.is_complex:
        noise[dtype.itemsize - 1 :: dtype.itemsize] &= 0x3F  # no infinities and no NaN: they compare by bytes only
    return (
        (noise % 2).to(torch.bool)[: torch.Size(shape).numel()].reshape(shape)
        if dtype == torch.bool
        else (noise.view(dtype).reshape(shape))
    )


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 3 * width + 1)
        self.down = nn.Linear(3 * width + 1, width, bias=False)
        self.register_buffer("steps", torch.tensor(7))
        self.register_buffer("table", torch.arange(6.0).reshape(2, 3))


class Model(nn.Module):
    """Two blocks, an embedding with an odd number of rows and a head tied to it."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(7, width)
        self.blocks = nn.ModuleList([Block(width), Block(width)])
        self.head = nn.Linear(width, 7, bias=False)
        self.head.weight = self.embed.weight


def fsdp1(mesh=None) -> FullyShardedDataParallel:
    units = {"auto_wrap_policy": lambda module, recurse, nonwrapped_numel: recurse or isinstance(module, Block)}
    model = FullyShardedDataParallel(
        Model(), device_id=torch.device("cpu"), device_mesh=mesh, use_orig_params=True, **units
    )
    FullyShardedDataParallel.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
    return model


def fsdp2(mesh) -> nn.Module:
    model = Model()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def save_two(folder: Path) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    dcp.save({"model": get_model_state_dict(fsdp2(mesh))}, checkpoint_id=folder / "fsdp2")
    odd = {str(dtype).removeprefix("torch."): values(4, 2, dtype=dtype) for dtype in DTYPES}
    halves = {name: tensor.chunk(2, 1)[dist.get_rank()].contiguous() for name, tensor in odd.items()}
    odd |= {f"cut.{name}": DTensor.from_local(half, mesh, [Shard(1)]) for name, half in halves.items()}
    odd |= {
        "scalar": torch.tensor(3.5),
        "truth": torch.tensor(True),
        "empty": torch.empty(0, 4),
        "empty_rows": distribute_tensor(torch.empty(0, 4), mesh, [Shard(0)]),
        "transposed": values(5, 3).t(),
        "transposed_rows": DTensor.from_local(values(4, 3).t(), mesh, [Shard(0)]),
        "channels_last": values(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "view": values(6, 6)[1:4, 2:5],
        "expanded": torch.tensor([1.0, 2.0]).expand(3, 2),
        "parameter": nn.Parameter(values(2, 2)),
    }
    dcp.save({"model": odd | {"step": 3, "note": "text"}}, checkpoint_id=folder / "odd")
    model = fsdp1()
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder / "fsdp1_sharded_tensor")
    model = fsdp1(mesh)
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder / "fsdp1_dtensor")
    save_training(mesh, folder)
    save_by_accelerate(mesh, folder)


def save_training(mesh, folder: Path) -> None:
    """Model and optimizer in one checkpoint, and each alone, as our own and torch's examples write them."""
    model = fsdp2(mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    weights, state = get_model_state_dict(model), get_optimizer_state_dict(model, optimizer)
    dcp.save({"optimizer": state}, checkpoint_id=folder / "run" / "optimizer_0")
    dcp.save({"model": weights}, checkpoint_id=folder / "run" / "pytorch_model_fsdp_0")
    dcp.save(weights, checkpoint_id=folder / "flat")


def save_by_accelerate(mesh, folder: Path) -> None:
    """What accelerate's own save functions write."""
    from accelerate.utils import fsdp_utils

    for version, model in ((1, fsdp1()), (2, fsdp2(mesh))):
        theirs = accelerator(fsdp_version=version, state_dict_type="SHARDED_STATE_DICT")
        theirs.num_processes = dist.get_world_size()
        fsdp_utils.save_fsdp_model(theirs.state.fsdp_plugin, theirs, model, folder / f"accelerate{version}")
        dist.barrier()


def save_four(folder: Path) -> None:
    parts = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for name, rows in STRIDED.items():
        weight = nn.Parameter(distribute_tensor(values(rows, 6), parts["tp"], [Shard(0)]))
        holder = nn.Module()
        holder.register_parameter("weight", weight)
        fully_shard(holder, mesh=parts["dp"])
        dcp.save({"model": holder.state_dict()}, checkpoint_id=folder / name)


TWO = [
    *("fsdp2", "odd", "fsdp1_sharded_tensor", "fsdp1_dtensor", "run/pytorch_model_fsdp_0", "flat"),
    *("accelerate1/pytorch_model_fsdp_0", "accelerate2/pytorch_model_fsdp_0"),
]


@pytest.fixture(scope="module")
def two(two_ranks: RankPool, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    two_ranks.run(save_two, folder)
    return folder


@pytest.fixture(scope="module")
def four(four_ranks: RankPool, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("four")
    four_ranks.run(save_four, folder)
    return folder


def raw(tensor: torch.Tensor) -> bytes:
    """A tensor's bytes in row-major order."""
    plain = tensor.detach().contiguous().reshape(-1)
    return b"" if not plain.numel() else bytes(plain.view(torch.uint8).numpy())


def loaded_by_torch(checkpoint: Path, tmp_path: Path) -> dict[str, torch.Tensor]:
    """What torch's own single-process loader makes of the checkpoint."""
    dcp_to_torch_save(checkpoint, tmp_path / "torch.pt")
    state = torch.load(tmp_path / "torch.pt", weights_only=False)
    state = state["model"] if set(state) == {"model"} else state
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert sorted(found) == sorted(wanted)
    for name, tensor in wanted.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert raw(found[name]) == raw(tensor), name


def assert_merged(checkpoint: Path, tmp_path: Path) -> dict[str, torch.Tensor]:
    merge(checkpoint, tmp_path / "out", options=MergeOptions(verify=True))
    found = load_file(tmp_path / "out/model.safetensors")
    assert_same(found, loaded_by_torch(checkpoint, tmp_path))
    save_file(found, tmp_path / "library.safetensors", metadata={"format": "pt"})
    assert (tmp_path / "library.safetensors").read_bytes() == (tmp_path / "out/model.safetensors").read_bytes()
    return found


@pytest.mark.parametrize(
    ("ranks", "name"), [*(("two", name) for name in TWO), *(("four", name) for name in STRIDED)]
)
def test_merge_equals_torch_loader_and_safetensors_bytes(request, ranks, name, tmp_path):
    assert_merged(request.getfixturevalue(ranks) / name, tmp_path)


@pytest.mark.parametrize("name", ["odd", "fsdp2", "fsdp1_sharded_tensor", "run/optimizer_0"])
def test_merge_to_the_torch_format_equals_torch_loader(name, two, tmp_path):
    if name == "run/optimizer_0":
        with pytest.raises(CheckpointError, match="is an optimizer's checkpoint"):
            merge(two / name, tmp_path / "out")
    merge_fsdp_weights(str(two / name), str(tmp_path / "out"), safe_serialization=False)
    found = torch.load(tmp_path / "out/pytorch_model.bin", weights_only=True)
    dcp_to_torch_save(two / name, tmp_path / "torch.pt")
    (wanted,) = torch.load(tmp_path / "torch.pt", weights_only=False).values()
    assert_equal_trees(found, wanted)


def assert_equal_trees(found, wanted) -> None:
    assert type(found) is type(wanted)
    if isinstance(wanted, dict):
        assert found.keys() == wanted.keys()
        for key in wanted:
            assert_equal_trees(found[key], wanted[key])
    elif isinstance(wanted, list | tuple):
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            assert_equal_trees(one, other)
    elif isinstance(wanted, torch.Tensor):
        assert (found.dtype, found.shape, raw(found)) == (wanted.dtype, wanted.shape, raw(wanted))
    else:
        assert found == wanted


def test_torch_format_holds_dtypes_that_safetensors_lacks(tmp_path):
    state = {"w": values(3, 4, dtype=torch.complex128)}
    dcp.save({"model": state}, checkpoint_id=tmp_path / "ckpt", no_dist=True)
    with pytest.raises(CheckpointError, match="is complex128, which safetensors cannot hold"):
        merge(tmp_path / "ckpt", tmp_path / "out")
    merge(tmp_path / "ckpt", tmp_path / "out", options=MergeOptions(safe_serialization=False))
    found = torch.load(tmp_path / "out/pytorch_model.bin", weights_only=True)
    assert_same(found, state)


class Canary:
    """Unpickling this would create a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_value_that_would_run_code_is_left_out_and_refused_in_torch_format(tmp_path):
    state = {"w": values(2), "extra": Canary(tmp_path / "canary")}
    dcp.save({"model": state}, checkpoint_id=tmp_path / "ckpt", no_dist=True)
    result = merge(tmp_path / "ckpt", tmp_path / "out")
    assert result.skipped == ("model.extra",)
    with pytest.raises(CheckpointError, match="cannot be loaded without running code"):
        merge(tmp_path / "ckpt", tmp_path / "bin", options=MergeOptions(safe_serialization=False))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ckpt", "out"]


def test_file_per_tensor_and_several_threads_are_read(tmp_path):
    state = {f"w{n}": values(9, n + 1) for n in range(8)}
    for number, writer in enumerate([{"single_file_per_rank": False}, {"thread_count": 3}]):
        folder = tmp_path / f"ckpt{number}"
        dcp.save({"model": state}, storage_writer=dcp.FileSystemWriter(folder, **writer), no_dist=True)
        merge(folder, tmp_path / f"out{number}")
        assert_same(load_file(tmp_path / f"out{number}/model.safetensors"), state)


def merge_everywhere(folder: Path) -> str:
    merge_fsdp_weights(folder / "ckpt", folder / "out")
    assert (folder / "out/model.safetensors").is_file()
    return words_of(merge_fsdp_weights, folder / "missing", folder / "other")


def test_merge_fsdp_weights_in_a_job_merges_once_and_fails_everywhere(two_ranks: RankPool, tmp_path):
    dcp.save({"model": {"w": values(4, 4)}}, checkpoint_id=tmp_path / "ckpt", no_dist=True)
    first, second = two_ranks.run(merge_everywhere, tmp_path)
    assert_same(load_file(tmp_path / "out/model.safetensors"), {"w": values(4, 4)})
    assert first == second
    assert "missing does not exist" in first


def test_torch_format_is_read_back_before_the_checkpoint_is_removed(tmp_path):
    """As accelerate's --unsafe_serialization --remove_checkpoint_dir, but nothing goes that was not compared."""
    state = {"w": values(64, 3), "half": values(7, dtype=torch.bfloat16), "empty": values(0), "step": 3}
    options = MergeOptions(safe_serialization=False, remove_checkpoint_dir=True)
    for name in ("good", "damaged"):
        dcp.save({"model": state}, checkpoint_id=tmp_path / name, no_dist=True)
    (file,) = (tmp_path / "damaged").glob("*.distcp")
    content = file.read_bytes()
    place = content.index(raw(state["w"])[:64])
    file.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
    with pytest.raises(CheckpointError, match="do not match their checksum"):
        merge(tmp_path / "damaged", tmp_path / "bad", options=options)
    result = merge(tmp_path / "good", tmp_path / "out", options=options)
    assert (result.verified, result.removed) == (True, True)
    assert_equal_trees(torch.load(tmp_path / "out/pytorch_model.bin", weights_only=True), state)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["damaged", "out"]


def test_full_disk_is_a_checkpoint_error_in_the_torch_format_too(tmp_path, monkeypatch):
    """Torch's writer says it as a RuntimeError."""
    dcp.save({"model": {"w": values(64, 3)}}, checkpoint_id=tmp_path / "ckpt", no_dist=True)
    save = torch.save
    monkeypatch.setattr(torch, "save", lambda state, _: save(state, "/dev/full"))
    with pytest.raises(CheckpointError, match=r"merging .*ckpt into .*out failed: "):
        merge(tmp_path / "ckpt", tmp_path / "out", options=MergeOptions(safe_serialization=False))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ckpt"]


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
    raw = convert(numbers.view(torch.uint8).numpy().tobytes(), KINDS[names[0]], KINDS[names[1]], name="w")
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
        convert(largest, KINDS[source], KINDS[target], name="layer.w")


def weights() -> dict[str, torch.Tensor]:
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


@pytest.mark.parametrize("target", TORCH)
def test_merge_with_dtype_equals_torch_casts_and_leaves_other_types(target, tmp_path):
    dcp.save({"model": weights()}, checkpoint_id=tmp_path / "ckpt", no_dist=True)
    result = merge(tmp_path / "ckpt", tmp_path / "out", options=MergeOptions(dtype=target, verify=True))
    found = load_file(tmp_path / "out/model.safetensors")
    floats = {"big", "turned", "double", "half", "brain", "scalar", "empty"}
    for name, tensor in weights().items():
        wanted = tensor.to(TORCH[target]) if name in floats else tensor
        assert found[name].dtype == wanted.dtype, name
        assert raw(found[name]) == raw(wanted), name
    assert result.dtypes[str(TORCH[target]).removeprefix("torch.")] == len(floats)
    assert result.nbytes == (tmp_path / "out/model.safetensors").stat().st_size


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
