"""Several losses, teachers and tasks, weighted by what is learnt or measured."""

FRAMES = {
    "several_teachers": """
X, Y = torch.randn(ROWS, 6), torch.randint(0, 3, (ROWS,))
teachers = [mlp(6, WIDTH + i, 3).to(device).eval() for i in range(3)]
for t in teachers:
    t.requires_grad_(False)
student = mlp(6, WIDTH, 3).to(device)
opt = OPTIMIZER(student.parameters())
for epoch in range(EPOCHS):
    for x, y in LOADER(TensorDataset(X, Y)):
        with torch.no_grad():
            soft = torch.stack([t(x) for t in teachers]).softmax(-1).mean(0)
        out = student(x)
        loss = 0.3 * F.cross_entropy(out, y) + 0.7 * F.kl_div(out.log_softmax(1), soft, reduction="batchmean")
        STEP(loss, opt)
torch.save(student.state_dict(), "model.pt")
""",
    "features_of_teacher": """
class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.a, self.b, self.head = nn.Linear(6, width), nn.Linear(width, width), nn.Linear(width, 3)

    def forward(self, x):
        h = F.relu(self.a(x))
        h2 = F.relu(self.b(h))
        return self.head(h2), [h, h2]

X, Y = torch.randn(ROWS, 6), torch.randint(0, 3, (ROWS,))
teacher, student = Net(20).to(device).eval(), Net(WIDTH).to(device)
connect = nn.ModuleList([nn.Linear(WIDTH, 20) for _ in range(2)]).to(device)
opt = OPTIMIZER([*student.parameters(), *connect.parameters()])
for epoch in range(EPOCHS):
    for x, y in LOADER(TensorDataset(X, Y)):
        with torch.no_grad():
            _, wanted = teacher(x)
        out, features = student(x)
        loss = F.cross_entropy(out, y)
        for c, f, w in zip(connect, features, wanted):
            loss = loss + 0.1 * F.mse_loss(c(f), w)
        STEP(loss, opt)
torch.save([student.state_dict(), connect.state_dict()], "model.pt")
""",
    "relations_of_teacher": """
X = torch.randn(ROWS, 6)
teacher, student = mlp(6, 20, 5).to(device).eval(), mlp(6, WIDTH, 3).to(device)
opt = OPTIMIZER(student.parameters())
for epoch in range(EPOCHS):
    for (x,) in LOADER(TensorDataset(X)):
        with torch.no_grad():
            t = torch.pdist(teacher(x))
        s = torch.pdist(student(x))
        loss = F.smooth_l1_loss(s / s.mean(), t / t.mean())
        STEP(loss, opt)
torch.save(student.state_dict(), "model.pt")
""",
    "log_variances": """
X = torch.randn(ROWS, 6)
net = mlp(6, WIDTH, 4).to(device)
log_vars = nn.Parameter(torch.zeros(2, device=device))
opt = OPTIMIZER([*net.parameters(), log_vars])
for epoch in range(EPOCHS):
    for x, c in LOADER(TensorDataset(X, torch.randint(0, 3, (ROWS,)))):
        out = net(x)
        losses = torch.stack([F.mse_loss(out[:, 0], x[:, 0]), F.cross_entropy(out[:, 1:], c)])
        loss = (torch.exp(-log_vars) * losses + log_vars).sum()
        STEP(loss, opt)
torch.save([net.state_dict(), log_vars.detach()], "model.pt")
""",
    "grad_norm_balance": """
X = torch.randn(ROWS, 6)
body, heads = mlp(6, WIDTH, 8).to(device), nn.ModuleList([nn.Linear(8, 1) for _ in range(2)]).to(device)
weights = nn.Parameter(torch.ones(2))
opt = OPTIMIZER([*body.parameters(), *heads.parameters()])
balance = optim.Adam([weights], 0.02)
first = None
for epoch in range(EPOCHS):
    for (x,) in LOADER(TensorDataset(X)):
        h = torch.tanh(body(x))
        losses = torch.stack([F.mse_loss(m(h)[:, 0], x[:, i] ** 2) for i, m in enumerate(heads)])
        if first is None:
            first = losses.detach()
        last = body[-1].weight
        norms = torch.stack(
            [torch.autograd.grad(l, last, retain_graph=True)[0].norm() for l in losses]
        ).detach()
        rates = (losses.detach() / first) / (losses.detach() / first).mean()
        aim = norms.mean() * rates**0.5
        (weights * norms - aim).abs().sum().backward()
        balance.step()
        balance.zero_grad()
        loss = (weights.detach() * losses).sum()
        STEP(loss, opt)
record["valid"] = weights.tolist()
torch.save([body.state_dict(), heads.state_dict()], "model.pt")
""",
    "ratio_of_losses": """
X = torch.randn(ROWS, 6)
net = mlp(6, WIDTH, 2).to(device)
opt = OPTIMIZER(net.parameters())
for epoch in range(EPOCHS):
    for (x,) in LOADER(TensorDataset(X)):
        out = net(x)
        a, b = F.mse_loss(out[:, 0], x[:, 0]), F.l1_loss(out[:, 1], x[:, 1])
        loss = a + (a / (b + 1e-3)).detach() * b
        STEP(loss, opt)
torch.save(net.state_dict(), "model.pt")
""",
    "ratio_of_gradients": """
X = torch.randn(ROWS, 6)
net = mlp(6, WIDTH, 2).to(device)
opt = OPTIMIZER(net.parameters())
for epoch in range(EPOCHS):
    for (x,) in LOADER(TensorDataset(X)):
        out = net(x)
        a, b = F.mse_loss(out[:, 0], x[:, 0]), F.l1_loss(out[:, 1], x[:, 1])
        ga = torch.autograd.grad(a, net[-1].weight, retain_graph=True)[0]
        gb = torch.autograd.grad(b, net[-1].weight, retain_graph=True)[0]
        weight = (ga.norm() / (gb.norm() + 1e-4)).clamp(0, 1e4).detach()
        loss = a + weight * b
        STEP(loss, opt)
torch.save(net.state_dict(), "model.pt")
""",
    "averages_of_terms": """
X = torch.randn(ROWS, 6)
net = mlp(6, WIDTH, 2).to(device)
opt = OPTIMIZER(net.parameters())
past = []
for epoch in range(EPOCHS + 2):
    if len(past) < 2:
        weights = [1.0, 1.0]
    else:
        rates = [past[-1][i] / past[-2][i] for i in range(2)]
        total = sum(math.exp(r / 2) for r in rates)
        weights = [2 * math.exp(r / 2) / total for r in rates]
    sums = [0.0, 0.0]
    loader = LOADER(TensorDataset(X))
    for (x,) in loader:
        out = net(x)
        a, b = F.mse_loss(out[:, 0], x[:, 0]), F.l1_loss(out[:, 1], x[:, 1])
        loss = weights[0] * a + weights[1] * b
        STEP(loss, opt)
        sums[0] += a.item()
        sums[1] += b.item()
    past.append([s / len(loader) for s in sums])
torch.save(net.state_dict(), "model.pt")
""",
    "constraint_by_multiplier": """
X = torch.randn(ROWS, 6)
net = mlp(6, WIDTH, 2).to(device)
multiplier = 0.0
opt = OPTIMIZER(net.parameters())
for epoch in range(EPOCHS):
    for (x,) in LOADER(TensorDataset(X)):
        out = net(x)
        violation = F.relu(out.mean() - 0.1)
        loss = F.mse_loss(out, x[:, :2]) + multiplier * violation
        STEP(loss, opt)
        multiplier = max(0.0, multiplier + 0.5 * violation.item())
record["valid"].append(multiplier)
torch.save(net.state_dict(), "model.pt")
""",
    "reversed_gradients": """
class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, alpha):
        ctx.alpha = alpha
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad.neg() * ctx.alpha, None

S, Y, T = torch.randn(ROWS, 6), torch.randint(0, 2, (ROWS,)), torch.randn(ROWS, 6) + 0.5
body, label, domain = mlp(6, WIDTH, 8).to(device), nn.Linear(8, 2).to(device), nn.Linear(8, 2).to(device)
opt = OPTIMIZER([*body.parameters(), *label.parameters(), *domain.parameters()])
for epoch in range(EPOCHS):
    for i, ((s, y), (t,)) in enumerate(zip(LOADER(TensorDataset(S, Y)), LOADER(TensorDataset(T)))):
        alpha = 2 / (1 + math.exp(-(i + epoch))) - 1
        f, g = torch.tanh(body(s)), torch.tanh(body(t))
        d = domain(Reverse.apply(torch.cat([f, g]), alpha))
        side = torch.cat([torch.zeros(len(s)), torch.ones(len(t))]).long()
        loss = F.cross_entropy(label(f), y) + F.cross_entropy(d, side)
        STEP(loss, opt)
torch.save([m.state_dict() for m in (body, label, domain)], "model.pt")
""",
    "quantiles_and_evidence": """
X = torch.randn(ROWS, 6)
net = mlp(6, WIDTH, 3).to(device)
opt = OPTIMIZER(net.parameters())
for epoch in range(EPOCHS):
    for (x,) in LOADER(TensorDataset(X)):
        out, y = net(x), x.sum(1)
        losses = []
        for i, q in enumerate((0.1, 0.5, 0.9)):
            e = y - out[:, i]
            losses.append(torch.max((q - 1) * e, q * e).unsqueeze(1))
        loss = torch.mean(torch.sum(torch.cat(losses, dim=1), dim=1))
        STEP(loss, opt)
torch.save(net.state_dict(), "model.pt")
""",
    "variance_and_covariance": """
net = mlp(6, WIDTH, 4).to(device)
opt = OPTIMIZER(net.parameters())
for epoch in range(EPOCHS):
    for (x,) in LOADER(TensorDataset(torch.randn(ROWS, 6))):
        a, b = net(x), net(x + 0.1 * torch.randn_like(x))
        std = torch.sqrt(a.var(dim=0) + 1e-4)
        centred = a - a.mean(0)
        cov = centred.t() @ centred / (len(a) - 1)
        off = cov.pow(2).sum() - cov.diagonal().pow(2).sum()
        loss = F.mse_loss(a, b) + F.relu(1 - std).mean() + 0.05 * off / 4
        STEP(loss, opt)
torch.save(net.state_dict(), "model.pt")
""",
}
