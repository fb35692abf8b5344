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
torch.nn.Linear(2, 2).to("cuda:0")  # as a script for one GPU does, whose model is sharded there
found["cuda:0"] = place("cuda:0")
print(json.dumps(found))
