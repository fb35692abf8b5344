"""Shard by hand, with both versions, and let rank 0 alone save by every call that people write."""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from huggingface_hub import save_torch_model, save_torch_state_dict
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
)
from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.utils._pytree import tree_leaves, tree_map

from fsdplaunch.runtime.collectives import waits

waits.NOTICE_SECONDS, waits.CONFIRM_SECONDS = 0.3, 0.3
waits.STILL_SECONDS, waits.PERIOD_SECONDS = 0.3, 0.1
rank = int(os.environ["RANK"])
dist.init_process_group("gloo")
torch.manual_seed(0)


def build():
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 33), nn.Tanh(), nn.Linear(33, 8)) for _ in range(2)))


model, frozen = build(), build()
torch.manual_seed(rank)
flat = build()
flat[1] = FullyShardedDataParallel(flat[1], use_orig_params=True, sync_module_states=True)
flat = FullyShardedDataParallel(
    flat, use_orig_params=True, sync_module_states=True, cpu_offload=CPUOffload(offload_params=True)
)
with FullyShardedDataParallel.summon_full_params(flat):
    first = torch.cat([value.detach().flatten() for value in flat.parameters()])
firsts = [torch.empty_like(first) for _ in range(2)]
dist.all_gather(firsts, first)
assert torch.equal(*firsts)
for block in model:
    fully_shard(block)
fully_shard(model)
for value in frozen[0].parameters():
    value.requires_grad_(False)
whole = {"use_orig_params": True, "sharding_strategy": ShardingStrategy.NO_SHARD}
frozen[0] = FullyShardedDataParallel(frozen[0], **whole)
frozen = FullyShardedDataParallel(frozen, **whole)
trained = [value for each in (model, flat, frozen) for value in each.parameters() if value.requires_grad]
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
others = torch.optim.SGD([value for value in trained if not hasattr(value, "full_tensor")], lr=1e-2)
options = StateDictOptions(full_state_dict=True, cpu_offload=True, broadcast_from_rank0=True)  # as accelerate


def step():
    for each in (model, flat, frozen):
        each(torch.randn(4, 8)).pow(2).mean().backward()
    for each in (optimizer, others):
        each.step()
        each.zero_grad()


def local(value):
    return value.to_local() if hasattr(value, "to_local") else value


def refused(name, call, go_on=step):
    """Let rank 0 alone make a call that needs all ranks; the others go on."""
    if rank == 0:
        began = time.monotonic()
        try:
            call()
        except (RuntimeError, ValueError) as error:
            print(name, "at once:" if time.monotonic() - began < 20 else "late:", error)
    go_on()


def evaluate():
    model.eval()
    with torch.no_grad():
        found = model(torch.ones(3, 8))
    model.train()
    return found


for folder in ("hub", "hub-of-all"):
    Path(folder).mkdir(exist_ok=True)
refused("FSDP1, early", flat.state_dict, go_on=lambda: None)
refused("early", lambda: torch.save(model.state_dict(), "never.pt"))
refused("shards", lambda: dcp.load({"model": model.state_dict()}, checkpoint_id="never"))
if rank == 0:
    alone = evaluate()
together = evaluate()
if rank == 0:
    print("evaluated alone:", torch.equal(alone, together))
    both = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save([both], "both.pt")
    save_file(model.state_dict(), "file.safetensors")
    save_torch_model(model, "hub", max_shard_size="3KB")
    torch.save({name: value.full_tensor().cpu() for name, value in model.state_dict().items()}, "gathered.pt")
    torch.save(get_model_state_dict(model, options=options), "dcp.pt")
    torch.save(get_optimizer_state_dict(model, optimizer, options=options), "dcp-optimizer.pt")
    torch.save(get_state_dict(model, optimizer, options=options), "dcp-both.pt")
    print("not sharded:", len(frozen.state_dict()))
full, of_optimizer = get_state_dict(model, optimizer, options=options)
save_torch_state_dict(model.state_dict(), "hub-of-all")
torch.save(model.state_dict(), f"own-{rank}.pt")  # each rank its shards
torch.save({name: value.detach().cpu().clone() for name, value in model.named_parameters()}, "one-of-all.pt")
save_file(model.state_dict(), "one-of-all.safetensors")
kept = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
dcp.save(kept, checkpoint_id="sharded")
found = tree_map(lambda value: torch.zeros_like(value) if isinstance(value, torch.Tensor) else value, kept)
dcp.load(found, checkpoint_id="sharded")
for one, other in zip(tree_leaves(found), tree_leaves(kept), strict=True):
    assert torch.equal(*map(local, (one, other))) if isinstance(one, torch.Tensor) else one == other
if rank == 0:
    [both] = torch.load("both.pt")
    pieces = sorted(Path("hub").glob("*.safetensors"))
    assert len(pieces) > 1
    for found in (
        both["model"],
        load_file("file.safetensors"),
        {name: value for piece in pieces for name, value in load_file(piece).items()},
        load_file("hub-of-all/model.safetensors"),
        torch.load("gathered.pt"),
        torch.load("dcp.pt"),
        torch.load("dcp-both.pt")[0],
    ):
        assert found.keys() == full.keys()
        assert all(type(found[name]) is torch.Tensor and torch.equal(found[name], full[name]) for name in full)
    for found in (torch.load("dcp-optimizer.pt"), torch.load("dcp-both.pt")[1]):
        for number, (name, state) in enumerate(of_optimizer["state"].items()):
            assert torch.equal(found["state"][name]["exp_avg"], state["exp_avg"])
            assert torch.equal(both["optimizer"]["state"][number]["exp_avg"], state["exp_avg"])
    print("compared", len(full), len(of_optimizer["state"]))
