"""Which GPU a script sees that takes its way for one process, and the process group of all ranks."""

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fsdplaunch.runtime.auto.model.adopt_models import set_gpu
from fsdplaunch.runtime.device import see_own_gpu


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"LOCAL_RANK": "3"}, ("0", "3")),
        ({"LOCAL_RANK": "1", "CUDA_VISIBLE_DEVICES": "4,6"}, ("0", "6")),
        ({"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": "GPU-1a"}, ("0", "GPU-1a")),
        ({"LOCAL_RANK": "2", "CUDA_VISIBLE_DEVICES": "0"}, ("2", "0")),
    ],
)
def test_script_for_one_gpu_sees_its_own_as_number_0(
    monkeypatch: pytest.MonkeyPatch, before: dict[str, str], after: tuple[str, str]
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name, value in before.items():
        monkeypatch.setenv(name, value)
    see_own_gpu()
    assert (os.environ["LOCAL_RANK"], os.environ["CUDA_VISIBLE_DEVICES"]) == after
    os.environ.pop("CUDA_VISIBLE_DEVICES")


ON_GPUS = """
import torch
import torch.distributed as dist
from fsdplaunch.config.schema.config import Config
from fsdplaunch.config.schema.launch_sections import LaunchSection
from fsdplaunch.runtime import device
from torch.distributed.device_mesh import init_device_mesh

init = dist.init_process_group

def init_on_gloo(backend, *, timeout, device_id):  # no GPU is at hand
    init("gloo", timeout=timeout, store=dist.HashStore(), rank=0, world_size=1)
    dist.group.WORLD.bound_device_id = device_id

dist.init_process_group = init_on_gloo
device._BACKENDS = "gloo"
device.join_group(Config(launch=LaunchSection(process_group_timeout_seconds=77)), torch.device("cuda", 0))
mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp_replicate", "dp_shard"))
axes = [mesh.get_group(axis) for axis in mesh.mesh_dim_names] + [dist.new_group([0])]
print([each._get_backend(torch.device("cpu")).options._timeout.total_seconds() for each in axes])
print(dist.group.WORLD.bound_device_id, dist.get_backend())
"""


def test_groups_of_gpus_have_the_timeout_no_bound_device_and_torchruns_name() -> None:
    done = subprocess.run([sys.executable, "-c", ON_GPUS], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == ["[77.0, 77.0, 77.0]", "None nccl"], done.stderr


ON_FAKE_GPUS = """
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from fsdplaunch.runtime.auto.model.adopt_models import OwnGpu

said, own = torch.device("cuda:0"), torch.device("cuda:1")
with FakeTensorMode(allow_non_fake_inputs=True), OwnGpu(said, own):
    x = torch.ones(2, 3)
    moved = [x.to("cuda:0"), x.to(said), x.to(0), x.to(device=0), x.cuda(0), torch.zeros(2, device="cuda:0")]
    print({str(each.device) for each in moved})
    print(*(str(x.to(name).device) for name in ("cpu", "cuda:1", "cuda:2")), *x.sum(0).shape)
"""


def test_gpu_that_a_script_names_by_a_number_is_each_workers_own() -> None:
    done = subprocess.run([sys.executable, "-c", ON_FAKE_GPUS], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == ["{'cuda:1'}", "cpu cuda:1 cuda:2 3"], done.stderr


@pytest.mark.parametrize(("own", "named", "set_to"), [("cuda:3", 0, "cuda:3"), ("cpu", 0, "0")])
def test_gpu_that_a_script_sets_is_each_workers_own(own: str, named: int, set_to: str) -> None:
    found: list[str] = []
    context: Any = SimpleNamespace(device=torch.device(own))
    set_gpu(lambda device: found.append(str(device)), context, named)
    assert found == [set_to]
