"""Models of rows of numbers: (rows, 12) to classes or to 3 numbers."""

FEATURES = {
    "sequential": """
model = nn.Sequential(
    nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, CLASSES)
)
""",
    "batchnorm": """
model = nn.Sequential(
    nn.Linear(12, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, CLASSES)
)
""",
    "residual": """
class Block(nn.Module):
    def __init__(self, n, p=0.1):
        super().__init__()
        self.norm = nn.LayerNorm(n)
        self.up = nn.Linear(n, 2 * n)
        self.down = nn.Linear(2 * n, n)
        self.drop = nn.Dropout(p)

    def forward(self, x):
        return x + self.drop(self.down(F.silu(self.up(self.norm(x)))))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(12, 16)
        self.blocks = nn.ModuleList((Block(16) for _ in range(3)))
        self.head = nn.Linear(16, CLASSES)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        x = self.inp(x)
        for b in self.blocks:
            x = b(x)
        return self.head(x) * self.scale

model = Net()
""",
    "parametrized": """
model = nn.Sequential(
    nn.utils.parametrizations.weight_norm(nn.Linear(12, 16)),
    nn.Tanh(),
    nn.utils.parametrizations.spectral_norm(nn.Linear(16, 16)),
    nn.Tanh(),
    nn.Linear(16, CLASSES),
)
""",
    "experts": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(12, 3)
        self.experts = nn.ModuleList(
            (nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, CLASSES)) for _ in range(3))
        )

    def forward(self, x):
        g = self.gate(x).softmax(-1)
        return sum((g[:, i : i + 1] * e(x) for i, e in enumerate(self.experts)))

model = Net()
""",
    "parameters": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.ws = nn.ParameterList(
            [nn.Parameter(torch.randn(12, 16) * 0.2), nn.Parameter(torch.randn(16, CLASSES) * 0.2)]
        )
        self.bs = nn.ParameterDict(
            {"a": nn.Parameter(torch.zeros(16)), "b": nn.Parameter(torch.zeros(CLASSES))}
        )
        self.register_buffer("mean", torch.zeros(12))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        h = torch.tanh((x - self.mean) @ self.ws[0] + self.bs["a"])
        return torch.einsum("nh,hc->nc", h, self.ws[1]) + self.bs["b"]

model = Net()
""",
    "maxout_bilinear": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(12, 16, bias=False)
        self.b = nn.Linear(12, 16)
        self.mix = nn.Bilinear(16, 16, 8)
        self.out = nn.Linear(8, CLASSES)
        self.act = nn.PReLU(8)

    def forward(self, x):
        return self.out(self.act(self.mix(self.a(x), torch.sigmoid(self.b(x)))))

model = Net()
""",
    "lazy": """
model = nn.Sequential(nn.LazyLinear(16), nn.ReLU(), nn.LazyBatchNorm1d(), nn.LazyLinear(CLASSES))
model(X[:4])
""",
}
REGRESS = {
    "deep": """
model = nn.Sequential()
for i in range(3):
    model.add_module(f"l{i}", nn.Linear(12 if i == 0 else 16, 16))
    model.add_module(f"a{i}", nn.ELU())
model.add_module("out", nn.Linear(16, 3))
""",
    "gated": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.ModuleDict({"a": nn.Linear(12, 16), "b": nn.Linear(12, 16)})
        self.norm = nn.RMSNorm(16)
        self.heads = nn.ModuleList((nn.Linear(16, 1) for _ in range(3)))

    def forward(self, x):
        h = self.norm(self.body["a"](x) * torch.sigmoid(self.body["b"](x)))
        return torch.cat([head(h) for head in self.heads], 1)

model = Net()
""",
    "noisy": """
class Noisy(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.mu = nn.Parameter(torch.empty(o, i))
        self.bias = nn.Parameter(torch.zeros(o))
        nn.init.xavier_uniform_(self.mu)

    def forward(self, x):
        if self.training:
            x = x + 0.1 * torch.randn_like(x)
        return F.linear(x, self.mu, self.bias)

model = nn.Sequential(Noisy(12, 16), nn.Tanh(), Noisy(16, 16), nn.Tanh(), nn.Linear(16, 3))
""",
    "inner_loop": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(12, 16)
        self.out = nn.Linear(16, 3)

    def forward(self, x):
        h = torch.zeros(len(x), 16, device=x.device, dtype=x.dtype)
        for _ in range(3):
            h = self.cell(x, h)
        return self.out(h)

model = Net()
""",
}
