"""Put a whole program together: one of the frames, with what varies in it picked by chance.

In a frame `LOADER(data)` stands for a loader, `OPTIMIZER(parameters)` for an optimizer, with a schedule or not,
and `STEP(loss, optimizer)` for the lines of one step. ROWS, BATCH, WIDTH and EPOCHS are numbers.
"""

import random
import re
import textwrap

from random_frames import (
    adversaries,
    agents,
    batches,
    densities,
    factors,
    graphs,
    metric_learning,
    per_row_losses,
    reinforcement,
    sequences,
    several_losses,
    stops,
    structures,
    texts,
    trainers,
    training_ways,
    weights,
)
from random_parts.composing import Program

FRAMES: dict[str, str] = {}
for _group in (
    adversaries,
    agents,
    batches,
    densities,
    factors,
    graphs,
    metric_learning,
    per_row_losses,
    reinforcement,
    sequences,
    several_losses,
    stops,
    structures,
    texts,
    trainers,
    training_ways,
    weights,
):
    FRAMES |= _group.FRAMES
_HEAD = """
import copy, itertools, json, math, os, random, sys
from collections import OrderedDict, defaultdict, deque
from dataclasses import dataclass
import numpy as np
import torch, torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import *
torch.manual_seed({seed}); random.seed({seed}); np.random.seed({seed})
torch.set_default_dtype(torch.float64)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ROWS, BATCH, WIDTH, EPOCHS = {rows}, {batch}, {width}, 2
record = {{"losses": [], "valid": [], "steps": 0}}
class AverageMeter:
    def __init__(self): self.sum = self.count = self.avg = 0
    def update(self, value, n=1):
        self.sum += value * n; self.count += n; self.avg = self.sum / self.count
meter = AverageMeter()
def mlp(*sizes, act=nn.Tanh):
    layers = [(nn.Linear(a, b), act()) for a, b in zip(sizes[:-2], sizes[1:-1])]
    return nn.Sequential(*itertools.chain(*layers), nn.Linear(sizes[-2], sizes[-1]))
"""
_LOOSEN = """
def loosen(params):
    params = list(params)
    with torch.no_grad():
        for p in params: p.mul_(1 + 4e-16)
    return params
"""
_TAIL = """
record["meter"] = meter.avg
print()
print(json.dumps(record))
"""
_LOADERS = (
    "DataLoader({0}, batch_size=BATCH, shuffle=True)",
    "DataLoader({0}, BATCH, shuffle=True, drop_last=True)",
    "DataLoader({0}, BATCH, shuffle=True, generator=torch.Generator().manual_seed(3))",
    "DataLoader({0}, batch_size=BATCH)",
    "DataLoader({0}, BATCH, sampler=RandomSampler({0}))",
    "DataLoader({0}, batch_sampler=BatchSampler(RandomSampler({0}), BATCH, False))",
)
_OPTIMIZERS = (
    "optim.SGD({0}, lr=0.05)",
    "optim.SGD({0}, lr=0.02, momentum=0.9, weight_decay=1e-3)",
    "optim.Adam({0}, lr=3e-3)",
    "optim.AdamW({0}, lr=3e-3, weight_decay=0.05)",
    "optim.RMSprop({0}, lr=1e-3)",
    "optim.Adagrad({0}, lr=1e-2)",
)
_SCHEDULES = (
    "",
    "",
    "optim.lr_scheduler.CosineAnnealingWarmRestarts({0}, 2, 2)",
    "optim.lr_scheduler.LambdaLR({0}, lambda step: min(1.0, (step + 1) / 4))",
    "optim.lr_scheduler.MultiplicativeLR({0}, lambda step: 0.95)",
)
_STEPS = (
    """
{opt}.zero_grad()
{loss}.backward()
{opt}.step()
record["losses"].append({loss}.item())
""",
    """
{loss}.backward()
{opt}.step()
{opt}.zero_grad()
record["losses"].append({loss}.item())
""",
    """
{opt}.zero_grad()
{loss}.backward()
meter.update({loss}.item(), BATCH)
{opt}.step()
""",
    """
{opt}.zero_grad()
{loss}.backward()
record["valid"].append(nn.utils.clip_grad_norm_([*{params}], 0.5).item())
{opt}.step()
record["losses"].append({loss}.item())
""",
    """
{opt}.zero_grad()
{loss}.backward()
nn.utils.clip_grad_value_([*{params}], 0.05)
{opt}.step()
""",
    """
{loss} = {loss} / 2
{loss}.backward()
record["losses"].append({loss}.item())
record["steps"] += 1
if record["steps"] % 2 == 0:
    {opt}.step()
    {opt}.zero_grad()
""",
    """
({loss} / 2).backward()
record["steps"] += 1
if record["steps"] % 2 == 0:
    {opt}.step()
    {opt}.zero_grad()
meter.update({loss}.item())
""",
    """
if torch.isfinite({loss}):
    {opt}.zero_grad()
    {loss}.backward()
    {opt}.step()
    record["losses"].append({loss}.item())
""",
    """
{opt}.zero_grad()
{loss}.backward()
with torch.no_grad():
    for p in [*{params}]:
        if p.grad is not None:
            p.grad.add_(torch.randn_like(p.grad), alpha=1e-3)
{opt}.step()
record["losses"].append({loss}.item())
""",
)


