"""Scripts the tests launch: each is a text, written to a file by the test."""

ALL_REDUCE = """
import os, socket, sys, torch, torch.distributed as dist
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
total = torch.full((4,), float(rank + 1))
dist.all_reduce(total)
line = f"rank {rank} of {dist.get_world_size()} on {socket.gethostname()} sum {total[0].item()} {sys.argv[1:]!r}"
print(line, flush=True)
first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
if str(rank) in (os.environ.get("FAIL"), first and os.environ.get("FAIL_ONCE")):
    raise ValueError("no such luck")
dist.barrier()
dist.destroy_process_group()
"""

SAVES_ON_TERM = """
import json, os, pathlib, signal, sys, time, torch, torch.distributed as dist
torch.set_num_threads(1)
got = []
for name in ("SIGTERM", "SIGUSR1", "SIGINT"):
    signal.signal(getattr(signal, name), lambda number, frame: got.append(number))
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
state = pathlib.Path(os.environ["STATE"] + os.environ.get("SLURM_ARRAY_TASK_ID", ""))
step = json.loads(state.read_text())["step"] if state.exists() else 0
if rank == 0:
    print(f"start at step {step} of world {world}", flush=True)
while step < int(os.environ.get("STEPS", "100000")):
    time.sleep(0.1)
    step += 1
    stop = torch.tensor([len(got)])
    dist.all_reduce(stop)
    if rank == 0 and (stop.item() or os.environ.get("EVERY")):
        part = state.with_suffix(".part")
        part.write_text(json.dumps({"step": step, "world": world}))
        part.replace(state)
    if stop.item():
        if rank == 0:
            print(f"saved at step {step}", flush=True)
        dist.barrier()
        sys.exit(0)
if rank == 0:
    print(f"done at step {step}", flush=True)
dist.barrier()
dist.destroy_process_group()
"""
"""Counts steps; on a signal all ranks leave at the same step, which rank 0 has saved. EVERY: saves every step."""

TRAINS = """
import os, time, torch, torch.distributed as dist
import fsdplaunch
torch.set_num_threads(1)
model = torch.nn.Linear(6, 8, bias=False)
torch.nn.init.ones_(model.weight)
model, optimizer = fsdplaunch.prepare(model, torch.optim.SGD(model.parameters(), lr=2**-10))
step, state = 0, {"model": model, "optimizer": optimizer}
try:
    step = fsdplaunch.load_checkpoint(**state)["step"]
except FileNotFoundError:
    pass
wrong = (model.weight.to_local() != 1 - step / 1024).sum()
dist.all_reduce(wrong)
if dist.get_rank() == 0:
    with open("starts", "a") as starts:
        print(step, dist.get_world_size(), wrong.item(), file=starts)
while step < int(os.environ.get("STEPS", "100000")) and not fsdplaunch.should_stop():
    time.sleep(0.05)
    optimizer.zero_grad()
    model(torch.ones(1, 6)).sum().backward()
    optimizer.step()
    step += 1
    if step % 5 == 0:
        fsdplaunch.save_checkpoint(step=step, **state)
fsdplaunch.save_checkpoint(step=step, **state)
if dist.get_rank() == 0:
    print("saved at step", step)
"""
"""A sharded model: each step takes 1/1024 from every weight, so that every start can tell what was loaded."""
