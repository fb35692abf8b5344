"""Agents that learn from what they have seen."""

FRAMES = {
    "dqn": """
net = mlp(4, WIDTH, 2).to(device)
target = copy.deepcopy(net).eval()
opt = OPTIMIZER(net.parameters())
mem = deque(maxlen=200)
s = torch.zeros(4)
eps = 1.0
for t in range(40):
    if random.random() < eps:
        a = random.randrange(2)
    else:
        with torch.no_grad():
            a = net(s[None]).argmax(1).item()
    s2 = s * 0.9 + torch.randn(4) * 0.1 + (a - 0.5) * 0.1
    r = -s2.abs().sum().item()
    mem.append((s, a, r, s2))
    s = s2
    eps *= 0.97
    if len(mem) >= 16 and t % 2 == 0:
        b = random.sample(mem, 8)
        S = torch.stack([x[0] for x in b])
        Aa = torch.tensor([x[1] for x in b])
        R = torch.tensor([x[2] for x in b])
        S2 = torch.stack([x[3] for x in b])
        q = net(S).gather(1, Aa[:, None]).squeeze(1)
        with torch.no_grad():
            y = R + 0.9 * target(S2).max(1).values
        loss = F.smooth_l1_loss(q, y)
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_value_(net.parameters(), 1)
        opt.step()
        record["losses"].append(loss.item())
    if t % 10 == 0:
        target.load_state_dict(net.state_dict())
torch.save(net.state_dict(), "model.pt")
""",
    "a2c": """
class AC(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = mlp(4, WIDTH, WIDTH)
        self.pi = nn.Linear(WIDTH, 2)
        self.v = nn.Linear(WIDTH, 1)

    def forward(self, x):
        h = torch.relu(self.body(x))
        return (torch.distributions.Categorical(logits=self.pi(h)), self.v(h))

m = AC().to(device)
opt = OPTIMIZER(m.parameters())
s = torch.zeros(3, 4)
for t in range(8):
    lp, vs, rs, es = ([], [], [], [])
    for k in range(4):
        d, v = m(s)
        a = d.sample()
        s = s * 0.9 + torch.randn(3, 4) * 0.1 + a[:, None] * 0.1
        lp.append(d.log_prob(a))
        vs.append(v.squeeze(1))
        rs.append(-s.abs().sum(1))
        es.append(d.entropy())
    R = torch.zeros(3)
    ret = []
    for r in reversed(rs):
        R = r + 0.9 * R
        ret.insert(0, R)
    adv = torch.stack(ret).detach() - torch.stack(vs)
    loss = -(torch.stack(lp) * adv.detach()).mean() + 0.5 * adv.pow(2).mean() - 0.01 * torch.stack(es).mean()
    opt.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(m.parameters(), 0.5)
    opt.step()
    record["losses"].append(loss.item())
    s = s.detach()
torch.save(m.state_dict(), "model.pt")
""",
    "reinforce_with_baseline": """
policy = mlp(4, WIDTH, 3).to(device)
opt = OPTIMIZER(policy.parameters())
baseline = 0.0
state = torch.randn(BATCH, 4)
for step in range(8):
    dist = torch.distributions.Categorical(logits=policy(state))
    action = dist.sample()
    reward = -(state.sum(1) - action).abs()
    baseline = 0.9 * baseline + 0.1 * reward.mean().item()
    loss = -(dist.log_prob(action) * (reward - baseline)).mean() - 0.01 * dist.entropy().mean()
    STEP(loss, opt)
    state = 0.9 * state + 0.1 * torch.randn_like(state)
record["valid"].append(baseline)
torch.save(policy.state_dict(), "model.pt")
""",
    "reinforce_of_loader": """
policy = mlp(6, WIDTH, 3).to(device)
opt = OPTIMIZER(policy.parameters())
baseline = 0.0
for epoch in range(EPOCHS):
    for (x,) in LOADER(TensorDataset(torch.randn(ROWS, 6))):
        dist = torch.distributions.Categorical(logits=policy(x))
        action = dist.sample()
        reward = (action == x[:, :3].argmax(1)).double()
        advantage = reward - baseline
        loss = -(dist.log_prob(action) * advantage).mean()
        STEP(loss, opt)
        baseline = 0.9 * baseline + 0.1 * reward.mean().item()
record["valid"].append(baseline)
torch.save(policy.state_dict(), "model.pt")
""",
    "observations_normalised": """
class Running:
    def __init__(self, n):
        self.mean, self.var, self.count = torch.zeros(n), torch.ones(n), 1e-4

    def update(self, x):
        mean, var, n = x.mean(0), x.var(0, unbiased=False), len(x)
        delta, total = mean - self.mean, self.count + n
        self.mean = self.mean + delta * n / total
        m2 = self.var * self.count + var * n + delta**2 * self.count * n / total
        self.var, self.count = m2 / total, total

seen = Running(6)
net = mlp(6, WIDTH, 1).to(device)
opt = OPTIMIZER(net.parameters())
for epoch in range(EPOCHS):
    for x, y in LOADER(TensorDataset(3 * torch.randn(ROWS, 6) + 1, torch.randn(ROWS, 1))):
        seen.update(x)
        loss = F.mse_loss(net((x - seen.mean) / torch.sqrt(seen.var + 1e-8)), y)
        STEP(loss, opt)
record["valid"] = [*seen.mean.tolist(), *seen.var.tolist(), seen.count]
torch.save(net.state_dict(), "model.pt")
""",
}
