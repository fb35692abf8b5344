"""Saves that are killed at random moments: what loads afterwards is a whole checkpoint of the step it claims."""

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdplaunch
from tests.distributed.pool import RankError, RankPool
from tests.distributed.tiny import adamw, build, plugin

SEED = 20_240_607
MOMENTS = 30
"""Two of the campaign's moments: one rank killed beside training, and all while they save whole files."""


def fresh() -> tuple[nn.Module, Any]:
    model = build(width=64)
    return fsdplaunch.prepare(model, adamw(model.parameters()), plugin=plugin(fsdp_version=2))


def fill(model: nn.Module, optimizer: Any, step: int) -> None:
    """Give every tensor of the run the step as its value."""
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(step)
            optimizer.state[param] = {
                "step": torch.tensor(float(step)),
                "exp_avg": torch.full_like(param, step),
                "exp_avg_sq": torch.full_like(param, step),
            }


def save_for_ever(folder: str) -> None:
    """Save step after step until killed; the first is told as soon as it stands, later ones when they begin."""
    model, optimizer = fresh()
    for step in range(1, 10_000):
        fill(model, optimizer, step)
        if dist.get_rank() == 0:
            (Path(folder) / "begins").write_text(str(step))
            (Path(folder) / "begins").rename(Path(folder) / "begun")
        fsdplaunch.save_checkpoint(Path(folder) / "c", model=model, optimizer=optimizer, step=step)


def load_newest(folder: str) -> tuple[int, set[float]]:
    """The step the newest checkpoint claims, and every value in its model and optimizer."""
    model, optimizer = fresh()
    state = fsdplaunch.load_checkpoint(Path(folder) / "c", model=model, optimizer=optimizer)
    tensors = list(model.parameters())
    tensors += [optimizer.state[param][key] for param in tensors for key in ("exp_avg", "exp_avg_sq")]
    return state["step"], {value for each in tensors for value in each.full_tensor().unique().tolist()}


def kill_at_random(folder: Path, number: int) -> tuple[int, int]:
    """Run saves, kill, load; the step that was begun at the end and the one that was loaded."""
    chance = random.Random(SEED + number)
    env = {
        "FSDPLAUNCH_CHECKPOINT_KEEP_LAST": "2",
        "FSDPLAUNCH_CHECKPOINT_ASYNC": "true" if number % 2 else "false",
        "FSDP_STATE_DICT_TYPE": ("SHARDED_STATE_DICT", "FULL_STATE_DICT")[number % 3 == 2],
    }
    pool = RankPool(2)
    try:
        pool.run(os.getpid)  # the ranks are there
        victims = pool.pids() if chance.random() < 0.5 else [chance.choice(pool.pids())]
        pool.begin(save_for_ever, str(folder), env=env)
        while not (folder / "begun").exists() or int((folder / "begun").read_text()) < 2 + number % 2:
            time.sleep(0.005)
        time.sleep(chance.uniform(0, 1.5))
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(RankError):
            pool.wait()
        begun = int((folder / "begun").read_text())
        (step, values), _ = pool.run(load_newest, str(folder))
    finally:
        pool.stop()
    assert values == {float(step)}
    return begun, step


@pytest.mark.slow
@pytest.mark.skipif("FSDPLAUNCH_CAMPAIGN" not in os.environ, reason="minutes long: scripts/campaigns/kill_saves")
@pytest.mark.parametrize("number", range(MOMENTS))
def test_saves_killed_at_random_moments_leave_whole_checkpoints(tmp_path: Path, number: int) -> None:
    begun, step = kill_at_random(tmp_path, number)
    # A save that returned stands: the one before the last begun, or with async the one before that.
    assert begun - 1 - number % 2 <= step <= begun
