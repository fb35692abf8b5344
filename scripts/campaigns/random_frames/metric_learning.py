"""Distances between rows: queues, banks, mining in the batch, proxies, prototypes."""

FRAMES = {
    "queue_of_keys": """
query, key = mlp(6, WIDTH, 4), mlp(6, WIDTH, 4)
key.load_state_dict(query.state_dict())
key.requires_grad_(False)
query, key = query.to(device), key.to(device)
queue = F.normalize(torch.randn(24, 4), dim=1)
opt = OPTIMIZER(query.parameters())
for epoch in range(EPOCHS):
    for (x,) in LOADER(TensorDataset(torch.randn(ROWS, 6))):
        q = F.normalize(query(x + 0.1 * torch.randn_like(x)), dim=1)
        with torch.no_grad():
            for a, b in zip(key.parameters(), query.parameters()):
                a.data = a.data * 0.9 + b.data * 0.1
            k = F.normalize(key(x + 0.1 * torch.randn_like(x)), dim=1)
        logits = torch.cat([(q * k).sum(1, keepdim=True), q @ queue.t()], 1) / 0.2
        loss = F.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long, device=device))
        STEP(loss, opt)
        queue = torch.cat([k, queue])[:24]
record["valid"] = queue.flatten().tolist()
torch.save([query.state_dict(), key.state_dict()], "model.pt")
""",
    "momentum_contrast": """
class MoCo(nn.Module):
    def __init__(self, k=16):
        super().__init__()
        self.q, self.k = mlp(6, WIDTH, 4), mlp(6, WIDTH, 4)
        self.k.load_state_dict(self.q.state_dict())
        self.k.requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(4, k), dim=0))
        self.register_buffer("at", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def enqueue(self, keys):
        at = int(self.at)
        self.queue[:, at : at + len(keys)] = keys.t()[:, : 16 - at]
        self.at[0] = (at + len(keys)) % 16

    def forward(self, a, b):
        q = F.normalize(self.q(a), dim=1)
        with torch.no_grad():
            for p, r in zip(self.q.parameters(), self.k.parameters()):
                r.mul_(0.9).add_(p, alpha=0.1)
            k = F.normalize(self.k(b), dim=1)
        logits = torch.cat([(q * k).sum(1, keepdim=True), q @ self.queue.clone()], 1) / 0.2
        self.enqueue(k)
        return logits, torch.zeros(len(q), dtype=torch.long, device=q.device)

model = MoCo().to(device)
opt = OPTIMIZER(model.q.parameters())
for epoch in range(EPOCHS):
    for a, b in LOADER(TensorDataset(torch.randn(ROWS, 6), torch.randn(ROWS, 6))):
        logits, target = model(a, b)
        loss = F.cross_entropy(logits, target)
        STEP(loss, opt)
torch.save(model.state_dict(), "model.pt")
""",
    "bank_by_index": """
X = torch.randn(ROWS, 6)
bank = F.normalize(torch.randn(ROWS, 4), dim=1)
net = mlp(6, WIDTH, 4).to(device)
opt = OPTIMIZER(net.parameters())
for epoch in range(EPOCHS):
    for index, x in LOADER(TensorDataset(torch.arange(ROWS), X)):
        z = F.normalize(net(x), dim=1)
        loss = F.cross_entropy(z @ bank.t() / 0.3, index)
        STEP(loss, opt)
        with torch.no_grad():
            bank[index] = F.normalize(0.5 * bank[index] + 0.5 * z, dim=1)
record["valid"] = bank.sum(1).tolist()
torch.save(net.state_dict(), "model.pt")
""",
    "hardest_in_batch": """
X, Y = torch.randn(ROWS, 6), torch.arange(ROWS) % 3
net = mlp(6, WIDTH, 4).to(device)
opt = OPTIMIZER(net.parameters())
for epoch in range(EPOCHS):
    for x, y in LOADER(TensorDataset(X, Y)):
        z = net(x)
        d = torch.cdist(z, z)
        same = y[:, None] == y[None]
        positive = (d * same).max(1).values
        negative = d.masked_fill(same, 1e3).min(1).values
        loss = F.relu(positive - negative + 0.5).mean()
        STEP(loss, opt)
torch.save(net.state_dict(), "model.pt")
""",
    "proxies": """
class Proxies(nn.Module):
    def __init__(self):
        super().__init__()
        self.proxies = nn.Parameter(torch.randn(5, 4))

    def forward(self, z, y):
        d = torch.cdist(F.normalize(z, dim=1) * 3, F.normalize(self.proxies, dim=1) * 3) ** 2
        return -F.log_softmax(-d, 1).gather(1, y[:, None]).mean()

X, Y = torch.randn(ROWS, 6), torch.randint(0, 5, (ROWS,))
net, criterion = mlp(6, WIDTH, 4).to(device), Proxies().to(device)
opt = OPTIMIZER([*net.parameters(), *criterion.parameters()])
for epoch in range(EPOCHS):
    for x, y in LOADER(TensorDataset(X, Y)):
        loss = criterion(net(x), y)
        STEP(loss, opt)
torch.save([net.state_dict(), criterion.state_dict()], "model.pt")
""",
    "proxy_anchor": """
X, Y = torch.randn(ROWS, 6), torch.randint(0, 4, (ROWS,))
net = mlp(6, WIDTH, 4).to(device)
proxies = nn.Parameter(torch.randn(4, 4))
opt = OPTIMIZER([*net.parameters(), proxies])
for epoch in range(EPOCHS):
    for x, y in LOADER(TensorDataset(X, Y)):
        cos = F.linear(F.normalize(net(x)), F.normalize(proxies))
        hot = F.one_hot(y, 4)
        with_rows = hot.sum(0) != 0
        pos = torch.where(hot == 1, torch.exp(-4 * (cos - 0.1)), torch.zeros_like(cos)).sum(0)
        neg = torch.where(hot == 0, torch.exp(4 * (cos + 0.1)), torch.zeros_like(cos)).sum(0)
        loss = torch.log1p(pos).sum() / with_rows.sum() + torch.log1p(neg).sum() / 4
        STEP(loss, opt)
torch.save([net.state_dict(), proxies.detach()], "model.pt")
""",
    "angular_margin": """
class Arc(nn.Module):
    def __init__(self, margin=0.2):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(5, 4))
        nn.init.xavier_uniform_(self.weight)
        self.margin = margin

    def forward(self, z, y):
        cos = F.linear(F.normalize(z), F.normalize(self.weight)).clamp(-1 + 1e-7, 1 - 1e-7)
        theta = torch.acos(cos)
        hot = torch.zeros_like(cos).scatter_(1, y.view(-1, 1), 1)
        return 8 * torch.cos(theta + self.margin * hot)

X, Y = torch.randn(ROWS, 6), torch.randint(0, 5, (ROWS,))
model = nn.ModuleDict({"body": mlp(6, WIDTH, 4), "head": Arc()}).to(device)
opt = OPTIMIZER(model.parameters())
for epoch in range(EPOCHS):
    for x, y in LOADER(TensorDataset(X, Y)):
        loss = F.cross_entropy(model["head"](model["body"](x), y), y)
        STEP(loss, opt)
torch.save(model.state_dict(), "model.pt")
""",
    "prototypes_of_episodes": """
X, Y = torch.randn(60, 6), torch.arange(60) % 6
net = mlp(6, WIDTH, 4).to(device)
opt = OPTIMIZER(net.parameters())
for episode in range(6):
    classes = random.sample(range(6), 3)
    support, query, target = [], [], []
    for place, c in enumerate(classes):
        rows = torch.nonzero(Y == c).flatten()
        rows = rows[torch.randperm(len(rows))[:6]]
        support.append(X[rows[:3]])
        query.append(X[rows[3:]])
        target += [place] * 3
    prototypes = net(torch.cat(support)).view(3, 3, -1).mean(1)
    d = torch.cdist(net(torch.cat(query)), prototypes) ** 2
    target = torch.tensor(target)
    loss = F.cross_entropy(-d, target)
    STEP(loss, opt)
    record["valid"].append((d.argmin(1) == target).double().mean().item())
torch.save(net.state_dict(), "model.pt")
""",
    "correlation_of_views": """
net = nn.Sequential(mlp(6, WIDTH, 4), nn.BatchNorm1d(4, affine=False)).to(device)
opt = OPTIMIZER(net.parameters())
for epoch in range(EPOCHS):
    for (x,) in LOADER(TensorDataset(torch.randn(ROWS, 6))):
        a, b = net(x), net(x + 0.1 * torch.randn_like(x))
        c = a.t() @ b / len(x)
        loss = (c.diagonal() - 1).pow(2).sum() + 0.01 * (c - torch.diag(c.diagonal())).pow(2).sum()
        STEP(loss, opt)
torch.save(net.state_dict(), "model.pt")
""",
    "centred_outputs": """
student, teacher = mlp(6, WIDTH, 4).to(device), mlp(6, WIDTH, 4).to(device)
teacher.load_state_dict(student.state_dict())
teacher.requires_grad_(False)
centre = torch.zeros(1, 4)
opt = OPTIMIZER(student.parameters())
for epoch in range(EPOCHS):
    for (x,) in LOADER(TensorDataset(torch.randn(ROWS, 6))):
        with torch.no_grad():
            t = teacher(x + 0.1 * torch.randn_like(x))
        s = student(x + 0.1 * torch.randn_like(x))
        loss = -(F.softmax((t - centre) / 0.2, 1) * F.log_softmax(s / 0.5, 1)).sum(1).mean()
        STEP(loss, opt)
        with torch.no_grad():
            centre = centre * 0.9 + t.mean(0, keepdim=True) * 0.1
            for a, b in zip(teacher.parameters(), student.parameters()):
                a.mul_(0.9).add_(b, alpha=0.1)
record["valid"] = centre.flatten().tolist()
torch.save([student.state_dict(), teacher.state_dict()], "model.pt")
""",
}
