"""A model built without storage, materialised and initialised by its own method."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.RMSNorm(dim)
        self.fc = nn.Linear(dim, dim)

    def forward(self, x):
        return x + torch.sin(self.fc(self.norm(x)))


class Model(nn.Module):
    def __init__(self, dim=24):
        super().__init__()
        self.embed = nn.Embedding(32, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(3))
        self.head = nn.Linear(dim, 32, bias=False)
        self.register_buffer("scale", torch.full((1,), dim**-0.5))

    def init_weights(self):
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.trunc_normal_(module.weight, std=0.02)
                if getattr(module, "bias", None) is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.RMSNorm):
                nn.init.ones_(module.weight)
        nn.init.constant_(self.scale, self.head.in_features**-0.5)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x) * self.scale


torch.manual_seed(9)
with torch.device("meta"):
    model = Model()
model.to_empty(device=device)
with torch.no_grad():
    model.init_weights()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, fused=torch.cuda.is_available())
tokens = torch.randint(0, 32, (32, 9))
loader = DataLoader(TensorDataset(tokens), batch_size=8, shuffle=True, drop_last=True)
for epoch in range(2):
    for (batch,) in loader:
        batch = batch.to(device)
        logits = model(batch[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"loss {loss.item():.6f}")
torch.save(model.state_dict(), "model.pt")
