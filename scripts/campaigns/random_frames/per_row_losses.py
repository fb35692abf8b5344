"""Losses of each row by itself: weights, mining, curricula, mixtures of rows."""

FRAMES = {
    "mixup": """
X, Y = torch.randn(ROWS, 6), torch.randint(0, 3, (ROWS,))
net = mlp(6, WIDTH, 3).to(device)
opt = OPTIMIZER(net.parameters())
for epoch in range(EPOCHS):
    for x, y in LOADER(TensorDataset(X, Y)):
        lam = np.random.beta(0.4, 0.4)
        index = torch.randperm(x.size(0), device=device)
        out = net(lam * x + (1 - lam) * x[index])
        loss = lam * F.cross_entropy(out, y) + (1 - lam) * F.cross_entropy(out, y[index])
        STEP(loss, opt)
torch.save(net.state_dict(), "model.pt")
""",
    "cutmix_flipped": """
X, Y = torch.randn(ROWS, 1, 8, 8), torch.randint(0, 3, (ROWS,))
net = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(256, 3)).to(device)
opt = OPTIMIZER(net.parameters())
for epoch in range(EPOCHS):
    for x, y in LOADER(TensorDataset(X, Y)):
        hot = F.one_hot(y, 3).double() * 0.9 + 0.1 / 3
        if random.random() < 0.7:
            w, h = random.randint(1, 6), random.randint(1, 6)
            x = x.clone()
            x[:, :, :w, :h] = x.flip(0)[:, :, :w, :h]
            lam = 1 - w * h / 64
            hot = lam * hot + (1 - lam) * hot.flip(0)
        loss = -(hot * net(x).log_softmax(1)).sum(1).mean()
        STEP(loss, opt)
torch.save(net.state_dict(), "model.pt")
""",
    "focal_and_dice": """
class FocalDice(nn.Module):
    def __init__(self, gamma=2.0, alpha=0.25):
        super().__init__()
        self.gamma, self.alpha = gamma, alpha

    def forward(self, out, mask):
        bce = F.binary_cross_entropy_with_logits(out, mask, reduction="none")
        focal = (self.alpha * (1 - torch.exp(-bce)) ** self.gamma * bce).mean()
        p = torch.sigmoid(out).flatten(1)
        m = mask.flatten(1)
        dice = 1 - (2 * (p * m).sum(1) + 1) / (p.sum(1) + m.sum(1) + 1)
        return focal + dice.mean()

X = torch.randn(ROWS, 1, 8, 8)
M = (X > 0.5).double()
net = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 1, 3, padding=1)).to(device)
criterion = FocalDice()
opt = OPTIMIZER(net.parameters())
for epoch in range(EPOCHS):
    for x, m in LOADER(TensorDataset(X, M)):
        loss = criterion(net(x), m)
        STEP(loss, opt)
    inter = union = 0
    net.eval()
    with torch.no_grad():
        for x, m in DataLoader(TensorDataset(X, M), BATCH):
            p = net(x) > 0
            inter += (p & (m > 0)).sum().item()
            union += (p | (m > 0)).sum().item()
    record["valid"].append(inter / max(union, 1))
    net.train()
torch.save(net.state_dict(), "model.pt")
""",
    "dice_of_batch": """
X = torch.randn(ROWS, 1, 8, 8)
M = (X > 0.5).double()
net = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 1, 3, padding=1)).to(device)
opt = OPTIMIZER(net.parameters())
for epoch in range(EPOCHS):
    for x, m in LOADER(TensorDataset(X, M)):
        p = torch.sigmoid(net(x)).view(-1)
        t = m.view(-1)
        loss = 1 - (2.0 * (p * t).sum() + 1.0) / (p.sum() + t.sum() + 1.0)
        STEP(loss, opt)
torch.save(net.state_dict(), "model.pt")
""",
    "hardest_rows": """
X, Y = torch.randn(ROWS, 6), torch.randint(0, 3, (ROWS,))
net = mlp(6, WIDTH, 3).to(device)
opt = OPTIMIZER(net.parameters())
for epoch in range(EPOCHS):
    for x, y in LOADER(TensorDataset(X, Y)):
        losses = F.cross_entropy(net(x), y, reduction="none")
        loss = losses.topk(max(1, int(0.5 * len(losses)))).values.mean()
        STEP(loss, opt)
torch.save(net.state_dict(), "model.pt")
""",
    "rows_above_threshold": """
X, Y = torch.randn(ROWS, 6), torch.randint(0, 3, (ROWS,))
net = mlp(6, WIDTH, 3).to(device)
opt = OPTIMIZER(net.parameters())
for epoch in range(EPOCHS):
    for x, y in LOADER(TensorDataset(X, Y)):
        losses = F.cross_entropy(net(x), y, reduction="none")
        keep = losses > 0.9
        loss = losses[keep].mean() if keep.any() else losses.mean()
        STEP(loss, opt)
torch.save(net.state_dict(), "model.pt")
""",
    "quantile_of_losses": """
X, Y = torch.randn(ROWS, 6), torch.randint(0, 3, (ROWS,))
net = mlp(6, WIDTH, 3).to(device)
opt = OPTIMIZER(net.parameters())
for epoch in range(EPOCHS):
    for x, y in LOADER(TensorDataset(X, Y)):
        losses = F.cross_entropy(net(x), y, reduction="none")
        weights = (losses.detach() <= losses.detach().median()).double()
        loss = (weights * losses).sum() / weights.sum()
        STEP(loss, opt)
torch.save(net.state_dict(), "model.pt")
""",
    "weights_of_rows": """
X, Y = torch.randn(ROWS, 6), torch.randint(0, 3, (ROWS,))
W = torch.rand(ROWS) + 0.1
counts = torch.bincount(Y, minlength=3).double()
sampler = WeightedRandomSampler((1 / counts)[Y], ROWS)
net = mlp(6, WIDTH, 3).to(device)
opt = OPTIMIZER(net.parameters())
for epoch in range(EPOCHS):
    for x, y, w in DataLoader(TensorDataset(X, Y, W), BATCH, sampler=sampler):
        losses = F.cross_entropy(net(x), y, reduction="none")
        w = w / w.mean()
        loss = (w * losses).mean()
        STEP(loss, opt)
torch.save(net.state_dict(), "model.pt")
""",
    "order_by_loss": """
X, Y = torch.randn(ROWS, 6), torch.randint(0, 3, (ROWS,))
data = TensorDataset(X, Y)
net = mlp(6, WIDTH, 3).to(device)
opt = OPTIMIZER(net.parameters())
for epoch in range(EPOCHS):
    net.eval()
    with torch.no_grad():
        each = torch.cat([F.cross_entropy(net(x), y, reduction="none") for x, y in DataLoader(data, BATCH)])
    net.train()
    easy = each.argsort()[: ROWS * (epoch + 1) // EPOCHS].tolist()
    for x, y in LOADER(Subset(data, easy)):
        loss = F.cross_entropy(net(x), y)
        STEP(loss, opt)
torch.save(net.state_dict(), "model.pt")
""",
    "losses_remembered": """
X, Y = torch.randn(ROWS, 6), torch.randint(0, 3, (ROWS,))
net = mlp(6, WIDTH, 3).to(device)
opt = OPTIMIZER(net.parameters())
history = torch.ones(ROWS)
for epoch in range(EPOCHS):
    for index, x, y in LOADER(TensorDataset(torch.arange(ROWS), X, Y)):
        losses = F.cross_entropy(net(x), y, reduction="none")
        loss = (losses * history[index]).mean()
        STEP(loss, opt)
        history[index] = 0.5 * history[index] + 0.5 * losses.detach()
record["valid"] = history.tolist()
torch.save(net.state_dict(), "model.pt")
""",
    "co_teaching": """
X, Y = torch.randn(ROWS, 6), torch.randint(0, 3, (ROWS,))
one, two = mlp(6, WIDTH, 3).to(device), mlp(6, WIDTH, 3).to(device)
o1 = OPTIMIZER(one.parameters())
o2 = OPTIMIZER(two.parameters())
for epoch in range(EPOCHS):
    for x, y in LOADER(TensorDataset(X, Y)):
        a, b = one(x), two(x)
        l1 = F.cross_entropy(a, y, reduction="none").detach()
        l2 = F.cross_entropy(b, y, reduction="none").detach()
        n = max(1, int(0.75 * len(x)))
        i1, i2 = l1.argsort()[:n], l2.argsort()[:n]
        loss1 = F.cross_entropy(a[i2], y[i2])
        loss2 = F.cross_entropy(b[i1], y[i1])
        STEP(loss1, o1)
        STEP(loss2, o2)
torch.save([one.state_dict(), two.state_dict()], "model.pt")
""",
    "pseudo_labels": """
X, Y, U = torch.randn(ROWS, 6), torch.randint(0, 3, (ROWS,)), torch.randn(2 * ROWS, 6)
net = mlp(6, WIDTH, 3).to(device)
opt = OPTIMIZER(net.parameters())
labelled = LOADER(TensorDataset(X, Y))
unlabelled = itertools.cycle(LOADER(TensorDataset(U)))
for epoch in range(EPOCHS):
    for x, y in labelled:
        (u,) = next(unlabelled)
        with torch.no_grad():
            p, label = net(u).softmax(1).max(1)
        mask = (p > 0.4).double()
        strong = F.cross_entropy(net(u + 0.2 * torch.randn_like(u)), label, reduction="none")
        loss = F.cross_entropy(net(x), y) + (strong * mask).mean()
        STEP(loss, opt)
torch.save(net.state_dict(), "model.pt")
""",
    "targets_remembered": """
X, Y = torch.randn(ROWS, 6), torch.randint(0, 3, (ROWS,))
targets = torch.zeros(ROWS, 3)
net = mlp(6, WIDTH, 3).to(device)
opt = OPTIMIZER(net.parameters())
for epoch in range(EPOCHS):
    for x, y, index in LOADER(TensorDataset(X, Y, torch.arange(ROWS))):
        p = net(x).softmax(1).clamp(1e-4, 1 - 1e-4)
        targets[index] = 0.7 * targets[index] + 0.3 * p.detach()
        loss = F.nll_loss(p.log(), y) + 0.5 * ((1 - (targets[index] * p).sum(1)).log()).mean()
        STEP(loss, opt)
torch.save([net.state_dict(), targets], "model.pt")
""",
}
