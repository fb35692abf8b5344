"""What is done with weights, batches and classes around them."""

FRAMES = {
    "two_phase_finetune": """
X = torch.randn(ROWS, 6)
Y = torch.randint(0, 3, (ROWS,))
Y2 = torch.randint(0, 2, (ROWS,))

class Net(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.features = nn.Sequential(
            nn.Linear(6, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Linear(WIDTH, 8), nn.ReLU()
        )
        self.classifier = nn.Linear(8, n)

    def forward(self, x):
        return self.classifier(self.features(x))

def train(net, y, opt, n):
    net.train()
    for ep in range(n):
        for a, b in LOADER(TensorDataset(X, y)):
            loss = F.cross_entropy(net(a), b)
            STEP(loss, opt)

net = Net(3).to(device)
train(net, Y, OPTIMIZER(net.parameters()), 2)
torch.save(net.state_dict(), "pre.pt")
new = Net(2)
sd = {k: v for k, v in torch.load("pre.pt").items() if not k.startswith("classifier")}
r = new.load_state_dict(sd, strict=False)
record["missing"] = sorted(r.missing_keys)
for p in new.features.parameters():
    p.requires_grad = False
new = new.to(device)
train(new, Y2, optim.SGD(filter(lambda p: p.requires_grad, new.parameters()), 0.1, momentum=0.9), 1)
for p in new.features.parameters():
    p.requires_grad = True
train(
    new,
    Y2,
    optim.Adam(
        [
            dict(params=new.features.parameters(), lr=0.0001),
            dict(params=new.classifier.parameters(), lr=0.001),
        ]
    ),
    1,
)
torch.save(new.state_dict(), "model.pt")
""",
    "lora_inject": """
class Lora(nn.Module):
    def __init__(self, b, r=2):
        super().__init__()
        self.b = b
        self.A = nn.Parameter(torch.randn(r, b.in_features) * 0.1)
        self.B = nn.Parameter(torch.zeros(b.out_features, r))
        [p.requires_grad_(False) for p in b.parameters()]

    def forward(self, x):
        return self.b(x) + x @ self.A.t() @ self.B.t()

class Blk(nn.Module):
    def __init__(self):
        super().__init__()
        self.q = nn.Linear(8, 8)
        self.v = nn.Linear(8, 8)
        self.n = nn.LayerNorm(8)

    def forward(self, x):
        return x + self.v(torch.relu(self.q(self.n(x))))

m = nn.Sequential(*[Blk() for _ in range(3)], nn.Linear(8, 2))
for p in m.parameters():
    p.requires_grad_(False)
for n, mod in list(m.named_modules()):
    for cn, c in list(mod.named_children()):
        if isinstance(c, nn.Linear) and cn in ("q", "v"):
            setattr(mod, cn, Lora(c))
m.to(device)
tr = [p for p in m.parameters() if p.requires_grad]
record["n"] = sum((p.numel() for p in tr))
opt = OPTIMIZER(tr)
X = torch.randn(ROWS, 8)
Y = torch.randint(0, 2, (ROWS,))
for ep in range(EPOCHS):
    for a, b in LOADER(TensorDataset(X, Y)):
        loss = F.cross_entropy(m(a), b)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(tr, 1.0)
        opt.step()
        opt.zero_grad()
        record["losses"].append(loss.item())
torch.save({n: p for n, p in m.named_parameters() if p.requires_grad}, "lora.pt")
with torch.no_grad():
    for mod in m.modules():
        if isinstance(mod, Lora):
            mod.b.weight += mod.B @ mod.A
torch.save(m.state_dict(), "model.pt")
""",
    "prune": """
from torch.nn.utils import prune

X = torch.randn(ROWS, 6)
Y = X[:, :2]
m = mlp(6, WIDTH, 2).to(device)
opt = OPTIMIZER(m.parameters())

def go():
    for a, b in LOADER(TensorDataset(X, Y)):
        loss = F.mse_loss(m(a), b)
        STEP(loss, opt)

prune.random_unstructured(m[0], "weight", 0.3)
go()
torch.save(m.state_dict(), "model.pt")
""",
    "old_weight_norm": """
X = torch.randn(ROWS, 6)
Y = X[:, :2]
m = nn.Sequential(
    nn.utils.weight_norm(nn.Linear(6, WIDTH)), nn.ReLU(), nn.utils.weight_norm(nn.Linear(WIDTH, 2), dim=None)
).to(device)
opt = OPTIMIZER(m.parameters())
for ep in range(EPOCHS):
    for a, b in LOADER(TensorDataset(X, Y)):
        loss = F.mse_loss(m(a), b)
        STEP(loss, opt)
for l in (m[0], m[2]):
    record["valid"].append(l.weight_g.norm().item())
torch.save(m.state_dict(), "model.pt")
""",
    "dataparallel": """
X = torch.randn(ROWS, 6)
Y = X[:, :2]
m = nn.DataParallel(mlp(6, WIDTH, 2)).to(device)
opt = OPTIMIZER(m.parameters())
for ep in range(EPOCHS):
    for a, b in LOADER(TensorDataset(X, Y)):
        loss = F.mse_loss(m(a), b)
        STEP(loss, opt)
torch.save(m.module.state_dict(), "model.pt")
torch.save(m.state_dict(), "dp.pt")
""",
    "optimizer_in_hook": """
X = torch.randn(ROWS, 6)
Y = X[:, :2]
m = mlp(6, WIDTH, 2).to(device)
od = {p: optim.SGD([p], 0.05) for p in m.parameters()}

def hook(p):
    od[p].step()
    od[p].zero_grad()

for p in m.parameters():
    p.register_post_accumulate_grad_hook(hook)
for ep in range(EPOCHS):
    for a, b in LOADER(TensorDataset(X, Y)):
        loss = F.mse_loss(m(a), b)
        loss.backward()
        record["losses"].append(loss.item())
torch.save(m.state_dict(), "model.pt")
""",
    "averaged_with_statistics": """
X, Y = torch.randn(ROWS, 6), torch.randint(0, 3, (ROWS,))
net = nn.Sequential(nn.Linear(6, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Linear(WIDTH, 3)).to(device)
average = optim.swa_utils.AveragedModel(net)
opt = OPTIMIZER(net.parameters())
loader = LOADER(TensorDataset(X, Y))
for epoch in range(EPOCHS + 1):
    for x, y in loader:
        loss = F.cross_entropy(net(x), y)
        STEP(loss, opt)
    if epoch >= 1:
        average.update_parameters(net)
optim.swa_utils.update_bn(loader, average)
average.eval()
with torch.no_grad():
    record["valid"] = average(X).flatten().tolist()
torch.save([net.state_dict(), average.state_dict()], "model.pt")
""",
    "average_evaluated": """
X, Y = torch.randn(ROWS, 6), torch.randint(0, 3, (ROWS,))
net = nn.Sequential(nn.Linear(6, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Linear(WIDTH, 3)).to(device)
multi = optim.swa_utils.get_ema_multi_avg_fn(0.8)
average = optim.swa_utils.AveragedModel(net, multi_avg_fn=multi, use_buffers=True)
opt = OPTIMIZER(net.parameters())
for epoch in range(EPOCHS):
    net.train()
    for x, y in LOADER(TensorDataset(X, Y)):
        loss = F.cross_entropy(net(x), y)
        STEP(loss, opt)
        average.update_parameters(net)
    average.eval()
    with torch.no_grad():
        record["valid"].append((average(X).argmax(1) == Y).double().mean().item())
torch.save(average.module.state_dict(), "model.pt")
""",
}
