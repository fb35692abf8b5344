"""Averaged weights swapped in and out by assignment, an optimizer with matrix products, a loss scaler, safetensors."""

import torch
from safetensors.torch import load_file, save_file, save_model
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

torch.manual_seed(21)
device = "cuda" if torch.cuda.is_available() else "cpu"


class EMA:
    def __init__(self, model, decay):
        self.model, self.decay, self.backup = model, decay, {}
        self.shadow = {name: p.data.clone() for name, p in model.named_parameters() if p.requires_grad}

    def update(self):
        for name, p in self.model.named_parameters():
            if p.requires_grad:
                self.shadow[name] = (1.0 - self.decay) * p.data + self.decay * self.shadow[name]

    def apply_shadow(self):
        for name, p in self.model.named_parameters():
            if p.requires_grad:
                self.backup[name] = p.data
                p.data = self.shadow[name]

    def restore(self):
        for name, p in self.model.named_parameters():
            if p.requires_grad:
                p.data = self.backup[name]
        self.backup = {}


class Muon(torch.optim.Optimizer):
    def __init__(self, params, lr=0.02, momentum=0.9):
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(p)
                state["momentum"].lerp_(p.grad, 1 - group["momentum"])
                x = state["momentum"].T if p.size(0) > p.size(1) else state["momentum"]
                x = x / (x.norm() + 1e-7)
                for _ in range(3):
                    x = 1.5 * x - 0.5 * x @ x.T @ x
                p.add_(x.T if p.size(0) > p.size(1) else x, alpha=-group["lr"])


model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3)).to(device)
matrices = Muon([p for p in model.parameters() if p.ndim == 2])
vectors = torch.optim.AdamW([p for p in model.parameters() if p.ndim < 2], lr=0.02, weight_decay=0.0)
scaler = torch.amp.GradScaler(device, init_scale=1024.0)
ema, averaged = EMA(model, 0.9), AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
x = torch.randn(16, 8).to(device)
for step in range(4):
    loss = (model(x) - x[:, :3]).pow(2).mean()
    scaler.scale(loss).backward()
    for optimizer in (matrices, vectors):
        scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    for optimizer in (matrices, vectors):
        scaler.step(optimizer)
        optimizer.zero_grad()
    scaler.update()
    ema.update()
    averaged.update_parameters(model)
    model.eval()
    ema.apply_shadow()
    with torch.no_grad():
        shadow = (model(x) - x[:, :3]).pow(2).mean()
    save_model(model, "shadow.safetensors")
    ema.restore()
    model.train()
    print(
        f"loss {loss.item():.6f} norm loss {norm:.6f} shadow loss {shadow.item():.6f} scale {scaler.get_scale()}"
    )
for p in model[4].parameters():
    p.data = p.data - 0.1 * p.data.sign()
save_file(model.state_dict(), "model.safetensors")
model.load_state_dict(load_file("model.safetensors"))
with torch.no_grad():
    print(f"loss {(model(x) - x[:, :3]).pow(2).mean().item():.6f}")
torch.save({"averaged": averaged.state_dict(), "muon": matrices.state_dict()}, "averaged.pt")
