"""Print, from every rank, on which GPU tensors land that scripts put there in the ways that they have."""

import json
import os

import torch


def place(device: "str | torch.device") -> str:
    """Return the UUID of the GPU that a new tensor is on."""
    return str(torch.cuda.get_device_properties(torch.ones(1, device=device).device).uuid)


local = int(os.environ["LOCAL_RANK"])
found = {"visible": torch.cuda.device_count(), "cuda": place("cuda")}
torch.cuda.set_device(local % torch.cuda.device_count())
found["set_device"] = place("cuda")
print(json.dumps(found))
