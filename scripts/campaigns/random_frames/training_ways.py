"""Ways of training: accumulation, checkpoints in the middle, freezing, rates by layer."""

FRAMES = {
    "rest_of_accumulation": """
X, Y = torch.randn(ROWS, 6), torch.randint(0, 3, (ROWS,))
net = mlp(6, WIDTH, 3).to(device)
opt = OPTIMIZER(net.parameters())
loader = LOADER(TensorDataset(X, Y))
for epoch in range(EPOCHS):
    opt.zero_grad()
    for i, (x, y) in enumerate(loader):
        rest = len(loader) % 3 if i >= len(loader) - len(loader) % 3 else 3
        loss = F.cross_entropy(net(x), y) / rest
        loss.backward()
        record["losses"].append(loss.item())
        if (i + 1) % 3 == 0 or i + 1 == len(loader):
            opt.step()
            opt.zero_grad()
torch.save(net.state_dict(), "model.pt")
""",
    "resumed_in_the_middle": """
X, Y = torch.randn(ROWS, 6), torch.randint(0, 3, (ROWS,))

def build():
    net = nn.Sequential(nn.Linear(6, WIDTH), nn.Dropout(0.1), nn.ReLU(), nn.Linear(WIDTH, 3)).to(device)
    return net, optim.AdamW(net.parameters(), 1e-2)

def train(net, opt, epochs):
    for epoch in range(epochs):
        for x, y in LOADER(TensorDataset(X, Y)):
            loss = F.cross_entropy(net(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            record["losses"].append(loss.item())

net, opt = build()
train(net, opt, 1)
torch.save({"net": net.state_dict(), "opt": opt.state_dict(), "rng": torch.get_rng_state()}, "middle.pt")
del net, opt
net, opt = build()
state = torch.load("middle.pt", weights_only=False)
net.load_state_dict(state["net"])
opt.load_state_dict(state["opt"])
torch.set_rng_state(state["rng"])
train(net, opt, 2)
torch.save({"net": net.state_dict(), "opt": opt.state_dict()}, "model.pt")
""",
    "rates_by_layer": """
X, Y = torch.randn(ROWS, 6), torch.randint(0, 3, (ROWS,))
net = mlp(6, WIDTH, WIDTH, 3).to(device)
groups = []
for depth, layer in enumerate(reversed([m for m in net if isinstance(m, nn.Linear)])):
    for name, p in layer.named_parameters():
        groups.append({"params": [p], "lr": 0.05 * 0.6**depth, "weight_decay": 0.0 if name == "bias" else 0.01})
opt = optim.AdamW(groups)
warm = optim.lr_scheduler.LambdaLR(opt, lambda s: min(1.0, s / 3))
for epoch in range(EPOCHS):
    for x, y in LOADER(TensorDataset(X, Y)):
        loss = F.cross_entropy(net(x), y)
        STEP(loss, opt)
        warm.step()
torch.save(net.state_dict(), "model.pt")
""",
    "gradual_unfreezing": """
X, Y = torch.randn(ROWS, 6), torch.randint(0, 3, (ROWS,))
net = mlp(6, WIDTH, WIDTH, 3).to(device)
layers = [m for m in net if isinstance(m, nn.Linear)]
net.requires_grad_(False)
opt = None
for epoch, layer in enumerate(reversed(layers)):
    layer.requires_grad_(True)
    if opt is None:
        opt = optim.Adam(filter(lambda p: p.requires_grad, net.parameters()), 1e-2)
    else:
        opt.add_param_group({"params": list(layer.parameters()), "lr": 1e-2 / (epoch + 1)})
    for x, y in LOADER(TensorDataset(X, Y)):
        loss = F.cross_entropy(net(x), y)
        STEP(loss, opt)
torch.save([net.state_dict(), opt.state_dict()], "model.pt")
""",
    "frozen_and_trained_by_turns": """
X, Y = torch.randn(ROWS, 6), torch.randint(0, 3, (ROWS,))
body, head = mlp(6, WIDTH, 8).to(device), nn.Linear(8, 3).to(device)
ob = OPTIMIZER(body.parameters())
oh = OPTIMIZER(head.parameters())
for epoch in range(EPOCHS):
    for i, (x, y) in enumerate(LOADER(TensorDataset(X, Y))):
        first = i % 2 == 0
        body.requires_grad_(first)
        head.requires_grad_(not first)
        loss = F.cross_entropy(head(body(x)), y)
        if first:
            STEP(loss, ob)
        else:
            STEP(loss, oh)
torch.save([body.state_dict(), head.state_dict()], "model.pt")
""",
    "double_and_float": """
torch.set_default_dtype(torch.float32)
X, Y = torch.randn(ROWS, 6, dtype=torch.float64), torch.randn(ROWS, 2, dtype=torch.float64)
front, back = mlp(6, WIDTH, 8).double().to(device), mlp(8, WIDTH, 2).double().to(device)
front[0].float()
opt = OPTIMIZER([*front.parameters(), *back.parameters()])
for epoch in range(EPOCHS):
    for x, y in LOADER(TensorDataset(X, Y)):
        h = front[0](x.float()).double()
        for layer in front[1:]:
            h = layer(h)
        loss = F.mse_loss(back(h), y)
        STEP(loss, opt)
torch.save([{k: v.float() for k, v in m.state_dict().items()} for m in (front, back)], "model.pt")
""",
    "stream_of_rows": """
class Stream(IterableDataset):
    def __init__(self, n):
        self.n = n

    def __iter__(self):
        g = torch.Generator().manual_seed(5)
        for _ in range(self.n):
            x = torch.randn(6, generator=g)
            yield x, x[:2].abs()

net = mlp(6, WIDTH, 2).to(device)
opt = OPTIMIZER(net.parameters())
for epoch in range(EPOCHS):
    for x, y in DataLoader(Stream(4 * BATCH), batch_size=BATCH):
        loss = F.smooth_l1_loss(net(x), y)
        STEP(loss, opt)
torch.save(net.state_dict(), "model.pt")
""",
    "clipped_by_own_norms": """
X, Y = torch.randn(ROWS, 6), torch.randint(0, 3, (ROWS,))
net = mlp(6, WIDTH, 3).to(device)
opt = OPTIMIZER(net.parameters())
norms = deque(maxlen=4)
for epoch in range(EPOCHS):
    for x, y in LOADER(TensorDataset(X, Y)):
        opt.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        total = torch.sqrt(sum(p.grad.pow(2).sum() for p in net.parameters()))
        norms.append(total.item())
        limit = sorted(norms)[len(norms) // 2]
        for p in net.parameters():
            bound = 0.1 * p.detach().norm().clamp(min=1e-3)
            p.grad.mul_(torch.clamp(bound / (p.grad.norm() + 1e-6), max=1.0))
            p.grad.mul_(min(1.0, limit / (total.item() + 1e-6)))
        opt.step()
        record["losses"].append(loss.item())
torch.save(net.state_dict(), "model.pt")
""",
}
