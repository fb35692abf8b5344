"""Transformers: masks, caches, decoding."""

FRAMES = {
    "cache_of_keys": """
class Attention(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.qkv, self.proj = nn.Linear(n, 3 * n), nn.Linear(n, n)

    def forward(self, x, cache=None):
        q, k, v = self.qkv(x).view(x.size(0), x.size(1), 3, 2, -1).permute(2, 0, 3, 1, 4)
        if cache is not None and cache:
            k, v = torch.cat([cache[0], k], 2), torch.cat([cache[1], v], 2)
        if cache is not None:
            cache[:] = [k, v]
        y = F.scaled_dot_product_attention(q, k, v, is_causal=x.size(1) > 1)
        return self.proj(y.transpose(1, 2).flatten(2))

class Block(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(n), nn.LayerNorm(n)
        self.attention, self.mlp = Attention(n), nn.Sequential(nn.Linear(n, 2 * n), nn.GELU(), nn.Linear(2 * n, n))

    def forward(self, x, cache=None):
        x = x + self.attention(self.n1(x), cache)
        return x + self.mlp(self.n2(x))

class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(16, 8), nn.Embedding(16, 8)
        self.blocks = nn.ModuleList([Block(8) for _ in range(2)])
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 16, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, x, caches=None, start=0):
        h = self.wte(x) + self.wpe(torch.arange(start, start + x.size(1), device=x.device))
        for i, block in enumerate(self.blocks):
            h = block(h, None if caches is None else caches[i])
        return self.head(self.norm(h))

    @torch.no_grad()
    def generate(self, x, n):
        caches = [[] for _ in self.blocks]
        logits = self(x, caches)
        for _ in range(n):
            token = logits[:, -1].argmax(-1, keepdim=True)
            x = torch.cat([x, token], 1)
            logits = self(token, caches, x.size(1) - 1)
        return x

X = torch.randint(0, 16, (ROWS, 8))
model = GPT().to(device)
opt = OPTIMIZER(model.parameters())
for epoch in range(EPOCHS):
    model.train()
    for (x,) in LOADER(TensorDataset(X)):
        logits = model(x[:, :-1])
        loss = F.cross_entropy(logits.reshape(-1, 16), x[:, 1:].reshape(-1))
        STEP(loss, opt)
    model.eval()
    record["valid"].append(model.generate(X[:3, :2], 5).tolist())
torch.save(model.state_dict(), "model.pt")
""",
    "beam_search": """
class Translate(nn.Module):
    def __init__(self):
        super().__init__()
        self.src, self.tgt = nn.Embedding(12, 8, padding_idx=0), nn.Embedding(12, 8, padding_idx=0)
        self.body = nn.Transformer(8, 2, 1, 1, 16, dropout=0.1, batch_first=True)
        self.out = nn.Linear(8, 12)

    def encode(self, s):
        return self.body.encoder(self.src(s), src_key_padding_mask=s == 0)

    def decode(self, t, memory, pad):
        mask = nn.Transformer.generate_square_subsequent_mask(t.size(1), dtype=torch.float64)
        return self.out(self.body.decoder(self.tgt(t), memory, tgt_mask=mask, memory_key_padding_mask=pad))

    def forward(self, s, t):
        return self.decode(t, self.encode(s), s == 0)

@torch.no_grad()
def beam(model, s, width=3):
    memory, beams = model.encode(s), [([1], 0.0)]
    for _ in range(4):
        found = []
        for tokens, score in beams:
            logp = model.decode(torch.tensor([tokens]), memory, s == 0)[0, -1].log_softmax(-1)
            for v, i in zip(*logp.topk(width)):
                found.append((tokens + [i.item()], score + v.item()))
        beams = sorted(found, key=lambda b: -b[1])[:width]
    return beams[0]

S = torch.randint(1, 12, (ROWS, 6))
for i in range(ROWS):
    S[i, 3 + i % 4 :] = 0
T = torch.cat([torch.ones(ROWS, 1, dtype=torch.long), S.flip(1)], 1)
model = Translate().to(device)
opt = OPTIMIZER(model.parameters())
for epoch in range(EPOCHS):
    model.train()
    for s, t in LOADER(TensorDataset(S, T)):
        out = model(s, t[:, :-1])
        loss = F.cross_entropy(out.flatten(0, 1), t[:, 1:].flatten(), ignore_index=0, label_smoothing=0.1)
        STEP(loss, opt)
    model.eval()
    record["valid"].append(beam(model, S[:1]))
torch.save(model.state_dict(), "model.pt")
""",
    "masked_words": """
X = torch.randint(2, 20, (ROWS, 8))
layer = nn.TransformerEncoderLayer(8, 2, 16, 0.1, batch_first=True)
model = nn.ModuleDict(
    {"emb": nn.Embedding(20, 8), "body": nn.TransformerEncoder(layer, 2), "head": nn.Linear(8, 20)}
).to(device)
opt = OPTIMIZER(model.parameters())
for epoch in range(EPOCHS):
    for (x,) in LOADER(TensorDataset(X)):
        pick = torch.rand(x.shape) < 0.3
        labels = x.masked_fill(~pick, -100)
        out = model["head"](model["body"](model["emb"](x.masked_fill(pick, 1))))
        loss = F.cross_entropy(out.view(-1, 20), labels.view(-1), ignore_index=-100)
        STEP(loss, opt)
torch.save(model.state_dict(), "model.pt")
""",
    "preferences": """
class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.rnn = nn.Embedding(15, 8), nn.GRU(8, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, 15)

    def forward(self, x):
        return self.head(self.rnn(self.emb(x))[0])

def logp(model, x, mask):
    lp = model(x[:, :-1]).log_softmax(-1).gather(2, x[:, 1:, None]).squeeze(2)
    return (lp * mask[:, 1:]).sum(1)

A, B = torch.randint(0, 15, (ROWS, 7)), torch.randint(0, 15, (ROWS, 7))
M = (torch.arange(7)[None] < torch.tensor([3 + i % 5 for i in range(ROWS)])[:, None]).double()
policy = LM().to(device)
reference = copy.deepcopy(policy).eval().requires_grad_(False)
opt = OPTIMIZER(policy.parameters())
for epoch in range(EPOCHS):
    for a, b, m in LOADER(TensorDataset(A, B, M)):
        with torch.no_grad():
            ra, rb = logp(reference, a, m), logp(reference, b, m)
        margin = logp(policy, a, m) - ra - logp(policy, b, m) + rb
        loss = -F.logsigmoid(0.5 * margin).mean()
        STEP(loss, opt)
torch.save(policy.state_dict(), "model.pt")
""",
    "groups_of_answers": """
class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.rnn = nn.Embedding(10, 8), nn.GRU(8, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x):
        return self.head(self.rnn(self.emb(x))[0])

model = LM().to(device)
opt = OPTIMIZER(model.parameters())
for epoch in range(EPOCHS):
    for (prompt,) in LOADER(TensorDataset(torch.randint(0, 10, (ROWS, 2)))):
        x = prompt.repeat_interleave(4, 0)
        with torch.no_grad():
            for _ in range(4):
                p = model(x)[:, -1].softmax(-1)
                x = torch.cat([x, torch.multinomial(p, 1)], 1)
        reward = (x[:, 2:] == x[:, :1]).double().sum(1).view(-1, 4)
        advantage = ((reward - reward.mean(1, keepdim=True)) / (reward.std(1, keepdim=True) + 1e-4)).view(-1)
        lp = model(x[:, :-1]).log_softmax(-1).gather(2, x[:, 1:, None]).squeeze(2)[:, 1:]
        loss = -(lp.sum(1) * advantage).mean()
        STEP(loss, opt)
torch.save(model.state_dict(), "model.pt")
""",
}
