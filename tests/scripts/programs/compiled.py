"""torch.compile of the full graph, autocast switched off on CPU, a penalty on the weights, numpy for the record of losses."""

import numpy as np
import torch
from torch import nn

torch.manual_seed(2)
np.random.seed(2)
device = "cuda" if torch.cuda.is_available() else "cpu"


class Layer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.ln = nn.LayerNorm(dim)
        self.fc1 = nn.Linear(dim, 2 * dim)
        self.fc2 = nn.Linear(2 * dim, dim)

    def forward(self, x):
        return x + self.fc2(nn.functional.gelu(self.fc1(self.ln(x))))


class Model(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.inp = nn.Linear(4, dim)
        self.layers = nn.ModuleList([Layer(dim) for _ in range(2)])
        self.out = nn.Linear(dim, 2)

    def forward(self, x):
        x = self.inp(x)
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


model = Model()
raw_model = model
model = torch.compile(model, backend="aot_eager", fullgraph=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
inputs = torch.from_numpy(np.random.randn(24, 4).astype(np.float32))
targets = torch.from_numpy(np.random.randint(0, 2, 24))
history = []
for step in range(4):
    index = torch.randint(0, len(inputs), (8,))
    loss = nn.functional.cross_entropy(model(inputs[index].to(device)), targets[index].to(device))
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    history.append(loss.item())
    print(f"step {step} loss {loss.item():.6f}")
torch.save({"model": raw_model.state_dict(), "history": history}, "compiled.pt")
