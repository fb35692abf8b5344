"""Embeddings and views of rows."""

FRAMES = {
    "triplet_columns": """
A, P, N = (torch.randn(ROWS, 6) for _ in range(3))
loader = LOADER(TensorDataset(A, P, N))
net = mlp(6, WIDTH, 4).to(device)
opt = OPTIMIZER(net.parameters())
crit = nn.TripletMarginLoss(0.5)
for ep in range(EPOCHS):
    for a, p, n in loader:
        loss = crit(net(a), net(p), net(n))
        STEP(loss, opt)
torch.save(net.state_dict(), "model.pt")
""",
    "siamese_cosine": """
A, B = (torch.randn(ROWS, 6), torch.randn(ROWS, 6))
Y = torch.randint(0, 2, (ROWS,)) * 2 - 1
net = mlp(6, WIDTH, 4).to(device)
opt = OPTIMIZER(net.parameters())
crit = nn.CosineEmbeddingLoss(0.1)
for ep in range(EPOCHS):
    for a, b, y in LOADER(TensorDataset(A, B, Y)):
        both = net(torch.cat([a, b]))
        ea, eb = (both[: len(a)], both[len(a) :])
        loss = crit(ea, eb, y)
        STEP(loss, opt)
torch.save(net.state_dict(), "model.pt")
""",
    "skipgram": """
class SG(nn.Module):
    def __init__(self):
        super().__init__()
        self.u = nn.Embedding(30, 8)
        self.v = nn.Embedding(30, 8)
        nn.init.uniform_(self.u.weight, -0.1, 0.1)
        nn.init.zeros_(self.v.weight)

    def forward(self, c, o, n):
        e = self.u(c)
        pos = F.logsigmoid((e * self.v(o)).sum(-1))
        neg = F.logsigmoid(-torch.bmm(self.v(n), e.unsqueeze(2)).squeeze(2)).sum(-1)
        return -(pos + neg).mean()

C, O, N = (torch.randint(0, 30, (ROWS,)), torch.randint(0, 30, (ROWS,)), torch.randint(0, 30, (ROWS, 5)))
m = SG().to(device)
opt = OPTIMIZER(m.parameters())
for ep in range(EPOCHS):
    for c, o, n in LOADER(TensorDataset(C, O, N)):
        loss = m(c, o, n)
        STEP(loss, opt)
torch.save(m.state_dict(), "model.pt")
record["valid"] = m.u.weight.detach().cpu().numpy()[:2].tolist()
""",
    "matrix_factorization": """
class MF(nn.Module):
    def __init__(self):
        super().__init__()
        self.U = nn.Embedding(12, 5)
        self.I = nn.Embedding(9, 5)
        self.bu = nn.Embedding(12, 1)
        self.bi = nn.Embedding(9, 1)
        self.mu = nn.Parameter(torch.zeros(()))

    def forward(self, u, i):
        return (self.U(u) * self.I(i)).sum(1) + self.bu(u).squeeze() + self.bi(i).squeeze() + self.mu

u, i, r = (torch.randint(0, 12, (ROWS,)), torch.randint(0, 9, (ROWS,)), torch.rand(ROWS) * 5)
m = MF().to(device)
opt = OPTIMIZER(m.parameters())
for ep in range(EPOCHS):
    for a, b, c in LOADER(TensorDataset(u, i, r)):
        p = m(a, b)
        loss = F.mse_loss(p, c) + 0.01 * (m.U(a).norm(dim=1).mean() + m.I(b).pow(2).sum(1).mean())
        STEP(loss, opt)
torch.save(m.state_dict(), "model.pt")
""",
    "contrastive_own_views": """
X = torch.randn(ROWS, 6)
enc = mlp(6, WIDTH, 4).to(device)
opt = OPTIMIZER(enc.parameters())
for ep in range(EPOCHS):
    for (x,) in LOADER(TensorDataset(X)):
        a, b = (
            F.normalize(enc(x + 0.1 * torch.randn_like(x))),
            F.normalize(enc(x + 0.1 * torch.randn_like(x))),
        )
        loss = F.cross_entropy(a @ b.t() / 0.5, torch.arange(len(x)))
        STEP(loss, opt)
torch.save(enc.state_dict(), "model.pt")
""",
    "byol": """
X = torch.randn(ROWS, 6)
on = mlp(6, WIDTH, 4).to(device)
pr = mlp(4, 8, 4).to(device)
tg = copy.deepcopy(on)
for p in tg.parameters():
    p.requires_grad = False
opt = OPTIMIZER(list(on.parameters()) + list(pr.parameters()))
for ep in range(EPOCHS):
    for (x,) in LOADER(TensorDataset(X)):
        a, b = (x + 0.1 * torch.randn_like(x), x + 0.1 * torch.randn_like(x))
        with torch.no_grad():
            za, zb = (tg(a), tg(b))
        loss = 2 - F.cosine_similarity(pr(on(a)), zb).mean() - F.cosine_similarity(pr(on(b)), za).mean()
        STEP(loss, opt)
        for q, k in zip(on.parameters(), tg.parameters()):
            k.data = k.data * 0.9 + q.data * 0.1
torch.save([on.state_dict(), pr.state_dict(), tg.state_dict()], "model.pt")
""",
    "graph_full_batch": """
A = (torch.rand(20, 20) < 0.2).double()
A = (A + A.t() > 0).double() + torch.eye(20)
Dn = A.sum(1).rsqrt()
A = Dn[:, None] * A * Dn[None]
X = torch.randn(20, 6)
Y = torch.randint(0, 3, (20,))
tm = torch.arange(20) < 12

class GCN(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(6, 8)
        self.b = nn.Linear(8, 3)

    def forward(self, x, adj):
        return self.b(adj @ F.dropout(F.relu(self.a(adj @ x)), 0.5, self.training))

m = GCN().to(device)
opt = OPTIMIZER(m.parameters())
for ep in range(6):
    m.train()
    loss = F.cross_entropy(m(X, A)[tm], Y[tm])
    STEP(loss, opt)
    m.eval()
    record["valid"].append((m(X, A)[~tm].argmax(1) == Y[~tm]).double().mean().item())
torch.save(m.state_dict(), "model.pt")
""",
    "distill_temp": """
X = torch.randn(ROWS, 6)
Y = torch.randint(0, 3, (ROWS,))
T = mlp(6, 32, 3).to(device)
S = mlp(6, 8, 3).to(device)
oT = OPTIMIZER(T.parameters())
for a, b in LOADER(TensorDataset(X, Y)):
    oT.zero_grad()
    F.cross_entropy(T(a), b).backward()
    oT.step()
T.eval()
oS = OPTIMIZER(S.parameters())
for ep in range(EPOCHS):
    for a, b in LOADER(TensorDataset(X, Y)):
        with torch.no_grad():
            t = T(a)
        s = S(a)
        loss = 0.5 * F.cross_entropy(s, b) + 0.5 * 4 * F.kl_div(
            F.log_softmax(s / 2, 1), F.softmax(t / 2, 1), reduction="batchmean"
        )
        STEP(loss, oS)
torch.save([T.state_dict(), S.state_dict()], "model.pt")
""",
}
