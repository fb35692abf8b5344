"""Models of words, (rows, 9) to classes of each, and of series, (rows, 7, 6) to classes."""

TOKENS = {
    "gru": """
class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(CLASSES, 12)
        self.rnn = nn.GRU(12, 12, 2, batch_first=True, dropout=0.1)
        self.head = nn.Linear(12, CLASSES)
        self.head.weight = self.emb.weight

    def forward(self, x):
        h0 = torch.zeros(2, x.size(0), 12, device=x.device)
        return self.head(self.rnn(self.emb(x), h0)[0])

model = LM()
""",
    "lstm_time_first": """
class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(CLASSES, 12, padding_idx=0)
        self.rnn = nn.LSTM(12, 16, 1)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(16, CLASSES)

    def init_hidden(self, n):
        w = next(self.parameters())
        return (w.new_zeros(1, n, 16), w.new_zeros(1, n, 16))

    def forward(self, x):
        out, _ = self.rnn(
            self.drop(self.emb(x)).transpose(0, 1).contiguous(), self.init_hidden(x.size(0))
        )
        return self.head(out).transpose(0, 1)

model = LM()
""",
    "gpt": """
class Attention(nn.Module):
    def __init__(self, n, h):
        super().__init__()
        self.qkv = nn.Linear(n, 3 * n)
        self.proj = nn.Linear(n, n)
        self.h = h
        self.drop = nn.Dropout(0.1)
        self.register_buffer("mask", torch.tril(torch.ones(16, 16)).view(1, 1, 16, 16))

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = (
            z.view(B, T, self.h, C // self.h).transpose(1, 2) for z in self.qkv(x).split(C, 2)
        )
        a = q @ k.transpose(-2, -1) / math.sqrt(k.size(-1))
        a = self.drop(F.softmax(a.masked_fill(self.mask[:, :, :T, :T] == 0, float("-inf")), -1))
        return self.proj((a @ v).transpose(1, 2).contiguous().view(B, T, C))

class Block(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.ln1 = nn.LayerNorm(n)
        self.att = Attention(n, 2)
        self.ln2 = nn.LayerNorm(n)
        self.mlp = nn.Sequential(
            nn.Linear(n, 4 * n), nn.GELU(), nn.Linear(4 * n, n), nn.Dropout(0.1)
        )

    def forward(self, x):
        x = x + self.att(self.ln1(x))
        return x + self.mlp(self.ln2(x))

class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(CLASSES, 16)
        self.wpe = nn.Embedding(16, 16)
        self.h = nn.ModuleList([Block(16) for _ in range(2)])
        self.ln = nn.LayerNorm(16)
        self.head = nn.Linear(16, CLASSES, bias=False)
        self.wte.weight = self.head.weight
        self.apply(self._init)

    def _init(self, m):
        if isinstance(m, (nn.Linear, nn.Embedding)):
            m.weight.data.normal_(0, 0.02)
        if isinstance(m, nn.Linear) and m.bias is not None:
            m.bias.data.zero_()

    def forward(self, x):
        x = self.wte(x) + self.wpe(torch.arange(x.size(1), device=x.device))
        for b in self.h:
            x = b(x)
        return self.head(self.ln(x))

model = GPT()
""",
    "seq2seq": """
class S2S(nn.Module):
    def __init__(self):
        super().__init__()
        self.src = nn.Embedding(CLASSES, 16)
        self.tgt = nn.Embedding(CLASSES, 16)
        self.t = nn.Transformer(16, 2, 1, 1, 32, dropout=0.1, batch_first=True)
        self.out = nn.Linear(16, CLASSES)

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.size(1))
        return self.out(self.t(self.src(x.flip(1)), self.tgt(x), tgt_mask=mask))

model = S2S()
""",
}
SERIES = {
    "bilstm": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(6, 8, 2, batch_first=True, bidirectional=True, dropout=0.2)
        self.fc = nn.Linear(16, CLASSES)

    def forward(self, x):
        out, (h, c) = self.rnn(x)
        return self.fc(torch.cat([h[-1], h[-2]], 1))

model = Net()
""",
    "tcn": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList(
            (nn.Conv1d(6 if i == 0 else 8, 8, 3, padding=2**i, dilation=2**i) for i in range(2))
        )
        self.norms = nn.ModuleList((nn.BatchNorm1d(8) for _ in range(2)))
        self.fc = nn.Linear(8, CLASSES)
        self.drop = nn.Dropout1d(0.2)

    def forward(self, x):
        x = x.permute(0, 2, 1)
        for c, n in zip(self.convs, self.norms):
            x = self.drop(F.relu(n(c(x))))
        return self.fc(x.mean(-1))

model = Net()
""",
    "attention": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(6, 8)
        self.att = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)
        self.query = nn.Parameter(torch.randn(1, 1, 8))
        self.fc = nn.Linear(8, CLASSES)

    def forward(self, x):
        x = self.proj(x)
        q = self.query.repeat(x.shape[0], 1, 1)
        return self.fc(self.att(q, x, x)[0].squeeze(1))

model = Net()
""",
    "time_major": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.RNN(6, 8)
        self.bn = nn.BatchNorm1d(8)
        self.fc = nn.Linear(8, CLASSES)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        out, h = self.rnn(self.drop(x.transpose(0, 1)))
        return self.fc(self.bn(h[0]))

model = Net()
""",
}
