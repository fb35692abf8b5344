"""Generated tensors, meshes and placements, written by real torch on four ranks and merged bit for bit."""

import math
import random
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from fsdplaunch.checkpoint.merge.merge import MergeOptions, merge
from tests.distributed.pool import RankPool

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.bool),
        *(torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32),
        *(torch.float8_e4m3fn, torch.float8_e5m2),
    )
}
MESHES: dict[tuple[int, ...], DeviceMesh] = {}

Spec = tuple[tuple[int, ...], tuple[int | None, ...], list[int], str, bool]


@st.composite
def specs(draw) -> Spec:
    """A mesh, for each of its dimensions what it cuts, a shape, a dtype, and whether storage is transposed."""
    mesh = draw(st.sampled_from([(4,), (2, 2), (4, 1), (1, 4)]))
    shape = draw(st.lists(st.integers(0, 9), max_size=4))
    cuts = [None, *range(len(shape))]
    placed = tuple(draw(st.sampled_from(cuts)) for _ in mesh)
    return mesh, placed, shape, draw(st.sampled_from(sorted(DTYPES))), draw(st.booleans())


def content(spec: Spec, number: int) -> torch.Tensor:
    """The whole tensor, the same on every rank."""
    _, _, shape, dtype, turned = spec
    count = math.prod(shape) * DTYPES[dtype].itemsize
    raw = random.Random(number).randbytes(count)
    if dtype == "bool":
        raw = bytes(value & 1 for value in raw)
    flat = torch.frombuffer(bytearray(raw or b"\0" * 16), dtype=torch.uint8)[:count].view(DTYPES[dtype])
    if turned and len(shape) > 1:
        return flat.reshape(shape[::-1]).permute(*range(len(shape))[::-1])
    return flat.reshape(shape)


def write(specs: list[Spec], folder: str) -> None:
    state = {}
    for number, spec in enumerate(specs):
        mesh = MESHES.get(spec[0]) or MESHES.setdefault(spec[0], init_device_mesh("cpu", spec[0]))
        placements = [Replicate() if dim is None else Shard(dim) for dim in spec[1]]
        state[f"t{number}"] = distribute_tensor(content(spec, number), mesh, placements, src_data_rank=None)
    dcp.save({"model": state}, checkpoint_id=Path(folder))
    dist.barrier()


@settings(max_examples=4, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(drawn=st.lists(specs(), min_size=20, max_size=30))
def check(four_ranks: RankPool, tmp_path: Path, drawn: list[Spec]) -> None:
    for name in ("ckpt", "out"):
        shutil.rmtree(tmp_path / name, ignore_errors=True)
    four_ranks.run(write, drawn, str(tmp_path / "ckpt"))
    merge(tmp_path / "ckpt", tmp_path / "out", options=MergeOptions(verify=True))
    found = load_file(tmp_path / "out/model.safetensors")
    assert len(found) == len(drawn)
    for number, spec in enumerate(drawn):
        tensor, expected = found[f"t{number}"], content(spec, number).contiguous()
        assert (tensor.dtype, tensor.shape) == (expected.dtype, expected.shape), spec
        assert tensor.reshape(-1).view(torch.uint8).equal(expected.reshape(-1).view(torch.uint8)), spec


def test_generated_tensors_are_merged_bit_for_bit(four_ranks: RankPool, tmp_path: Path) -> None:
    check(four_ranks, tmp_path)
