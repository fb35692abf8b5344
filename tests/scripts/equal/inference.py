"""What a script takes of a sharded model under `torch.inference_mode()`, between steps of training."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(8, 5)


def step():
    loss = model(x).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def halved(w):
    for row in w:
        row.mul_(0.5)
    return w


step()
READS = {
    "detach": lambda w: w.detach(),
    "data": lambda w: w.data.detach(),
    "transposed": lambda w: w.t() @ w,
    "view": lambda w: w.view(-1),
    "row": lambda w: w[0],
    "slice": lambda w: w[1:3],
    "chunk": lambda w: w.chunk(2)[0],
    "narrow": lambda w: w.narrow(0, 1, 2),
    "split": lambda w: w.tensor_split(3)[1],
    "moved": lambda w: w.movedim(0, 1).mT,
    "rows": lambda w: list(w)[3],
    "clone": lambda w: w.data.clone().mul_(2),
    "written": lambda w: w[2].mul_(3.0),
    "cleared": lambda w: w.data[3:5].zero_(),
    "halved": halved,
    "joined": lambda w: torch.cat([p.detach().reshape(-1) for p in model.parameters()]),
    "pass": lambda w: model(x),
}
for name, read in READS.items():
    with torch.inference_mode():
        print(f"{name}: {read(model[0].weight).sum().item():.6f} {model[0].weight.norm().item():.6f}")
print(f"trained: {step().item():.6f} {step().item():.6f}")


class Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(6, 4)

    def forward(self, rows=None):
        return self.table.weight if rows is None else self.table(rows)


class Steps(nn.Module):
    def __init__(self, shared):
        super().__init__()
        self.shared, self.own = shared, nn.Linear(4, 4)

    def forward(self, x):
        return torch.tanh(self.own(self.shared(x)))


class Graph(nn.Module):
    """Of the shape of pykeen's models."""

    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleList([Table(), Table()])
        self.scale = nn.Parameter(torch.rand(4))

    def forward(self, rows):
        return (self.tables[0](rows) * self.tables[1](rows % 3) * self.scale) @ self.tables[0]().t()

    def score(self, rows):
        return self.tables[0](rows) @ self.tables[0]().unsqueeze(0).transpose(1, 2)

    def all_of(self, rows):
        return self.tables[0].table.weight[None], self.scale[:2]


torch.manual_seed(1)
graph = Graph().to("cpu")
optimizer = torch.optim.SGD(graph.parameters(), lr=0.1)
rows = torch.arange(6)
for _ in range(3):
    optimizer.zero_grad()
    loss = graph(rows).pow(2).mean()
    loss.backward()
    optimizer.step()
    print(f"graph: {loss.item():.6f}")
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            parts = graph.score(rows), *graph.all_of(rows), graph.tables[1](), graph(rows)
            print(f"graph {mode.__name__}: {' '.join(f'{part.norm().item():.6f}' for part in parts)}")

shared = nn.Linear(4, 4)  # a layer that several blocks have, as TabNet's
steps = nn.Sequential(*[Steps(shared) for _ in range(3)]).to("cpu")
optimizer = torch.optim.SGD(steps.parameters(), lr=0.1)
for _ in range(3):
    optimizer.zero_grad()
    loss = steps(x[:, :4]).pow(2).mean()
    loss.backward()
    optimizer.step()
    print(f"shared: {loss.item():.6f}")


class Agent(nn.Module):
    """Acts by one of its networks before it was called as a whole."""

    def __init__(self):
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
        self.critic = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return self.actor(x) * self.scale, self.critic(x)


agent = Agent()
optimizer = torch.optim.SGD(agent.parameters(), lr=0.1)
for _ in range(3):
    with torch.no_grad():
        print(f"acted: {agent.actor(x).sum().item():.6f} {agent.actor[0](x).sum().item():.6f}")
    loss = sum(each.pow(2).mean() for each in agent(x))
    gradients = torch.autograd.grad(loss, agent.parameters())
    for p, gradient in zip(agent.parameters(), gradients):
        p.grad = gradient
    optimizer.step()
