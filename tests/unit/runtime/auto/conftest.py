"""The hooks of one worker, in the process of the test."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fsdplaunch.config.environment import encode
from fsdplaunch.config.resolve import resolve
from fsdplaunch.config.schema.config import build_config
from fsdplaunch.runtime.auto import HookContext
from fsdplaunch.runtime.auto.install import hooks


@pytest.fixture
def hooked(tmp_path: Path) -> Iterator[None]:
    given = {
        ("distributed_type",): "FSDP",
        ("use_cpu",): True,
        ("num_processes",): 1,
        ("fsdp_config", "fsdp_version"): 2,
    }
    config = resolve(build_config(given))
    before = dict(os.environ)
    os.environ.update(encode(config))
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    context = HookContext(config, torch.device("cpu"), rank=0, size=1)
    context.ownership.ours = True
    with hooks(context):
        yield
    dist.destroy_process_group()
    os.environ.clear()
    os.environ.update(before)
