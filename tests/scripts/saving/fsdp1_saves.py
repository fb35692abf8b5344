"""Shard by FSDP1, and let rank 0 alone make calls that all ranks must make: each is an error at its line, soon."""

import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP  # noqa: N817

rank = int(os.environ["RANK"])
dist.init_process_group("gloo")
torch.manual_seed(0)
model = FSDP(nn.Sequential(nn.Linear(5, 11), nn.Tanh(), nn.Linear(11, 5)), use_orig_params=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)


def step():
    model.train()
    model(torch.ones(3, 5)).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


step()
for name, call in {
    "model": model.state_dict,
    "module": model.module.state_dict,
    "optimizer": optimizer.state_dict,
    "named": lambda: FSDP.optim_state_dict(model, optimizer),
    "dcp": lambda: get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)),
    "summoned": lambda: FSDP.summon_full_params(model).__enter__(),
    "evaluated": lambda: model.eval()(torch.ones(1, 5)),
}.items():
    if rank == 0:
        began = time.monotonic()
        try:
            call()
        except Exception as error:
            print(
                name,
                time.monotonic() - began < 10,
                "on rank 0 only" in str(error),
                "fsdp1_saves.py:" in str(error),
            )
    step()
full = model.state_dict()
moments = FSDP.optim_state_dict(model, optimizer)
if rank == 0:
    print(len(full), len(moments["state"]), full["0.weight"].shape[0])
