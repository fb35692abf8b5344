"""Put a script together, of parts that chance picks.

A script trains for two epochs in fp64, saves what it trained, and prints what it noted as JSON. Written for one
process, or for DistributedDataParallel.
"""

import random
import textwrap
from dataclasses import dataclass

from random_parts import around_steps, in_steps
from random_parts.data import LOADERS, TASKS
from random_parts.models_of_images import IMAGES
from random_parts.models_of_rows import FEATURES, REGRESS
from random_parts.models_of_sequences import SERIES, TOKENS
from random_parts.training import LOSSES, OPTIMIZERS, SCHEDULES

ADDITIONS = in_steps.ADDITIONS | around_steps.ADDITIONS
_MODELS = {"features": FEATURES, "regress": REGRESS, "images": IMAGES, "tokens": TOKENS, "padded": TOKENS}
_MODELS |= {"series": SERIES}
_KINDS = {"tokens": "sequences", "padded": "sequences", "regress": "numbers"}
_WAYS = ("plain", "plain", "plain", "accumulated", "closure", "sharpness")
_WRAPPERS = ("", "find_unused_parameters=True", "broadcast_buffers=False", "gradient_as_bucket_view=True")
_HEAD = """
import copy, itertools, json, math, os, random
import numpy as np
import torch, torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import *
torch.manual_seed({seed}); random.seed({seed}); np.random.seed({seed})
torch.set_default_dtype(torch.float64)
device = torch.device("cpu")
ROWS, BATCH, EPOCHS, DROP = {rows}, {batch}, 2, True
STEPS = EPOCHS * (ROWS // BATCH)
"""
_GROUP = """
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data.distributed import DistributedSampler
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
"""
_DIVIDED = """
data = TensorDataset(X, Y)
sampler = DistributedSampler(data, shuffle={shuffle})
loader = DataLoader(data, batch_size=BATCH, sampler=sampler)
"""
_SHARPNESS = """
with torch.no_grad():
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    moves = [(p, p.grad * 0.05 / (norm + 1e-12)) for p in model.parameters() if p.grad is not None]
    for p, move in moves: p.add_(move)
optimizer.zero_grad()
criterion(run(x), y).backward()
with torch.no_grad():
    for p, move in moves: p.sub_(move)
"""
_TAIL = """
model.eval()
with torch.no_grad():
    record["outputs"] = unwrapped(X).flatten()[:40].tolist()
save(unwrapped.state_dict(), "model.pt")
save(optimizer.state_dict(), "optimizer.pt")
print(json.dumps(record))
"""


@dataclass(frozen=True, slots=True)
class Program:
    """A script.

    Attributes:
        text: Its source.
        parts: What it is made of, for people.
        loosened: The same, whose weights are changed in their last digits before the first step.
    """

    text: str
    parts: tuple[str, ...]
    loosened: str


def compose(seed: int, *, for_ranks: bool) -> Program:
    """Return the script of a number.

    Args:
        seed: Decides it, and what it draws.
        for_ranks: Whether it is one for DistributedDataParallel.
    """
    chance = random.Random(seed)
    task = chance.choice(list(TASKS))
    models = [name for name in _MODELS[task] if name != "lazy" or not for_ranks]
    model, loss = chance.choice(models), chance.choice(LOSSES[_KINDS.get(task, "classes")]).strip()
    loader, optimizer = chance.choice(list(LOADERS)), chance.choice(OPTIMIZERS).strip()
    schedule, way = chance.choice(SCHEDULES), chance.choice(_WAYS)
    names = chance.sample(sorted(ADDITIONS), chance.choice([0, 1, 2, 2, 3, 3, 4]))
    batch = chance.choice([4, 6, 8, 8])
    head = _HEAD.format(seed=seed, rows=2 * batch * chance.choice([2, 3]), batch=batch)
    wrapper = chance.choice(_WRAPPERS)
    text = [head, _GROUP if for_ranks else "", TASKS[task]]
    text += [_DIVIDED.format(shuffle=chance.random() < 0.7) if for_ranks else LOADERS[loader]]
    text += [_MODELS[task][model], "record = {'norms': [], 'valid': []}", f"def criterion(out, y): return {loss}"]
    text += ["def save(state, path):", f"    if {'rank == 0' if for_ranks else 'True'}: torch.save(state, path)"]
    text += [*_lines(names, "made"), "model = model.to(device)", "unwrapped = model"]
    text += [f"model = DistributedDataParallel(model, {wrapper})"] if for_ranks else []
    text += [f"optimizer = {optimizer}", schedule, "run = lambda x: model(x)", *_lines(names, "moved")]
    loop = ["step = 0", "for epoch in range(EPOCHS):", "    sampler.set_epoch(epoch)" if for_ranks else ""]
    loop += ["    for index, (x, y) in enumerate(loader):", _indented(_step(names, way, schedule), 8)]
    loop += [_indented(_lines(names, "epoch")), *_lines(names, "end"), _TAIL]
    parts = (task, model, loss, wrapper if for_ranks else loader, optimizer, schedule, way, *names)
    whole = [*text, "model.train()", *loop, "dist.destroy_process_group()" if for_ranks else ""]
    loose = [*text, "with torch.no_grad():", "    for p in model.parameters(): p.mul_(1 + 4e-16)", "model.train()"]
    return Program(_joined(whole, for_ranks), parts, _joined([*loose, *loop], for_ranks))


def _joined(lines: list[str], for_ranks: bool) -> str:
    text = "\n".join(line for line in lines if line.strip())
    return (
        text.replace('state = torch.load("ckpt', 'dist.barrier(); state = torch.load("ckpt') if for_ranks else text
    )


def _step(names: list[str], way: str, schedule: str) -> list[str]:
    """Return the lines of one step."""
    before = ["x, y = x.to(device), y.to(device)", *_lines(names, "batch")]
    forward = ["out = run(x)", *_lines(names, "out"), "loss = criterion(out, y)", *_lines(names, "loss")]
    after = [*_lines(names, "grads"), "optimizer.step()", *_lines(names, "stepped")]
    after += ["schedule.step()"] if schedule else []
    clear = "optimizer.zero_grad()"
    if way == "accumulated":
        stepping = "if index % 2 == 1:\n" + _indented([*after, clear])
        return [*before, *forward, "(loss / 2).backward()", stepping, "step += 1"]
    if way == "closure":
        closure = "def closure():\n" + _indented([clear, *forward, "loss.backward()", "return loss"])
        return [
            *before,
            closure,
            "optimizer.step(closure)",
            *after[after.index("optimizer.step()") + 1 :],
            "step += 1",
        ]
    first = [*forward, clear, "loss.backward()", *([_SHARPNESS] if way == "sharpness" else [])]
    return [*before, *first, *after, "step += 1"]


def _lines(names: list[str], place: str) -> list[str]:
    return [ADDITIONS[name][place] for name in names if place in ADDITIONS[name]]


def _indented(lines: list[str], by: int = 4) -> str:
    return textwrap.indent("\n".join(line.strip("\n") for line in lines), " " * by)
