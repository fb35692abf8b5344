"""Low-rank adapters put into a frozen model by hand; only they are trained and saved, with safetensors."""

import math

import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(7)
device = "cuda" if torch.cuda.is_available() else "cpu"


class LoRALinear(nn.Module):
    def __init__(self, linear, r=4, alpha=8):
        super().__init__()
        self.linear = linear
        self.lora_A = nn.Parameter(torch.empty(r, linear.in_features))
        self.lora_B = nn.Parameter(torch.zeros(linear.out_features, r))
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))
        self.scaling = alpha / r

    def forward(self, x):
        return self.linear(x) + (x @ self.lora_A.T @ self.lora_B.T) * self.scaling


class Layer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 2 * dim)
        self.down = nn.Linear(2 * dim, dim)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, dim=16, depth=3, classes=4):
        super().__init__()
        self.embed = nn.Linear(8, dim)
        self.layers = nn.ModuleList(Layer(dim) for _ in range(depth))
        self.head = nn.Linear(dim, classes)

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def add_lora(module):
    for name, child in module.named_children():
        if isinstance(child, nn.Linear):
            setattr(module, name, LoRALinear(child))
        else:
            add_lora(child)


model = Model()
for p in model.parameters():
    p.requires_grad = False
add_lora(model.layers)
model.to(device)
trainable = [p for p in model.parameters() if p.requires_grad]
print(f"trainable {sum(p.numel() for p in trainable)} of {sum(p.numel() for p in model.parameters())}")
optimizer = torch.optim.AdamW(trainable, lr=1e-2)
x, y = torch.randn(32, 8), torch.randint(0, 4, (32,))
loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
for epoch in range(2):
    for xb, yb in loader:
        loss = nn.functional.cross_entropy(model(xb.to(device)), yb.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"epoch {epoch} | loss {loss:.6f}")
save_file({k: v.contiguous() for k, v in model.state_dict().items() if "lora_" in k}, "adapter.safetensors")
