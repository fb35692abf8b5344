"""Models that train against each other or against their inputs."""

FRAMES = {
    "gan_hinge_r1": """
X = torch.randn(ROWS, 6) * 2
loader = LOADER(TensorDataset(X))
G = mlp(3, WIDTH, 6).to(device)
D = nn.Sequential(nn.utils.spectral_norm(nn.Linear(6, WIDTH)), nn.LeakyReLU(0.2), nn.Linear(WIDTH, 1)).to(
    device
)
oG = OPTIMIZER(G.parameters())
oD = OPTIMIZER(D.parameters())
step = 0
for ep in range(EPOCHS):
    for (real,) in loader:
        real = real.to(device)
        z = torch.randn(real.size(0), 3, device=device)
        oD.zero_grad()
        lossD = F.relu(1 - D(real)).mean() + F.relu(1 + D(G(z).detach())).mean()
        if step % 2 == 0:
            r = real.clone().requires_grad_(True)
            (g,) = torch.autograd.grad(D(r).sum(), r, create_graph=True)
            lossD = lossD + 5 * g.pow(2).sum(1).mean()
        lossD.backward()
        oD.step()
        oG.zero_grad()
        lossG = -D(G(torch.randn(real.size(0), 3, device=device))).mean()
        lossG.backward()
        oG.step()
        record["losses"].append([lossD.item(), lossG.item()])
        step += 1
torch.save({"G": G.state_dict(), "D": D.state_dict(), "oG": oG.state_dict()}, "model.pt")
""",
    "adversarial_training": """
X = torch.randn(ROWS, 6)
Y = torch.randint(0, 2, (ROWS,))
m = nn.Sequential(nn.Linear(6, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Linear(WIDTH, 2)).to(device)
opt = OPTIMIZER(m.parameters())

def pgd(x, y):
    d = torch.empty_like(x).uniform_(-0.1, 0.1)
    for _ in range(EPOCHS):
        d.requires_grad_(True)
        l = F.cross_entropy(m(x + d), y)
        l.backward()
        d = (d + 0.05 * d.grad.sign()).clamp(-0.1, 0.1).detach()
    return x + d

for ep in range(EPOCHS):
    for x, y in LOADER(TensorDataset(X, Y)):
        m.eval()
        xa = pgd(x, y)
        m.train()
        loss = F.cross_entropy(m(xa), y)
        STEP(loss, opt)
torch.save(m.state_dict(), "model.pt")
""",
    "ebm": """
X = torch.randn(ROWS, 4)
E = mlp(4, WIDTH, 1, act=nn.SiLU).to(device)
opt = OPTIMIZER(E.parameters())
for ep in range(EPOCHS):
    for (x,) in LOADER(TensorDataset(X)):
        z = torch.rand_like(x) * 2 - 1
        z.requires_grad_(True)
        for p in E.parameters():
            p.requires_grad = False
        for k in range(EPOCHS):
            g = torch.autograd.grad(E(z).sum(), z)[0]
            z = (z - 0.1 * g + 0.01 * torch.randn_like(z)).detach().requires_grad_(True)
        for p in E.parameters():
            p.requires_grad = True
        ep_, en = (E(x), E(z.detach()))
        loss = ep_.mean() - en.mean() + 0.1 * (ep_**2 + en**2).mean()
        STEP(loss, opt)
torch.save(E.state_dict(), "model.pt")
""",
    "sgld_param_noise": """
X = torch.randn(ROWS, 6)
Y = X[:, :2]
m = mlp(6, WIDTH, 2).to(device)
for ep in range(EPOCHS):
    for a, b in LOADER(TensorDataset(X, Y)):
        m.zero_grad()
        loss = F.mse_loss(m(a), b)
        loss.backward()
        with torch.no_grad():
            for p in m.parameters():
                p.sub_(0.01 * p.grad)
                p.add_(torch.randn_like(p) * 0.01)
        record["losses"].append(loss.item())
torch.save(m.state_dict(), "model.pt")
""",
    "gradient_surgery_norms": """
X = torch.randn(ROWS, 6)
m = mlp(6, WIDTH, 2).to(device)
opt = OPTIMIZER(m.parameters())
for ep in range(EPOCHS):
    for (x,) in LOADER(TensorDataset(X)):
        o = m(x)
        l1, l2 = (F.mse_loss(o[:, 0], x[:, 0]), F.mse_loss(o[:, 1], x[:, 1]))
        g1 = torch.autograd.grad(l1, list(m.parameters()), retain_graph=True)
        g2 = torch.autograd.grad(l2, list(m.parameters()))
        dot = sum(((a * b).sum() for a, b in zip(g1, g2)))
        for p, a, b in zip(m.parameters(), g1, g2):
            p.grad = a + b if dot > 0 else a + 0.5 * b
        opt.step()
        opt.zero_grad()
torch.save(m.state_dict(), "model.pt")
""",
    "ste_quant": """
class Round(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, s):
        ctx.save_for_backward(x, s)
        return torch.round(x / s).clamp(-8, 7) * s

    @staticmethod
    def backward(ctx, g):
        x, s = ctx.saved_tensors
        q = x / s
        inside = ((q >= -8) & (q <= 7)).to(g.dtype)
        return (g * inside, (g * (torch.round(q).clamp(-8, 7) - q * inside)).sum().reshape(s.shape))

class QLinear(nn.Linear):
    def __init__(self, *a):
        super().__init__(*a)
        self.scale = nn.Parameter(torch.tensor(0.05))

    def forward(self, x):
        return F.linear(x, Round.apply(self.weight, self.scale), self.bias)

X = torch.randn(ROWS, 6)
Y = X[:, :2]
m = nn.Sequential(QLinear(6, WIDTH), nn.ReLU(), QLinear(WIDTH, 2)).to(device)
opt = OPTIMIZER(m.parameters())
for ep in range(EPOCHS):
    for a, b in LOADER(TensorDataset(X, Y)):
        loss = F.mse_loss(m(a), b)
        STEP(loss, opt)
torch.save(m.state_dict(), "model.pt")
""",
    "uncertainty_weights": """
class Auto(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.p = nn.Parameter(torch.ones(n))

    def forward(self, *ls):
        return sum((0.5 / p**2 * l + torch.log(1 + p**2) for p, l in zip(self.p, ls)))

X = torch.randn(ROWS, 6)
loader = LOADER(TensorDataset(X, X[:, :1] ** 2, (X[:, 1] > 0).long()))
body = mlp(6, WIDTH, WIDTH).to(device)
h1 = nn.Linear(WIDTH, 1).to(device)
h2 = nn.Linear(WIDTH, 2).to(device)
awl = Auto(2)
opt = optim.Adam(
    [
        dict(params=itertools.chain(body.parameters(), h1.parameters(), h2.parameters())),
        dict(params=awl.parameters(), weight_decay=0),
    ],
    0.01,
)
for ep in range(EPOCHS):
    for x, y, c in loader:
        h = torch.tanh(body(x))
        loss = awl(F.mse_loss(h1(h), y), F.cross_entropy(h2(h), c))
        STEP(loss, opt)
torch.save([m.state_dict() for m in (body, h1, h2, awl)], "model.pt")
""",
    "center_loss": """
class Center(nn.Module):
    def __init__(self):
        super().__init__()
        self.c = nn.Parameter(torch.randn(3, 8))

    def forward(self, f, y):
        return (f - self.c[y]).pow(2).sum(1).mean() / 2

X = torch.randn(ROWS, 6)
Y = torch.randint(0, 3, (ROWS,))
net = mlp(6, WIDTH, 8).to(device)
head = nn.Linear(8, 3).to(device)
cl = Center().to(device)
o1 = optim.SGD(list(net.parameters()) + list(head.parameters()), 0.1)
o2 = OPTIMIZER(cl.parameters())
for ep in range(EPOCHS):
    for x, y in LOADER(TensorDataset(X, Y)):
        f = net(x)
        loss = F.cross_entropy(head(f), y) + 0.1 * cl(f, y)
        o1.zero_grad()
        o2.zero_grad()
        loss.backward()
        for p in cl.parameters():
            p.grad.data *= 10.0
        o1.step()
        o2.step()
        record["losses"].append(loss.item())
torch.save([net.state_dict(), head.state_dict(), cl.state_dict()], "model.pt")
""",
}
