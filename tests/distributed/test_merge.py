"""Checkpoints written by real torch on gloo ranks, merged and compared bit for bit with torch's own loader."""

import json
import multiprocessing
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from fsdplaunch.checkpoint.merge import merge

TIMEOUT = 90


def run_ranks(world: int, job: Callable[[int, Path], None], folder: Path) -> None:
    """Run `job(world, folder)` on `world` gloo ranks and fail when one of them does."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed.fsdp", "torch.distributed.checkpoint"])
    ranks = [context.Process(target=_rank, args=(rank, world, job, folder), daemon=True) for rank in range(world)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(TIMEOUT)
    assert [rank.exitcode for rank in ranks] == [0] * world


def _rank(rank: int, world: int, job: Callable[[int, Path], None], folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    try:
        job(world, folder)
    finally:
        dist.destroy_process_group()


def values(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The same pseudo-random tensor on every rank."""
    count = torch.Size(shape).numel()
    return (torch.sin(torch.arange(count, dtype=torch.float64) * 1.7) * 100).to(dtype).reshape(shape)


def raw(tensor: torch.Tensor) -> bytes:
    """A tensor's bytes in row-major order."""
    plain = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1)
    return b"" if not plain.numel() else bytes(plain.view(torch.uint8).numpy())


def loaded_by_torch(checkpoint: Path, tmp_path: Path) -> dict[str, torch.Tensor]:
    """What torch's own single-process loader makes of the checkpoint."""
    dcp_to_torch_save(checkpoint, tmp_path / "torch.pt")
    return torch.load(tmp_path / "torch.pt", weights_only=False)["model"]


def assert_same(merged: Path, wanted: dict[str, torch.Tensor]) -> None:
    found = load_file(merged / "model.safetensors")
    assert sorted(found) == sorted(wanted)
    for name, tensor in wanted.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert raw(found[name]) == raw(tensor), name


def save_rows(world: int, folder: Path) -> None:
    mesh = init_device_mesh("cpu", (world,))
    rows = {f"rows{n}": distribute_tensor(values(n, 3), mesh, [Shard(0)]) for n in (1, 2, 4, 5, 8)}
    dcp.save({"model": rows}, checkpoint_id=folder / "ckpt")


@pytest.mark.parametrize("world", [2, 4])
def test_merge_of_row_shards_equals_the_full_tensors(world: int, tmp_path: Path) -> None:
    run_ranks(world, save_rows, tmp_path)
    result = merge(tmp_path / "ckpt", tmp_path / "out")
    assert_same(tmp_path / "out", {f"rows{n}": values(n, 3) for n in (1, 2, 4, 5, 8)})
    assert_same(tmp_path / "out", loaded_by_torch(tmp_path / "ckpt", tmp_path))
    assert result.tensors == 5
    assert result.dtypes == {"float32": 5}


def test_merge_never_imports_torch(tmp_path: Path) -> None:
    dcp.save({"model": {"w": values(4, 4)}}, checkpoint_id=tmp_path / "ckpt", no_dist=True)
    script = (
        "import json, sys; from pathlib import Path; from fsdplaunch.checkpoint.merge import merge\n"
        "merge(Path(sys.argv[1]), Path(sys.argv[2])); print(json.dumps(sorted(sys.modules)))"
    )
    run = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "ckpt"), str(tmp_path / "out")],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert not {"torch", "numpy", "safetensors", "pickle"} & set(json.loads(run.stdout))
    assert_same(tmp_path / "out", {"w": values(4, 4)})
