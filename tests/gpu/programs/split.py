"""Train the tiny plain model of the CPU's tests alone and with split layers or sequences; print losses as JSON."""

import json

import torch
import torch.distributed as dist

import fsdplaunch
from tests.distributed import split_models as models


def main() -> None:
    """Print what rank 0 has found."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    alone, model = models.built("plain").to(device), models.built("plain")
    losses = models.train(alone, models.adamw(alone))
    model, optimizer = fsdplaunch.prepare(model, models.adamw(model))
    split = models.train(model, optimizer)
    if dist.get_rank() == 0:
        print(json.dumps({"alone": losses, "split": split, "line": fsdplaunch.describe(model).line()}))


main()
