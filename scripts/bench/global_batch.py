#!/usr/bin/env python3
"""What keeping the global batch costs a small step, against a script that cuts its rows itself.

The same training loop in turn: launched with --keep-global-batch, and under torchrun, where it shards by
`fully_shard` and takes its rank's rows. Prints each round's median milliseconds of a step, and the median ratio.

    .venv/bin/python scripts/bench/global_batch.py [--rounds 5] [--ranks 2] [--memory]

With --memory it prints what steps of a small model with large outputs add to the peak memory of rank 0: in one
process, over the ranks with a share of the rows each, and over the ranks with the global batch kept.
"""

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

SCRIPT = """
import os, statistics, sys, time
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
by_hand = sys.argv[1:] == ["by-hand"]
torch.manual_seed(0)
model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)) for _ in range(4)])
if by_hand:
    dist.init_process_group("gloo")
    for block in model:
        fully_shard(block)
    fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
data = torch.randn(512, 64)
times = []
for number in range(300):
    began = time.perf_counter()
    x = data[number * 32 % 512 :][:32]
    if by_hand:
        x = x.chunk(dist.get_world_size())[dist.get_rank()]
    loss = model(x).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    loss.item()
    times.append(time.perf_counter() - began)
if os.environ["RANK"] == "0":
    print("ms", 1e3 * statistics.median(times[50:]))
if by_hand:
    dist.destroy_process_group()
"""

OUTPUTS = """
import os, resource, torch
from torch import nn
rows = int(os.environ["ROWS"])
torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(8192, 64), nn.Linear(64, 8192))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
words = torch.randint(8192, (rows, 128))
for number in range(4):
    logits = model(words)
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), words.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
if os.environ.get("RANK", "0") == "0":
    print("peak", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
"""


def megabytes(command: list[str], folder: str, rows: int) -> float:
    """Run the script with large outputs once; return its first rank's peak."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "ROWS": str(rows)}
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=True)
    found = re.search(r"^peak (\S+)$", done.stdout, re.MULTILINE)
    assert found, done.stdout + done.stderr
    return float(found[1])


def memory(folder: str, launch: list[str], ranks: int) -> None:
    """Print peaks above those of the same script with one row for each rank."""
    script = Path(folder) / "outputs.py"
    script.write_text(OUTPUTS)
    logits = 64 * 128 * 8192 * 4 / 1e6
    print(f"logits of 64 rows: {logits:.0f} MB")
    ways = {
        "one process, 64 rows": ([sys.executable], 64, 1),
        f"{ranks} ranks, {64 // ranks} rows each": (launch, 64 // ranks, 1),
        f"{ranks} ranks, 64 rows kept": ([*launch, "--keep-global-batch"], 64, ranks),
    }
    for name, (command, rows, fewest) in ways.items():
        few, many = (megabytes([*command, str(script)], folder, each) for each in (fewest, rows))
        print(f"{name}: {many - few:.0f} MB")


def milliseconds(command: list[str], folder: str) -> float:
    """Run the script once; return its median step."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=True)
    found = re.search(r"^ms (\S+)$", done.stdout, re.MULTILINE)
    assert found, done.stdout + done.stderr
    return float(found[1])


def main() -> None:
    """Measure both in turn."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--memory", action="store_true")
    args = parser.parse_args()
    programs = Path(sys.executable).parent
    ranks, ratios = str(args.ranks), []
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "train.py"
        script.write_text(SCRIPT)
        launch = [str(programs / "fsdplaunch"), "launch", "--cpu", "--num-processes", ranks]
        if args.memory:
            memory(folder, launch, args.ranks)
            return
        kept = [*launch, "--keep-global-batch", script]
        by_hand = [programs / "torchrun", "--standalone", "--nproc-per-node", ranks, script, "by-hand"]
        for number in range(args.rounds):
            ours, theirs = (milliseconds([str(each) for each in command], folder) for command in (kept, by_hand))
            ratios.append(ours / theirs)
            print(f"round {number + 1}: kept {ours:.1f} ms, by hand {theirs:.1f} ms, {ratios[-1]:.3f}", flush=True)
    print(f"median ratio {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})")


if __name__ == "__main__":
    main()
