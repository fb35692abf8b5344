"""Graphs, pairs and words."""

FRAMES = {
    "messages_on_a_graph": """
class Layer(nn.Module):
    def __init__(self, a, b):
        super().__init__()
        self.own, self.other = nn.Linear(a, b), nn.Linear(a, b, bias=False)

    def forward(self, x, edges):
        src, dst = edges
        out = torch.zeros(len(x), self.other.out_features, dtype=x.dtype)
        out = out.index_add(0, dst, self.other(x)[src])
        degree = torch.bincount(dst, minlength=len(x)).clamp(min=1)[:, None]
        return self.own(x) + out / degree

X, edges = torch.randn(24, 6), torch.randint(0, 24, (2, 60))
Y = torch.randint(0, 3, (24,))
train = torch.rand(24) < 0.6
a, b = Layer(6, WIDTH).to(device), Layer(WIDTH, 3).to(device)
opt = OPTIMIZER([*a.parameters(), *b.parameters()])
for epoch in range(5):
    out = b(F.dropout(F.relu(a(X, edges)), 0.2), edges)
    loss = F.cross_entropy(out[train], Y[train])
    STEP(loss, opt)
    with torch.no_grad():
        record["valid"].append((b(F.relu(a(X, edges)), edges).argmax(1) == Y)[~train].double().mean().item())
torch.save([a.state_dict(), b.state_dict()], "model.pt")
""",
    "graphs_in_batches": """
graphs = [(torch.randn(3 + i % 4, 5), torch.randint(0, 3, (2, 6)), float(i % 2)) for i in range(ROWS)]

def collate(items):
    shift, xs, es, batch = 0, [], [], []
    for i, (x, e, _) in enumerate(items):
        xs.append(x)
        es.append(e + shift)
        batch += [i] * len(x)
        shift += len(x)
    return torch.cat(xs), torch.cat(es, 1), torch.tensor(batch), torch.tensor([y for *_, y in items])

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.out = nn.Linear(5, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x, edges, batch, n):
        h = F.relu(self.a(x))
        h = F.relu(self.b(h + torch.zeros_like(h).index_add(0, edges[1], h[edges[0]])))
        return self.out(h.new_zeros(n, h.size(1)).index_add(0, batch, h)).squeeze(1)

net = Net().to(device)
opt = OPTIMIZER(net.parameters())
for epoch in range(EPOCHS):
    for x, e, batch, y in DataLoader(graphs, BATCH, shuffle=True, collate_fn=collate):
        loss = F.binary_cross_entropy_with_logits(net(x, e, batch, len(y)), y)
        STEP(loss, opt)
torch.save(net.state_dict(), "model.pt")
""",
    "links_of_a_graph": """
emb = nn.Embedding(20, WIDTH).to(device)
edges = torch.randint(0, 20, (ROWS, 2))
opt = OPTIMIZER(emb.parameters())
for epoch in range(EPOCHS):
    for (e,) in LOADER(TensorDataset(edges)):
        negative = torch.randint(0, 20, (len(e), 3))
        s = emb(e[:, 0])
        good = (s * emb(e[:, 1])).sum(1)
        bad = torch.bmm(emb(negative), s[:, :, None]).squeeze(2)
        loss = F.softplus(-good).mean() + F.softplus(bad).mean()
        STEP(loss, opt)
torch.save(emb.state_dict(), "model.pt")
""",
    "rankings_of_pairs": """
U, I = nn.Embedding(10, WIDTH).to(device), nn.Embedding(15, WIDTH).to(device)
pairs = torch.stack([torch.randint(0, 10, (ROWS,)), torch.randint(0, 15, (ROWS,))], 1)
known = {tuple(p) for p in pairs.tolist()}

class Sampled(Dataset):
    def __len__(self):
        return ROWS

    def __getitem__(self, i):
        u, good = pairs[i].tolist()
        bad = int(np.random.randint(15))
        while (u, bad) in known:
            bad = int(np.random.randint(15))
        return u, good, bad

opt = OPTIMIZER([*U.parameters(), *I.parameters()])
for epoch in range(EPOCHS):
    for u, good, bad in LOADER(Sampled()):
        a, b, c = U(u), I(good), I(bad)
        reg = (a.pow(2).sum() + b.pow(2).sum() + c.pow(2).sum()) / (2 * len(u))
        loss = -F.logsigmoid((a * b).sum(1) - (a * c).sum(1)).mean() + 1e-2 * reg
        STEP(loss, opt)
torch.save([U.state_dict(), I.state_dict()], "model.pt")
""",
    "words_from_neighbours": """
class CBOW(nn.Module):
    def __init__(self):
        super().__init__()
        self.inside, self.outside = nn.Embedding(25, WIDTH), nn.Embedding(25, WIDTH)

    def forward(self, context, word, noise):
        h = self.inside(context).mean(1)
        good = (h * self.outside(word)).sum(1)
        bad = torch.einsum("nd,nkd->nk", h, self.outside(noise))
        return -(F.logsigmoid(good) + F.logsigmoid(-bad).sum(1)).mean()

corpus = torch.randint(0, 25, (ROWS + 4,))
counts = torch.bincount(corpus, minlength=25).double() ** 0.75
C = torch.stack([torch.cat([corpus[i : i + 2], corpus[i + 3 : i + 5]]) for i in range(ROWS)])
model = CBOW().to(device)
opt = OPTIMIZER(model.parameters())
for epoch in range(EPOCHS):
    for c, w in LOADER(TensorDataset(C, corpus[2 : ROWS + 2])):
        noise = torch.multinomial(counts, len(w) * 3, replacement=True).view(len(w), 3)
        loss = model(c, w, noise)
        STEP(loss, opt)
near = F.normalize(model.inside.weight.detach(), dim=1)
record["valid"] = (near @ near.t()).topk(3).indices.tolist()
torch.save(model.state_dict(), "model.pt")
""",
}
