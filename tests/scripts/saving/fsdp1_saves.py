"""Shard by FSDP1 in every way, and let rank 0 alone save, copy and read what all ranks gather after it."""

import copy
import os
import time

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.fsdp import (
    CPUOffload,
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP  # noqa: N817

from fsdplaunch.runtime.auto.state.rank0 import flat_states, serving

flat_states.SMALLEST = 64  # bytes from which on a tensor is fetched when it is written
serving.STILL_SECONDS = 0.3
rank = int(os.environ["RANK"])
dist.init_process_group("gloo")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide = nn.Linear(5, 11)
        self.narrow = nn.Linear(11, 5, bias=False)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return x + self.scale * self.narrow(self.wide(x).tanh())


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.blocks = nn.Sequential(Block(), Block())
        self.kept = nn.Linear(5, 5)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mean", torch.full((3,), 1 / 3))
        self.register_buffer("hidden", torch.ones(3), persistent=False)

    def forward(self, x):
        return self.head(self.blocks(self.embed(x)))


def sharded(**options):
    torch.manual_seed(0)
    net = Net()
    net.blocks[1] = checkpoint_wrapper(net.blocks[1])
    common = {"device_id": torch.device("cpu"), **options}
    for number in range(2):
        net.blocks[number] = FSDP(net.blocks[number], **common)
    return FSDP(net, ignored_modules=[net.kept], **common)


low = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, buffer_dtype=torch.bfloat16)
ways = {
    "shown": {"use_orig_params": True},
    "flat": {"use_orig_params": False},
    "low": {"use_orig_params": True, "mixed_precision": low, "sharding_strategy": ShardingStrategy.SHARD_GRAD_OP},
    "offloaded": {"use_orig_params": False, "cpu_offload": CPUOffload(offload_params=True)},
}
if dist.get_world_size() == 4:
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    hybrid = {"sharding_strategy": ShardingStrategy.HYBRID_SHARD, "device_mesh": mesh}
    ways |= {"hybrid": {"use_orig_params": True, **hybrid}, "hybrid flat": {"use_orig_params": False, **hybrid}}
models = {name: sharded(**options) for name, options in ways.items()}
optimizers = {name: torch.optim.AdamW(model.parameters(), lr=1e-2) for name, model in models.items()}
names = [name for name, _ in Net().named_parameters() if "kept" not in name]
order = [name for name, _ in Net().named_parameters()]


def backward(name):
    rows = torch.randint(0, 7, (4, 3))
    loss = models[name](rows).float().pow(2).mean()
    if rank == 0 and name == "low":
        torch.save(models[name].state_dict(), "between.pt")  # some units are gathered now
    loss.backward()


def step():
    for name in models:
        backward(name)
        optimizers[name].step()
        optimizers[name].zero_grad()


def save(name):
    model, optimizer = models[name], optimizers[name]
    began = time.monotonic()
    state = model.state_dict()
    torch.save({"model": state, "optimizer": optimizer.state_dict()}, f"{name}.pt")
    torch.save({key: value.cpu().clone() for key, value in model.module.state_dict().items()}, f"{name} copied.pt")
    copied = copy.deepcopy(model.state_dict())
    assert all(type(value) is torch.Tensor for value in copied.values())
    torch.save(copied, f"{name} deep.pt")
    torch.save(FSDP.optim_state_dict(model, optimizer), f"{name} named.pt")
    save_file({key: value for key, value in model.state_dict().items() if key != "head.weight"}, f"{name}.st")
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    torch.save(get_model_state_dict(model, options=options), f"{name} dcp.pt")
    torch.save(get_optimizer_state_dict(model, optimizer, options=options), f"{name} dcp named.pt")
    assert time.monotonic() - began < 20


def same(found, wanted):
    assert type(found) is type(wanted) or isinstance(found, torch.Tensor), (type(found), type(wanted))
    if isinstance(wanted, torch.Tensor):
        assert type(found) is torch.Tensor and found.dtype is wanted.dtype, (type(found), found.dtype)
        assert torch.equal(found, wanted), (found, wanted)
    else:
        assert found == wanted


def same_states(found, wanted):
    assert set(found) == set(wanted), set(found) ^ set(wanted)
    for key, values in wanted.items():
        assert set(found[key]) == set(values)
        for part, value in values.items():
            same(found[key][part], value)


def check(name, number):
    """Compare what rank 0 has saved with what all ranks gather."""
    model, optimizer = models[name], optimizers[name]
    full = model.state_dict()
    state = FSDP.optim_state_dict(model, optimizer)
    if rank:
        return
    both = torch.load(f"{name}.pt")
    for found in (both["model"], *(torch.load(f"{name} {kind}.pt") for kind in ("copied", "deep", "dcp"))):
        assert list(found) == list(full), (list(found), list(full))
        for key, value in full.items():
            same(found[key], value)
    if number == 1:  # FSDP1's own are two
        assert both["model"]["head.weight"].data_ptr() == both["model"]["embed.weight"].data_ptr()
    plain = Net()
    plain.load_state_dict(both["model"])
    for key, value in load_file(f"{name}.st").items():
        same(value, full[key])
    kept = both["optimizer"]["state"]
    if ways[name]["use_orig_params"]:
        torch.optim.AdamW(plain.parameters()).load_state_dict(both["optimizer"])
        kept = {order[number]: values for number, values in kept.items()}
    for found in (kept, torch.load(f"{name} named.pt")["state"], torch.load(f"{name} dcp named.pt")["state"]):
        same_states(found, state["state"])
    assert {int(values["step"]) for values in kept.values()} == {number}
    print("compared", name, len(full), len(kept))


for steps in (1, 2):
    step()
    for name in models:
        if rank == 0:
            save(name)
        if steps == 1:
            dist.barrier()  # else the others are in the next line's calls
    for name in models:
        check(name, steps)
between = models["low"].state_dict()  # all ranks
if rank == 0:
    found = torch.load("between.pt")
    assert list(found) == list(between) and found["embed.weight"].dtype is torch.float32
    held = models["shown"].state_dict()
step()
if rank == 0:
    try:
        held["blocks.0.wide.weight"].sum()
    except RuntimeError as error:
        print("held:", error)
with FSDP.state_dict_type(models["shown"], StateDictType.FULL_STATE_DICT):
    everywhere = models["shown"].state_dict() if rank == 0 else None or models["shown"].state_dict()
assert everywhere["embed.weight"].shape == (7, 5)
torch.save(optimizers["shown"].state_dict(), f"own-{rank}.pt")  # each rank its own shards
assert all(values["exp_avg"].dim() == 1 for values in torch.load(f"own-{rank}.pt")["state"].values())
for call in (
    lambda: FSDP.summon_full_params(models["shown"]),
    lambda: models["shown"].eval()(torch.ones(1, 3).long()),
):
    if rank == 0:
        began = time.monotonic()
        try:
            call()
        except Exception as error:
            print("alone:", time.monotonic() - began < 10, error)
        models["shown"].train()
    step()
