"""Sequences: alignments, transitions, decoding, batches of unequal lengths."""

FRAMES = {
    "ctc": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(5, WIDTH, batch_first=True, bidirectional=True)
        self.out = nn.Linear(2 * WIDTH, 6)

    def forward(self, x):
        return self.out(self.rnn(x)[0]).log_softmax(-1)

X, T = torch.randn(ROWS, 10, 5), torch.randint(1, 6, (ROWS, 4))
L = torch.tensor([1 + i % 4 for i in range(ROWS)])
net = Net().to(device)
criterion = nn.CTCLoss(blank=0, zero_infinity=True)
opt = OPTIMIZER(net.parameters())
for epoch in range(EPOCHS):
    for x, t, n in LOADER(TensorDataset(X, T, L)):
        out = net(x).permute(1, 0, 2)
        loss = criterion(out, t, torch.full((len(x),), 10, dtype=torch.long), n)
        STEP(loss, opt)
    with torch.no_grad():
        best = net(X[:4]).argmax(-1)
        record["valid"].append([[k for k, _ in itertools.groupby(row) if k] for row in best.tolist()])
torch.save(net.state_dict(), "model.pt")
""",
    "ctc_summed": """
X, T = torch.randn(ROWS, 10, 5), torch.randint(1, 6, (ROWS, 4))
L = torch.tensor([1 + i % 4 for i in range(ROWS)])
net = nn.Sequential(nn.Conv1d(5, WIDTH, 3, padding=1), nn.ReLU(), nn.Conv1d(WIDTH, 6, 1)).to(device)
opt = OPTIMIZER(net.parameters())
for epoch in range(EPOCHS):
    for x, t, n in LOADER(TensorDataset(X, T, L)):
        out = net(x.transpose(1, 2)).permute(2, 0, 1).log_softmax(-1)
        targets = torch.cat([row[:k] for row, k in zip(t, n)])
        loss = F.ctc_loss(out, targets, torch.tensor([10] * len(x)), n, reduction="sum") / len(x)
        STEP(loss, opt)
torch.save(net.state_dict(), "model.pt")
""",
    "transitions": """
class CRF(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.start, self.end = nn.Parameter(torch.randn(n) * 0.1), nn.Parameter(torch.randn(n) * 0.1)
        self.move = nn.Parameter(torch.randn(n, n) * 0.1)

    def forward(self, emissions, tags, mask):
        rows = torch.arange(len(tags))
        score = self.start[tags[:, 0]] + emissions[rows, 0, tags[:, 0]]
        alpha = self.start + emissions[:, 0]
        for t in range(1, tags.size(1)):
            step = self.move[tags[:, t - 1], tags[:, t]] + emissions[rows, t, tags[:, t]]
            score = score + step * mask[:, t]
            following = torch.logsumexp(alpha[:, :, None] + self.move + emissions[:, t, None], 1)
            alpha = torch.where(mask[:, t, None] > 0, following, alpha)
        last = mask.sum(1).long() - 1
        score = score + self.end[tags.gather(1, last[:, None]).squeeze(1)]
        return (torch.logsumexp(alpha + self.end, 1) - score).mean()

class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.rnn = nn.Embedding(20, 8), nn.GRU(8, WIDTH, batch_first=True)
        self.out, self.crf = nn.Linear(WIDTH, 4), CRF(4)

    def forward(self, x, tags, mask):
        return self.crf(self.out(self.rnn(self.emb(x))[0]), tags, mask)

X, Y = torch.randint(0, 20, (ROWS, 7)), torch.randint(0, 4, (ROWS, 7))
M = (torch.arange(7)[None] < torch.tensor([3 + i % 5 for i in range(ROWS)])[:, None]).double()
model = Tagger().to(device)
opt = OPTIMIZER(model.parameters())
for epoch in range(EPOCHS):
    for x, y, m in LOADER(TensorDataset(X, Y, M)):
        loss = model(x, y, m)
        STEP(loss, opt)
torch.save(model.state_dict(), "model.pt")
""",
    "scheduled_sampling": """
class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.cell, self.out = nn.Embedding(12, 8), nn.GRUCell(8, WIDTH), nn.Linear(WIDTH, 12)

    def forward(self, y, ratio):
        h = y.new_zeros(len(y), WIDTH, dtype=torch.float64)
        token, outs = y[:, 0], []
        for t in range(1, y.size(1)):
            h = self.cell(self.emb(token), h)
            logits = self.out(h)
            outs.append(logits)
            own = torch.rand(len(y), device=y.device) > ratio
            token = torch.where(own, logits.argmax(1), y[:, t])
        return torch.stack(outs, 1)

Y = torch.randint(0, 12, (ROWS, 6))
model = Decoder().to(device)
opt = OPTIMIZER(model.parameters())
for epoch in range(EPOCHS):
    for (y,) in LOADER(TensorDataset(Y)):
        out = model(y, 1 - 0.4 * epoch)
        loss = F.cross_entropy(out.reshape(-1, 12), y[:, 1:].reshape(-1))
        STEP(loss, opt)
torch.save(model.state_dict(), "model.pt")
""",
    "padded_in_collate": """
data = [(torch.randint(1, 20, (2 + i % 6,)), i % 2) for i in range(ROWS)]

def collate(items):
    words, labels = zip(*items)
    padded = nn.utils.rnn.pad_sequence(words, batch_first=True)
    return padded, (padded != 0), torch.tensor(labels)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.out = nn.Embedding(20, WIDTH, padding_idx=0), nn.Linear(WIDTH, 2)
        self.score = nn.Linear(WIDTH, 1)

    def forward(self, x, mask):
        h = self.emb(x)
        a = self.score(torch.tanh(h)).squeeze(-1).masked_fill(~mask, -1e9).softmax(1)
        return self.out((a[..., None] * h).sum(1))

model = Net().to(device)
opt = OPTIMIZER(model.parameters())
for epoch in range(EPOCHS):
    for x, mask, y in DataLoader(data, BATCH, shuffle=True, collate_fn=collate):
        loss = F.cross_entropy(model(x, mask), y)
        STEP(loss, opt)
torch.save(model.state_dict(), "model.pt")
""",
    "bags_of_words": """
data = [(i % 3, torch.randint(0, 30, (2 + i % 5,))) for i in range(ROWS)]

def collate(items):
    labels, texts = zip(*items)
    offsets = torch.tensor([0] + [len(t) for t in texts[:-1]]).cumsum(0)
    return torch.tensor(labels), torch.cat(texts), offsets

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.fc = nn.EmbeddingBag(30, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, text, offsets):
        return self.fc(self.embedding(text, offsets))

model = Net().to(device)
opt = OPTIMIZER(model.parameters())
for epoch in range(EPOCHS):
    for label, text, offsets in DataLoader(data, BATCH, shuffle=True, collate_fn=collate):
        loss = F.cross_entropy(model(text, offsets), label)
        STEP(loss, opt)
torch.save(model.state_dict(), "model.pt")
""",
    "batches_by_length": """
lengths = [2 + (7 * i) % 6 for i in range(ROWS)]
data = [(torch.randn(n, 4), float(n % 2)) for n in lengths]

class ByLength(Sampler):
    def __len__(self):
        return len(list(self.batches()))

    def batches(self):
        order = sorted(range(ROWS), key=lambda i: lengths[i])
        return [order[i : i + BATCH] for i in range(0, ROWS, BATCH)]

    def __iter__(self):
        batches = self.batches()
        random.shuffle(batches)
        return iter(batches)

def collate(items):
    xs, ys = zip(*items)
    return nn.utils.rnn.pad_sequence(xs, batch_first=True), torch.tensor([len(x) for x in xs]), torch.tensor(ys)

rnn, out = nn.GRU(4, WIDTH, batch_first=True).to(device), nn.Linear(WIDTH, 1).to(device)
opt = OPTIMIZER([*rnn.parameters(), *out.parameters()])
for epoch in range(EPOCHS):
    for x, n, y in DataLoader(data, batch_sampler=ByLength(), collate_fn=collate):
        h = rnn(x)[0][torch.arange(len(x)), n - 1]
        loss = F.binary_cross_entropy_with_logits(out(h).squeeze(1), y)
        STEP(loss, opt)
torch.save([rnn.state_dict(), out.state_dict()], "model.pt")
""",
    "by_number_of_words": """
X = torch.randint(0, 15, (ROWS, 8))
lengths = torch.tensor([3 + i % 6 for i in range(ROWS)])
emb, rnn = nn.Embedding(15, 8).to(device), nn.LSTM(8, WIDTH, batch_first=True).to(device)
out = nn.Linear(WIDTH, 15)
opt = OPTIMIZER([*emb.parameters(), *rnn.parameters(), *out.parameters()])
for epoch in range(EPOCHS):
    words, total = 0, 0.0
    for x, n in LOADER(TensorDataset(X, lengths)):
        logits = out(rnn(emb(x[:, :-1]))[0])
        target = x[:, 1:].masked_fill(torch.arange(1, 8)[None] >= n[:, None], -100)
        count = (target != -100).sum().item()
        loss = F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=-100, reduction="sum") / count
        STEP(loss, opt)
        words += count
torch.save([m.state_dict() for m in (emb, rnn, out)], "model.pt")
""",
}
