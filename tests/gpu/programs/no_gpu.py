"""Print what a worker on the CPU sees of this machine's GPUs."""

import json

import torch

print(json.dumps({"available": torch.cuda.is_available(), "count": torch.cuda.device_count()}))
