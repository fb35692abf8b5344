"""Batches of other kinds."""

FRAMES = {
    "prefetcher_tqdm": """
class Prefetch:
    def __init__(self, l):
        self.l = l

    def __len__(self):
        return len(self.l)

    def __iter__(self):
        it = iter(self.l)
        nxt = next(it, None)
        while nxt is not None:
            cur = nxt
            nxt = next(it, None)
            yield tuple((t.to(device, non_blocking=True) for t in cur))

from tqdm import tqdm

X = torch.randn(40, 6)
Y = X[:, :2]
m = mlp(6, WIDTH, 2).to(device)
opt = OPTIMIZER(m.parameters())
L = Prefetch(LOADER(TensorDataset(X, Y)))
for ep in range(EPOCHS):
    for i, (a, b) in enumerate(tqdm(L, disable=True)):
        loss = F.mse_loss(m(a), b)
        STEP(loss, opt)
torch.save(m.state_dict(), "model.pt")
""",
    "batch_object": """
class Batch:
    def __init__(self, items):
        self.x = torch.stack([i[0] for i in items])
        self.y = torch.stack([i[1] for i in items])
        self.names = [i[2] for i in items]
        self.num = len(items)

    def to(self, d):
        self.x, self.y = (self.x.to(d), self.y.to(d))
        return self

class DS(Dataset):
    def __init__(self):
        self.x = torch.randn(ROWS, 6)

    def __len__(self):
        return ROWS

    def __getitem__(self, i):
        return (self.x[i], self.x[i, :2] ** 2, f"row{i}")

m = mlp(6, WIDTH, 2).to(device)
opt = OPTIMIZER(m.parameters())
for ep in range(EPOCHS):
    for b in DataLoader(DS(), BATCH, shuffle=True, collate_fn=Batch):
        b = b.to(device)
        loss = F.mse_loss(m(b.x), b.y)
        STEP(loss, opt)
torch.save(m.state_dict(), "model.pt")
""",
    "packed": """
from torch.nn.utils.rnn import *

seqs = [torch.randn(3 + i % 5, 4) for i in range(ROWS)]
ys = torch.randint(0, 2, (ROWS,))

def col(b):
    b.sort(key=lambda t: len(t[0]), reverse=True)
    s, y = zip(*b)
    return (pad_sequence(s, batch_first=True), torch.tensor([len(t) for t in s]), torch.stack(y))

class R(nn.Module):
    def __init__(self):
        super().__init__()
        self.r = nn.GRU(4, 8, batch_first=True, bidirectional=True)
        self.o = nn.Linear(16, 2)

    def forward(self, x, l):
        o, h = self.r(pack_padded_sequence(x, l.cpu(), batch_first=True))
        o, _ = pad_packed_sequence(o, batch_first=True)
        return self.o(torch.cat([h[0], h[1]], 1) + o.sum(1) / l[:, None])

m = R().to(device)
opt = OPTIMIZER(m.parameters())
for ep in range(EPOCHS):
    for x, l, y in DataLoader(list(zip(seqs, ys)), BATCH, shuffle=True, collate_fn=col):
        loss = F.cross_entropy(m(x, l), y)
        STEP(loss, opt)
torch.save(m.state_dict(), "model.pt")
""",
    "ragged_mask": """
seqs = torch.randn(ROWS, 7, 4)
L = torch.tensor([2 + i % 6 for i in range(ROWS)])
T = seqs.cumsum(1)[:, :, :1]
m = nn.GRU(4, 6, batch_first=True).to(device)
h = nn.Linear(6, 1).to(device)
opt = OPTIMIZER([*m.parameters(), *h.parameters()])
for ep in range(EPOCHS):
    for x, l, t in LOADER(TensorDataset(seqs, L, T)):
        mask = (torch.arange(7)[None] < l[:, None]).double()
        o = h(m(x)[0])
        loss = (((o - t) ** 2).squeeze(-1) * mask).sum() / mask.sum()
        STEP(loss, opt)
torch.save([m.state_dict(), h.state_dict()], "model.pt")
""",
    "microbatch_weighted": """
X = torch.randn(ROWS, 6)
Y = X[:, :2]
m = mlp(6, WIDTH, 2).to(device)
opt = OPTIMIZER(m.parameters())
for ep in range(EPOCHS):
    for a, b in DataLoader(TensorDataset(X, Y), WIDTH, shuffle=True):
        opt.zero_grad()
        tot = 0
        for x, y in zip(a.split(4), b.split(4)):
            loss = F.mse_loss(m(x), y) * len(x) / len(a)
            loss.backward()
            tot += loss.item()
        opt.step()
        record["losses"].append(tot)
torch.save(m.state_dict(), "model.pt")
""",
}
