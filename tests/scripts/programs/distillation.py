"""A student learns from a frozen, larger teacher."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def mlp(width, depth):
    layers = [nn.Linear(12, width), nn.ReLU()]
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, 6))


def main():
    torch.manual_seed(3)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    teacher = mlp(48, 3).to(device)
    teacher.eval()
    student = mlp(16, 1).to(device)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    data = TensorDataset(torch.randn(48, 12), torch.randint(0, 6, (48,)))
    loader = DataLoader(data, batch_size=12, shuffle=True)
    T = 2.0
    for epoch in range(2):
        for x, y in loader:
            x, y = x.to(device), y.to(device)
            with torch.no_grad():
                soft = F.softmax(teacher(x) / T, dim=-1)
            logits = student(x)
            kd = F.kl_div(F.log_softmax(logits / T, dim=-1), soft, reduction="batchmean") * T * T
            loss = 0.5 * kd + 0.5 * F.cross_entropy(logits, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(f"epoch {epoch} loss: {loss.item():.6f}")
    torch.save(student.state_dict(), "student.pt")


if __name__ == "__main__":
    main()
