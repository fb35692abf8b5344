"""Read files that a script has saved: say how many tensors they hold, and fail if one is no full tensor."""

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor


def tensors(value):
    """Yield the tensors in what was saved."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from tensors(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from tensors(each)
    elif isinstance(value, torch.nn.Module):
        yield from value.state_dict().values()


found = []
files = [Path(name) for name in sys.argv[1:] if Path(name).is_file()]
for file in files:
    if file.suffix == ".safetensors":
        found += load_file(file).values()
    elif file.suffix in (".pt", ".pth", ".tar"):
        found += tensors(torch.load(file, weights_only=False))
wrong = [
    value for value in found if isinstance(value, DTensor) or not value.isfinite().all() or value.numel() == 0
]
print(f"{len(files)} files saved, {len(found)} tensors" if not wrong else f"{len(wrong)} tensors are not full")
sys.exit(bool(wrong))
