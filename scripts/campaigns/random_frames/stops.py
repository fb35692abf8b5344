"""Stops, folds and curricula."""

FRAMES = {
    "kfold": """
X = torch.randn(30, 6)
Y = (X[:, 0] > 0).long()
scores = []
for fold in range(EPOCHS):
    va = torch.arange(fold * 10, fold * 10 + 10)
    tr = torch.tensor([i for i in range(30) if i not in va.tolist()])
    torch.manual_seed(fold)
    net = mlp(6, 8, 2).to(device)
    opt = OPTIMIZER(net.parameters())
    tl = DataLoader(Subset(TensorDataset(X, Y), tr.tolist()), 4, shuffle=True)
    for ep in range(EPOCHS):
        for a, b in tl:
            opt.zero_grad()
            F.cross_entropy(net(a), b).backward()
            opt.step()
    net.eval()
    with torch.no_grad():
        scores.append((net(X[va]).argmax(1) == Y[va]).double().mean().item())
        record["valid"].append(F.cross_entropy(net(X[va]), Y[va]).item())
    torch.save(net.state_dict(), f"fold{fold}.pt")
record["losses"] = scores
""",
    "ensemble": """
X = torch.randn(ROWS, 6)
Y = X[:, :1] ** 2
nets = [mlp(6, 8, 1).to(device) for _ in range(3)]
opts = [OPTIMIZER(n.parameters()) for n in nets]
for ep in range(EPOCHS):
    for a, b in LOADER(TensorDataset(X, Y)):
        for n, o in zip(nets, opts):
            w = torch.rand(len(a), 1)
            loss = (w * (n(a) - b) ** 2).sum() / w.sum()
            STEP(loss, o)
with torch.no_grad():
    record["valid"] = torch.stack([n(X) for n in nets]).mean(0)[:5].flatten().tolist()
torch.save([n.state_dict() for n in nets], "model.pt")
""",
    "curriculum": """
X = torch.randn(48, 6)
Y = X.sum(1, keepdim=True)
m = mlp(6, 8, 1).to(device)
opt = OPTIMIZER(m.parameters())
for ep, bs in enumerate((4, 8, WIDTH)):
    order = torch.argsort(X.norm(dim=1))[: WIDTH * (ep + 1)].tolist()
    loader = DataLoader(Subset(TensorDataset(X, Y), order), bs, shuffle=True)
    for a, b in loader:
        loss = F.mse_loss(m(a), b)
        STEP(loss, opt)
torch.save(m.state_dict(), "model.pt")
""",
    "early_stop_reload": """
class Early:
    def __init__(self, p):
        self.p, self.c, self.best, self.stop = (p, 0, None, False)

    def __call__(self, v, m):
        if self.best is None or v < self.best - 0.0001:
            self.best = v
            self.c = 0
            torch.save(m.state_dict(), "best.pt")
        else:
            self.c += 1
            self.stop = self.c >= self.p

X = torch.randn(40, 6)
Y = X[:, :1] ** 3
tr, va = (TensorDataset(X[:32], Y[:32]), TensorDataset(X[32:], Y[32:]))
m = mlp(6, WIDTH, 1).to(device)
opt = OPTIMIZER(m.parameters())
sc = optim.lr_scheduler.ReduceLROnPlateau(opt, patience=1, factor=0.3)
es = Early(3)
for ep in range(12):
    m.train()
    for a, b in LOADER(tr):
        l = F.l1_loss(m(a), b)
        opt.zero_grad()
        l.backward()
        opt.step()
    m.eval()
    v = 0
    with torch.no_grad():
        for a, b in DataLoader(va, 4):
            v += F.l1_loss(m(a), b, reduction="sum").item()
    record["valid"].append(v / 8)
    sc.step(v)
    es(v, m)
    if es.stop:
        break
record["ep"] = ep
m.load_state_dict(torch.load("best.pt"))
torch.save(m.state_dict(), "model.pt")
""",
    "early_stop_train": """
class Early:
    def __init__(self, p):
        self.p, self.c, self.best, self.stop = (p, 0, None, False)

    def __call__(self, v, m):
        if self.best is None or v < self.best - 0.0001:
            self.best = v
            self.c = 0
            torch.save(m.state_dict(), "best.pt")
        else:
            self.c += 1
            self.stop = self.c >= self.p

X = torch.randn(40, 6)
Y = X[:, :1] ** 3
tr, va = (TensorDataset(X[:32], Y[:32]), TensorDataset(X[32:], Y[32:]))
m = mlp(6, WIDTH, 1).to(device)
opt = OPTIMIZER(m.parameters())
sc = optim.lr_scheduler.ReduceLROnPlateau(opt, patience=1, factor=0.3)
es = Early(3)
for ep in range(12):
    m.train()
    tl = 0
    for a, b in LOADER(tr):
        l = F.l1_loss(m(a), b)
        opt.zero_grad()
        l.backward()
        opt.step()
        tl = tl + l.item()
    m.eval()
    v = 0
    with torch.no_grad():
        for a, b in DataLoader(va, 4):
            v += F.l1_loss(m(a), b, reduction="sum").item()
    record["valid"].append(v / 8)
    sc.step(tl)
    es(tl, m)
    if es.stop:
        break
record["ep"] = ep
m.load_state_dict(torch.load("best.pt"))
torch.save(m.state_dict(), "model.pt")
""",
    "best_in_memory": """
X, Y = torch.randn(ROWS, 6), torch.randint(0, 3, (ROWS,))
VX, VY = torch.randn(10, 6), torch.randint(0, 3, (10,))
net = mlp(6, WIDTH, 3).to(device)
opt = OPTIMIZER(net.parameters())
best, weights, waited = float("inf"), None, 0
for epoch in range(6):
    net.train()
    for x, y in LOADER(TensorDataset(X, Y)):
        loss = F.cross_entropy(net(x), y)
        STEP(loss, opt)
    net.eval()
    with torch.no_grad():
        value = F.cross_entropy(net(VX), VY).item()
    if value < best:
        best, waited = value, 0
        weights = {k: v.cpu().clone() for k, v in net.state_dict().items()}
    elif (waited := waited + 1) >= 2:
        break
record["valid"] = [epoch, best]
net.load_state_dict(weights)
torch.save(net.state_dict(), "model.pt")
""",
    "stopped_by_training_loss": """
X, Y = torch.randn(ROWS, 6), torch.randint(0, 3, (ROWS,))
net = mlp(6, WIDTH, 3).to(device)
opt = OPTIMIZER(net.parameters())
best, waited = float("inf"), 0
for epoch in range(6):
    running, seen = 0.0, 0
    for x, y in LOADER(TensorDataset(X, Y)):
        loss = F.cross_entropy(net(x), y)
        STEP(loss, opt)
        running += loss.item() * x.size(0)
        seen += x.size(0)
    if running / seen < best - 0.02:
        best, waited = running / seen, 0
        torch.save(net.state_dict(), "best.pt")
    elif (waited := waited + 1) >= 1:
        break
record["valid"] = [epoch, best]
torch.save(net.state_dict(), "model.pt")
""",
    "running_accuracy": """
X, Y = torch.randn(ROWS, 6), torch.randint(0, 3, (ROWS,))
net = mlp(6, WIDTH, 3).to(device)
opt = OPTIMIZER(net.parameters())
for epoch in range(EPOCHS):
    correct, seen = 0, 0
    for x, y in LOADER(TensorDataset(X, Y)):
        out = net(x)
        loss = F.cross_entropy(out, y)
        STEP(loss, opt)
        correct += (out.argmax(1) == y).sum().item()
        seen += len(y)
    if correct / seen > 0.3:
        for group in opt.param_groups:
            group["lr"] *= 0.5
torch.save(net.state_dict(), "model.pt")
""",
    "confusion_of_evaluation": """
X, Y = torch.randn(ROWS, 6), torch.randint(0, 3, (ROWS,))
train, test = random_split(TensorDataset(X, Y), [ROWS - 6, 6], generator=torch.Generator().manual_seed(1))
net = mlp(6, WIDTH, 3).to(device)
opt = OPTIMIZER(net.parameters())
for epoch in range(EPOCHS):
    net.train()
    for x, y in LOADER(train):
        loss = F.cross_entropy(net(x), y)
        STEP(loss, opt)
    net.eval()
    confusion, scores = torch.zeros(3, 3, dtype=torch.long), []
    with torch.no_grad():
        for x, y in DataLoader(test, 4):
            p = net(x)
            scores.append(p.softmax(1))
            for t, q in zip(y.view(-1), p.argmax(1).view(-1)):
                confusion[t.long(), q.long()] += 1
    record["valid"].append([confusion.tolist(), torch.cat(scores).cpu().numpy().mean(0).tolist()])
torch.save(net.state_dict(), "model.pt")
""",
}
