"""A script for one process: a classifier with dropout and BatchNorm; prints its losses."""

import json

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
generator = torch.Generator().manual_seed(1)
inputs = torch.randn(48, 16, generator=generator)
data = TensorDataset(inputs, inputs[:, :4].argmax(1))
model = nn.Sequential(
    nn.Linear(16, 64),
    nn.BatchNorm1d(64),
    nn.ReLU(),
    nn.Dropout(0.2),
    nn.Linear(64, 64),
    nn.ReLU(),
    nn.Linear(64, 4),
).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
losses = []
for _ in range(2):
    for features, classes in DataLoader(data, batch_size=8, shuffle=True):
        loss = nn.functional.cross_entropy(model(features.to(device)), classes.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
torch.save(model.state_dict(), "plain.pt")
print(json.dumps({"losses": losses}))
