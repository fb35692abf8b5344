"""Networks that make weights, solvers, inner loops, codes."""

FRAMES = {
    "weights_made_by_a_network": """
class Hyper(nn.Module):
    def __init__(self):
        super().__init__()
        self.make, self.base = mlp(3, WIDTH, 6 * 4 + 4), nn.Linear(4, 1)

    def forward(self, x, z):
        w = self.make(z)
        h = torch.bmm(w[:, :24].view(-1, 4, 6), x[:, :, None]).squeeze(2) + w[:, 24:]
        return self.base(torch.relu(h)).squeeze(1)

model = Hyper().to(device)
opt = OPTIMIZER(model.parameters())
for epoch in range(EPOCHS):
    for x, z, y in LOADER(TensorDataset(torch.randn(ROWS, 6), torch.randn(ROWS, 3), torch.randn(ROWS))):
        loss = F.mse_loss(model(x, z), y)
        STEP(loss, opt)
torch.save(model.state_dict(), "model.pt")
""",
    "weights_for_a_batch": """
task, make = nn.Parameter(torch.randn(3, 5)), mlp(5, WIDTH, 6 * 2 + 2).to(device)
opt = OPTIMIZER([*make.parameters(), task])
for epoch in range(EPOCHS):
    for i, (x,) in enumerate(LOADER(TensorDataset(torch.randn(ROWS, 6)))):
        w = make(task[i % 3])
        out = F.linear(x, w[:12].view(2, 6), w[12:])
        loss = F.mse_loss(out, x[:, :2] * (i % 3))
        STEP(loss, opt)
torch.save([make.state_dict(), task.detach()], "model.pt")
""",
    "steps_of_a_solver": """
class ODE(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp(4, WIDTH, 3)
        self.calls = 0

    def forward(self, t, y):
        self.calls += 1
        return self.net(torch.cat([y, t.expand(len(y), 1)], 1))

def solve(f, y, ts):
    found = [y]
    for a, b in zip(ts[:-1], ts[1:]):
        h = b - a
        k1 = f(a, y)
        k2 = f(a + h / 2, y + h / 2 * k1)
        k3 = f(a + h / 2, y + h / 2 * k2)
        k4 = f(b, y + h * k3)
        y = y + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
        found.append(y)
    return torch.stack(found)

f, ts = ODE().to(device), torch.linspace(0, 1, 4)
opt = OPTIMIZER(f.parameters())
for epoch in range(EPOCHS):
    for y0, y1 in LOADER(TensorDataset(torch.randn(ROWS, 3), torch.randn(ROWS, 3))):
        path = solve(f, y0, ts)
        loss = (path[-1] - y1).abs().mean() + 0.01 * path.diff(dim=0).pow(2).sum(-1).mean()
        STEP(loss, opt)
record["valid"].append(f.calls)
torch.save(f.state_dict(), "model.pt")
""",
    "inner_loop_first_order": """
net = mlp(2, WIDTH, 1).to(device)
opt = OPTIMIZER(net.parameters())
for outer in range(4):
    start = copy.deepcopy(net.state_dict())
    total = {k: torch.zeros_like(v) for k, v in start.items()}
    for task in range(3):
        x = torch.randn(BATCH, 2)
        y = (x * torch.randn(2)).sum(1, keepdim=True)
        net.load_state_dict(start)
        for _ in range(2):
            loss = F.mse_loss(net(x), y)
            grads = torch.autograd.grad(loss, net.parameters())
            with torch.no_grad():
                for p, g in zip(net.parameters(), grads):
                    p.sub_(0.05 * g)
        for k, v in net.state_dict().items():
            total[k] += v / 3
    net.load_state_dict({k: start[k] + 0.5 * (total[k] - start[k]) for k in start})
    record["losses"].append(loss.item())
torch.save(net.state_dict(), "model.pt")
""",
    "inner_loop_differentiated": """
net = mlp(2, WIDTH, 1).to(device)
opt = OPTIMIZER(net.parameters())
for outer in range(4):
    losses = []
    for task in range(2):
        x = torch.randn(BATCH, 2)
        y = (x * torch.randn(2)).sum(1, keepdim=True)
        names, params = zip(*net.named_parameters())
        inner = F.mse_loss(net(x[: BATCH // 2]), y[: BATCH // 2])
        grads = torch.autograd.grad(inner, params, create_graph=True)
        fast = {n: p - 0.05 * g for n, p, g in zip(names, params, grads)}
        losses.append(F.mse_loss(torch.func.functional_call(net, fast, x[BATCH // 2 :]), y[BATCH // 2 :]))
    loss = torch.stack(losses).mean()
    STEP(loss, opt)
torch.save(net.state_dict(), "model.pt")
""",
    "codes_by_average": """
class VQ(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc, self.dec = mlp(6, WIDTH, 4), mlp(4, WIDTH, 6)
        self.register_buffer("codes", torch.randn(5, 4))
        self.register_buffer("count", torch.ones(5))
        self.register_buffer("total", self.codes.clone())

    def forward(self, x):
        z = self.enc(x)
        index = torch.cdist(z, self.codes).argmin(1)
        q = self.codes[index]
        if self.training:
            with torch.no_grad():
                hot = F.one_hot(index, 5).double()
                self.count.mul_(0.9).add_(hot.sum(0), alpha=0.1)
                self.total.mul_(0.9).add_(hot.t() @ z, alpha=0.1)
                self.codes.copy_(self.total / self.count[:, None])
        return self.dec(z + (q - z).detach()), F.mse_loss(z, q.detach())

model = VQ().to(device)
opt = OPTIMIZER(model.parameters())
for epoch in range(EPOCHS):
    for (x,) in LOADER(TensorDataset(torch.randn(ROWS, 6))):
        out, commit = model(x)
        loss = F.mse_loss(out, x) + 0.25 * commit
        STEP(loss, opt)
torch.save(model.state_dict(), "model.pt")
""",
    "codes_learnt": """
class VQ(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc, self.dec, self.codes = mlp(6, WIDTH, 4), mlp(4, WIDTH, 6), nn.Embedding(5, 4)

    def forward(self, x):
        z = self.enc(x)
        w = self.codes.weight
        d = z.pow(2).sum(1, keepdim=True) - 2 * z @ w.t() + w.pow(2).sum(1)
        q = self.codes(d.argmin(1))
        loss = F.mse_loss(q, z.detach()) + 0.25 * F.mse_loss(q.detach(), z)
        usage = F.one_hot(d.argmin(1), 5).double().mean(0)
        perplexity = torch.exp(-(usage * torch.log(usage + 1e-10)).sum())
        return self.dec(z + (q - z).detach()), loss, perplexity

model = VQ().to(device)
opt = OPTIMIZER(model.parameters())
for epoch in range(EPOCHS):
    for (x,) in LOADER(TensorDataset(torch.randn(ROWS, 6))):
        out, extra, _ = model(x)
        loss = F.mse_loss(out, x) + extra
        STEP(loss, opt)
torch.save(model.state_dict(), "model.pt")
""",
}
