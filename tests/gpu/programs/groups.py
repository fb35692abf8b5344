"""Groups beside the run's own: a mesh of two axes, gloo for some ranks, and what the backend is called."""

import json
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

dist.barrier()
on_gpu = torch.cuda.is_available()
mesh = init_device_mesh("cuda" if on_gpu else "cpu", (1, dist.get_world_size()), mesh_dim_names=("one", "other"))
value = torch.ones(2, device="cuda" if on_gpu else "cpu")
dist.all_reduce(value, group=mesh["other"].get_group())
pair = dist.new_group([0, 1], backend="gloo", timeout=timedelta(seconds=30))
if dist.get_rank() < 2:
    sent = torch.full((3,), float(dist.get_rank()))
    dist.all_reduce(sent, group=pair)
    assert sent.tolist() == [1.0] * 3
dist.barrier()
if dist.get_rank() == 0:
    backend = dist.get_backend()
    print(json.dumps({"sum": value.tolist(), "backend": backend, "world": dist.get_world_size()}))
