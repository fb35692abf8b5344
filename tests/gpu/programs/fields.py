"""One run of a small model, prepared and alone, started once per rank; rank 0 prints what came of it as JSON.

The configuration of the launch says how the model is sharded. Argument: a folder for checkpoints.
"""

import json
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import fsdplaunch
from tests.distributed.tiny import TinyLM, adamw, batch, build, loss_of, mean_over_ranks, my_part

STEPS = 10
HALF = STEPS // 2
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class WithDropout(TinyLM):
    """The tiny model, with draws in its pass that a resumed run has to repeat."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(super().forward(ids), 0.1, self.training)


def losses(model: Any, optimizer: Any, first: int, steps: int, *, whole: bool) -> list[float]:
    found = []
    for step in range(first, first + steps):
        ids = batch(step).to(DEVICE)
        loss = loss_of(model, ids if whole else my_part(ids))
        loss.backward()
        clip = torch.nn.utils.clip_grad_norm_ if whole else lambda _, norm: fsdplaunch.clip_grad_norm_(model, norm)
        clip(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item() if whole else mean_over_ranks(loss))
    return found


def fresh(seed: int, kind: type[TinyLM] = TinyLM) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    model = kind()
    return fsdplaunch.prepare(model, adamw(model.parameters()))


def resumed(folder: str, kind: type[TinyLM]) -> tuple[list[float], list[float], Any]:
    """Return all losses of a run that saves half way, those of a run that goes on from there, and its model."""
    model, optimizer = fresh(0, kind)
    found = losses(model, optimizer, 0, HALF, whole=False)
    fsdplaunch.save_checkpoint(folder, model=model, optimizer=optimizer, step=HALF)
    found += losses(model, optimizer, HALF, STEPS - HALF, whole=False)
    again, its_optimizer = fresh(5, kind)
    fsdplaunch.load_checkpoint(folder, model=again, optimizer=its_optimizer)
    return found, losses(again, its_optimizer, HALF, STEPS - HALF, whole=False), again


def main() -> None:
    plain = build(0).to(DEVICE)
    alone = losses(plain, adamw(plain.parameters()), 0, STEPS, whole=True)
    sharded, after, model = resumed(sys.argv[1], TinyLM)
    dropped, dropped_after, _ = resumed(f"{sys.argv[1]}-dropout", WithDropout)
    parameter = next(model.parameters())
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    if dist.get_rank() == 0:
        result = {"alone": alone, "sharded": sharded, "resumed": after, "device": local.device.type}
        result |= {"dropped": dropped, "dropped resumed": dropped_after}
        print(json.dumps(result | {"backends": str(dist.get_backend_config()), "dtype": str(parameter.dtype)}))


main()
