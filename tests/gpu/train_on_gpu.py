"""One run of a small model on this machine's GPUs, started once per rank; rank 0 prints what came of it as JSON.

Arguments: the plugin's fields as JSON, and a folder for checkpoints.
"""

import json
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import fsdplaunch
from tests.distributed.tiny import adamw, batch, build, loss_of, mean_over_ranks, my_part

STEPS = 10
HALF = STEPS // 2


def losses(model: Any, optimizer: Any, first: int, steps: int, *, whole: bool) -> list[float]:
    found = []
    for step in range(first, first + steps):
        ids = batch(step).cuda()
        loss = loss_of(model, ids if whole else my_part(ids))
        loss.backward()
        (
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            if whole
            else fsdplaunch.clip_grad_norm_(model, 0.5)
        )
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item() if whole else mean_over_ranks(loss))
    return found


def fresh(fields: dict[str, Any], seed: int) -> tuple[Any, Any]:
    model = build(seed)
    optimizer = adamw(model.parameters())
    plugin = fsdplaunch.FullyShardedDataParallelPlugin(**fields)
    model, optimizer = fsdplaunch.prepare(model, optimizer, plugin=plugin)
    return model, optimizer


def main() -> None:
    fields, folder = json.loads(sys.argv[1]), sys.argv[2]
    plain = build(0).cuda()
    alone = losses(plain, adamw(plain.parameters()), 0, STEPS, whole=True)
    model, optimizer = fresh(fields, 0)
    sharded = losses(model, optimizer, 0, HALF, whole=False)
    fsdplaunch.save_checkpoint(folder, model=model, optimizer=optimizer, step=HALF)
    sharded += losses(model, optimizer, HALF, STEPS - HALF, whole=False)
    again, its_optimizer = fresh(fields, 5)
    fsdplaunch.load_checkpoint(folder, model=again, optimizer=its_optimizer)
    resumed = losses(again, its_optimizer, HALF, STEPS - HALF, whole=False)
    param = next(again.parameters())
    local = param.to_local() if isinstance(param, DTensor) else param
    if dist.get_rank() == 0:
        result = {"alone": alone, "sharded": sharded, "resumed": resumed, "device": local.device.type}
        print(json.dumps(result | {"backend": str(dist.get_backend_config()), "pinned": local.is_pinned()}))


main()
