"""A script as accelerate's users write it; arguments: the folder it writes to, and what it loads from there.

Each rank builds the model from another seed, and rank 0 keeps what it began with: all ranks must go on from that.
"""

import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import load_fsdp_model
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

out = Path(sys.argv[1])
accelerator = Accelerator()
torch.manual_seed(accelerator.process_index)
model = nn.Sequential(*[nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0) for _ in range(2)])
began = {name: tensor.clone() for name, tensor in model.state_dict().items()}
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
torch.manual_seed(0)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(16, 4, 16)), batch_size=4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

after = accelerator.get_state_dict(model)
if accelerator.is_main_process:
    for name, tensor in began.items():
        torch.testing.assert_close(after[name], tensor)
held = sum(p.to_local().numel() if isinstance(p, DTensor) else p.numel() for p in model.parameters())
assert held <= 0.6 * sum(tensor.numel() for tensor in began.values()), held

for (batch,) in loader:
    loss = model(batch).pow(2).mean()
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
accelerator.save_state(out / "state")
trained = accelerator.get_state_dict(model)
with torch.no_grad():
    for parameter in model.parameters():
        parameter.zero_()
if sys.argv[2] == "state":
    accelerator.load_state(out / "state")
else:
    load_fsdp_model(accelerator.state.fsdp_plugin, accelerator, model, str(out / "state"))
loaded = accelerator.get_state_dict(model)
if accelerator.is_main_process:
    for name, tensor in trained.items():
        torch.testing.assert_close(loaded[name], tensor)
accelerator.save_model(model, out / "model")
wrapper = isinstance(model, FullyShardedDataParallel)
print(f"{accelerator.num_processes} processes, FSDP{1 if wrapper else 2}, {accelerator.device}")