def compose(seed: int) -> Program:
    """Return the program of a number: the frames come one after the other, and begin again with other choices."""
    chance = random.Random(seed)
    name = list(FRAMES)[seed % len(FRAMES)]
    batch = chance.choice([4, 8, 8, 12])
    rows, width = 4 * batch + chance.choice([0, 0, 0, batch // 2]), chance.choice([7, 12, 16])
    head = _HEAD.format(seed=seed, rows=rows, batch=batch, width=width)
    ways = {
        "LOADER": chance.choice(_LOADERS),
        "OPTIMIZER": chance.choice(_OPTIMIZERS),
        "SCHEDULE": chance.choice(_SCHEDULES),
        "STEP": chance.choice(_STEPS),
    }
    body = _filled(FRAMES[name], ways)
    loosened = ways | {"OPTIMIZER": ways["OPTIMIZER"].replace("{0}", "loosen({0})")}
    loose = _LOOSEN + _filled(FRAMES[name], loosened)
    parts = (name, f"{rows} rows by {batch}, width {width}", *(way for way in ways.values() if way))
    return Program(head + body + _TAIL, parts, head + loose + _TAIL)


def _filled(frame: str, ways: dict[str, str]) -> str:
    """Return a frame with the lines that stand for others replaced by these."""
    trained = dict(re.findall(r"^ *(\w+) = OPTIMIZER\((.*)\)$", frame, re.MULTILINE))
    lines: list[str] = []
    for line in frame.splitlines():
        indent, text = line[: len(line) - len(line.lstrip())], line.strip()
        if found := re.fullmatch(r"STEP\((\w+), (\w+)\)", text):
            lines += _indented(_step(ways, found[1], found[2], trained), indent)
            continue
        lines.append(_called(_called(line, "LOADER", ways), "OPTIMIZER", ways))
        if ways["SCHEDULE"] and (found := re.fullmatch(r"(\w+) = OPTIMIZER\(.*\)", text)):
            lines.append(f"{indent}{found[1]}_rates = {ways['SCHEDULE'].format(found[1])}")
    return "\n".join(lines)


def _step(ways: dict[str, str], loss: str, optimizer: str, trained: dict[str, str]) -> str:
    params = trained.get(optimizer, f'{optimizer}.param_groups[0]["params"]')
    text = ways["STEP"].strip("\n").format(loss=loss, opt=optimizer, params=params)
    if optimizer not in trained or not ways["SCHEDULE"]:
        return text
    return re.sub(rf"^( *){optimizer}\.step\(\)$", rf"\g<0>\n\1{optimizer}_rates.step()", text, flags=re.MULTILINE)


def _called(line: str, name: str, ways: dict[str, str]) -> str:
    """Return a line in which what a name is called with is given to the way that it stands for."""
    while (at := line.find(f"{name}(")) >= 0:
        depth, end = 0, at
        for end in range(at + len(name), len(line)):
            depth += {"(": 1, ")": -1}.get(line[end], 0)
            if depth == 0:
                break
        line = line[:at] + ways[name].format(line[at + len(name) + 1 : end]) + line[end + 1 :]
    return line


def _indented(text: str, indent: str) -> list[str]:
    return textwrap.indent(text, indent).splitlines()
