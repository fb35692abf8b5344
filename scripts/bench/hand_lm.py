"""What scripts/examples/plain_lm.py becomes where its author shards it by hand, for torchrun.

torchrun --nproc-per-node 2 hand_lm.py --steps 1
"""

import argparse
import itertools
from pathlib import Path

import torch
import torch.distributed as dist
from plain_lm import Transformer, Windows, loss_of, read_text
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler


@torch.no_grad()
def evaluate(model: nn.Module, windows: Windows) -> float:
    """Mean loss over all windows, of which each rank computes its part."""
    model.eval()
    loader = DataLoader(windows, batch_size=16, sampler=DistributedSampler(windows, shuffle=False))
    loss = torch.stack([loss_of(model, batch) for batch in loader]).mean()
    model.train()
    dist.all_reduce(loss)
    return loss.item() / dist.get_world_size()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=8, help="windows per rank and step")
    parser.add_argument("--output", type=Path, default=Path("lm.pt"))
    args = parser.parse_args()

    dist.init_process_group("gloo")
    is_first = dist.get_rank() == 0
    torch.manual_seed(0)
    training, evaluation = read_text([])
    model = Transformer()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(training, args.batch_size, sampler=DistributedSampler(training), drop_last=True)

    before = evaluate(model, evaluation)
    for batch in itertools.islice(loader, args.steps):
        loss = loss_of(model, batch)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    after = evaluate(model, evaluation)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    model_state, optimizer_state = get_state_dict(model, optimizer, options=options)
    if is_first:
        print(f"evaluation loss {before:.6f} before, {after:.6f} after {args.steps} steps")
        torch.save({"model": model_state, "optimizer": optimizer_state}, args.output)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
