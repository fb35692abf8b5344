"""Densities and reconstructions."""

FRAMES = {
    "vae_class": """
class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = mlp(6, WIDTH, 8)
        self.dec = mlp(4, WIDTH, 6)

    def encode(self, x):
        return self.enc(x).chunk(2, -1)

    def reparameterize(self, m, v):
        std = torch.exp(0.5 * v)
        eps = torch.randn_like(std)
        return m + eps * std

    def forward(self, x):
        m, v = self.encode(x)
        z = self.reparameterize(m, v)
        return (self.dec(z), m, v)

def loss_fn(r, x, m, v):
    return F.mse_loss(r, x, reduction="sum") - 0.5 * torch.sum(1 + v - m.pow(2) - v.exp())

X = torch.randn(ROWS, 6)
loader = LOADER(TensorDataset(X))
model = VAE().to(device)
opt = OPTIMIZER(model.parameters())
for ep in range(EPOCHS):
    model.train()
    total = 0
    for i, (x,) in enumerate(loader):
        r, m, v = model(x.to(device))
        loss = loss_fn(r, x, m, v)
        opt.zero_grad()
        loss.backward()
        total += loss.item()
        opt.step()
    record["losses"].append(total / len(loader.dataset))
    model.eval()
    with torch.no_grad():
        record["valid"].append(model.dec(torch.randn(3, 4)).sum().item())
        record["valid"].append(model.encode(X)[0].norm().item())
torch.save(model.state_dict(), "model.pt")
""",
    "tied_autoencoder": """
class AE(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = nn.Linear(10, 4)
        self.b = nn.Parameter(torch.zeros(10))

    def forward(self, x):
        h = torch.sigmoid(self.enc(x))
        return (F.linear(h, self.enc.weight.t(), self.b), h)

X = torch.rand(ROWS, 10)
m = AE().to(device)
opt = OPTIMIZER(m.parameters())
for ep in range(EPOCHS):
    for (x,) in LOADER(TensorDataset(X)):
        noisy = x * (torch.rand_like(x) > 0.3)
        r, h = m(noisy)
        rho = h.mean(0)
        kl = (0.1 * torch.log(0.1 / rho) + 0.9 * torch.log(0.9 / (1 - rho))).sum()
        loss = F.binary_cross_entropy_with_logits(r, x) + 0.0 * kl.detach()
        STEP(loss, opt)
torch.save(m.state_dict(), "model.pt")
""",
    "ddpm": """
T = 20
beta = torch.linspace(0.001, 0.05, T)
ab = torch.cumprod(1 - beta, 0)

class Eps(nn.Module):
    def __init__(self):
        super().__init__()
        self.t = nn.Embedding(T, 8)
        self.n = mlp(14, 24, 24, 6)

    def forward(self, x, t):
        return self.n(torch.cat([x, self.t(t)], 1))

X = torch.randn(ROWS, 6) * 0.5
m = Eps().to(device)
ema = copy.deepcopy(m)
opt = OPTIMIZER(m.parameters())
for ep in range(EPOCHS):
    for (x0,) in LOADER(TensorDataset(X)):
        t = torch.randint(0, T, (x0.shape[0],))
        e = torch.randn_like(x0)
        xt = ab[t][:, None].sqrt() * x0 + (1 - ab[t])[:, None].sqrt() * e
        loss = F.mse_loss(m(xt, t), e)
        STEP(loss, opt)
        with torch.no_grad():
            for a, b in zip(ema.parameters(), m.parameters()):
                a.data.mul_(0.95).add_(b.data, alpha=0.05)
    ema.eval()
    with torch.no_grad():
        x = torch.randn(4, 6)
        for k in reversed(range(3)):
            x = x - 0.1 * ema(x, torch.full((4,), k))
        record["valid"].append(x.sum().item())
torch.save([m.state_dict(), ema.state_dict()], "model.pt")
""",
    "flow": """
class Coupling(nn.Module):
    def __init__(self, flip):
        super().__init__()
        self.n = mlp(3, WIDTH, 6)
        self.flip = flip

    def forward(self, x):
        a, b = x.chunk(2, 1)
        if self.flip:
            a, b = (b, a)
        st = self.n(a)
        sc, t = (torch.tanh(st[:, :3]), st[:, 3:])
        b = b * sc.exp() + t
        return (torch.cat([b, a] if self.flip else [a, b], 1), sc.sum(1))

class Flow(nn.Module):
    def __init__(self):
        super().__init__()
        self.ls = nn.ModuleList((Coupling(i % 2 == 1) for i in range(4)))
        self.register_buffer("loc", torch.zeros(6))
        self.register_buffer("sc", torch.ones(6))

    def log_prob(self, x):
        ld = 0
        for l in self.ls:
            x, d = l(x)
            ld = ld + d
        return (
            torch.distributions.Independent(torch.distributions.Normal(self.loc, self.sc), 1).log_prob(x) + ld
        )

    def forward(self, x):
        return self.log_prob(x)

X = torch.randn(ROWS, 6).exp()
m = Flow().to(device)
opt = OPTIMIZER(m.parameters())
for ep in range(EPOCHS):
    for (x,) in LOADER(TensorDataset(X)):
        loss = -m(x).mean()
        STEP(loss, opt)
m.eval()
with torch.no_grad():
    record["valid"].append(m.log_prob(X).mean().item())
torch.save(m.state_dict(), "model.pt")
""",
    "mdn": """
from torch.distributions import *

X = torch.randn(ROWS, 2)
Y = torch.sin(X[:, :1]) + 0.1 * torch.randn(ROWS, 1)
n = mlp(2, WIDTH, 9).to(device)
opt = OPTIMIZER(n.parameters())
for ep in range(EPOCHS):
    for x, y in LOADER(TensorDataset(X, Y)):
        a, m, s = n(x).chunk(3, 1)
        d = MixtureSameFamily(Categorical(logits=a), Normal(m, F.softplus(s) + 0.01))
        loss = -d.log_prob(y.squeeze(1)).mean()
        STEP(loss, opt)
torch.save(n.state_dict(), "model.pt")
""",
    "pinn": """
net = mlp(2, WIDTH, WIDTH, 1).to(device)
opt = OPTIMIZER(net.parameters())
xy = torch.rand(40, 2)
for t in range(6):
    p = xy.clone().requires_grad_(True)
    u = net(p)
    g = torch.autograd.grad(u.sum(), p, create_graph=True)[0]
    lap = sum((torch.autograd.grad(g[:, i].sum(), p, create_graph=True)[0][:, i] for i in range(2)))
    loss = ((lap + 1) ** 2).mean() + net(xy * torch.tensor([0.0, 1.0])).pow(2).mean()
    STEP(loss, opt)
torch.save(net.state_dict(), "model.pt")
""",
    "tbptt": """
text = torch.randint(0, 12, (8, 41))

class L(nn.Module):
    def __init__(self):
        super().__init__()
        self.e = nn.Embedding(12, 8)
        self.r = nn.LSTM(8, 8, batch_first=True)
        self.o = nn.Linear(8, 12)

    def forward(self, x, h):
        y, h = self.r(self.e(x), h)
        return (self.o(y), h)

m = L().to(device)
opt = OPTIMIZER(m.parameters())
h = (torch.zeros(1, 8, 8), torch.zeros(1, 8, 8))
for i in range(0, 40, 10):
    x, y = (text[:, i : i + 10], text[:, i + 1 : i + 11])
    h = tuple((v.detach() for v in h))
    o, h = m(x, h)
    loss = F.cross_entropy(o.reshape(-1, 12), y.reshape(-1))
    m.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(m.parameters(), 0.25)
    for p in m.parameters():
        p.data.add_(p.grad, alpha=-0.5)
    record["losses"].append(loss.item())
torch.save(m.state_dict(), "model.pt")
""",
}
