"""Rewards: buffers, advantages, critics."""

FRAMES = {
    "ppo_of_loader": """
class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.actor, self.critic = mlp(4, WIDTH, 3), mlp(4, WIDTH, 1)

    def forward(self, s, a):
        dist = torch.distributions.Categorical(logits=self.actor(s))
        return dist.log_prob(a), dist.entropy(), self.critic(s).squeeze(1)

model = ActorCritic().to(device)
opt = OPTIMIZER(model.parameters())
for update in range(EPOCHS):
    states = torch.randn(ROWS, 4)
    with torch.no_grad():
        dist = torch.distributions.Categorical(logits=model.actor(states))
        actions = dist.sample()
        old = dist.log_prob(actions)
        values = model.critic(states).squeeze(1)
    returns = -(states.sum(1) - actions).abs()
    data = TensorDataset(states, actions, old, returns, returns - values)
    for s, a, o, r, adv in LOADER(data):
        adv = (adv - adv.mean()) / (adv.std() + 1e-8)
        new, entropy, value = model(s, a)
        ratio = (new - o).exp()
        clipped = torch.min(ratio * adv, ratio.clamp(0.8, 1.2) * adv)
        loss = -clipped.mean() + 0.5 * (value - r).pow(2).mean() - 0.01 * entropy.mean()
        STEP(loss, opt)
torch.save(model.state_dict(), "model.pt")
""",
    "ppo_of_slices": """
actor, critic = mlp(4, WIDTH, 3).to(device), mlp(4, WIDTH, 1).to(device)
opt = OPTIMIZER([*actor.parameters(), *critic.parameters()])
state = torch.randn(4, 4)
for update in range(EPOCHS):
    buffer = defaultdict(list)
    for t in range(8):
        with torch.no_grad():
            dist = torch.distributions.Categorical(logits=actor(state))
            action, value = dist.sample(), critic(state).squeeze(-1)
        reward = -(state.sum(1) - action).abs()
        for name, v in dict(s=state, a=action, l=dist.log_prob(action), r=reward, v=value).items():
            buffer[name].append(v)
        state = 0.9 * state + 0.2 * torch.randn_like(state)
    b = {name: torch.stack(v) for name, v in buffer.items()}
    adv, last = torch.zeros_like(b["r"]), 0
    for t in reversed(range(8)):
        following = b["v"][t + 1] if t < 7 else 0
        last = b["r"][t] + 0.9 * following - b["v"][t] + 0.9 * 0.95 * last
        adv[t] = last
    b["ret"], b["adv"] = adv + b["v"], adv
    b = {name: v.flatten(0, 1) for name, v in b.items()}
    indices = np.arange(32)
    for k in range(2):
        np.random.shuffle(indices)
        for start in range(0, 32, BATCH):
            mb = indices[start : start + BATCH]
            a = b["adv"][mb]
            a = (a - a.mean()) / (a.std() + 1e-8)
            dist = torch.distributions.Categorical(logits=actor(b["s"][mb]))
            ratio = (dist.log_prob(b["a"][mb]) - b["l"][mb]).exp()
            with torch.no_grad():
                kl = ((ratio - 1) - ratio.log()).mean().item()
            policy = torch.max(-a * ratio, -a * ratio.clamp(0.8, 1.2)).mean()
            value = 0.5 * ((critic(b["s"][mb]).squeeze(-1) - b["ret"][mb]) ** 2).mean()
            loss = policy + 0.5 * value - 0.01 * dist.entropy().mean()
            STEP(loss, opt)
        if kl > 0.5:
            break
    record["valid"].append(kl)
torch.save([actor.state_dict(), critic.state_dict()], "model.pt")
""",
    "soft_actor_critic": """
class Buffer:
    def __init__(self):
        self.s, self.a, self.r = np.zeros((64, 3)), np.zeros((64, 1)), np.zeros(64)
        self.n = 0

    def add(self, s, a, r):
        self.s[self.n % 64], self.a[self.n % 64], self.r[self.n % 64] = s, a, r
        self.n += 1

    def sample(self, k):
        i = np.random.randint(0, min(self.n, 63), size=k)
        return [torch.as_tensor(v) for v in (self.s[i], self.a[i], self.r[i], self.s[i + 1])]

actor = mlp(3, WIDTH, 2, act=nn.ReLU).to(device)
q1, q2 = mlp(4, WIDTH, 1).to(device), mlp(4, WIDTH, 1).to(device)
t1, t2 = copy.deepcopy(q1), copy.deepcopy(q2)
log_alpha = torch.zeros(1, requires_grad=True, device=device)
oa = OPTIMIZER(actor.parameters())
oq = OPTIMIZER([*q1.parameters(), *q2.parameters()])
ot = optim.Adam([log_alpha], 1e-2)

def act(s):
    mean, log_std = actor(s).chunk(2, -1)
    normal = torch.distributions.Normal(mean, log_std.clamp(-5, 2).exp())
    u = normal.rsample()
    return torch.tanh(u), (normal.log_prob(u) - torch.log(1 - torch.tanh(u) ** 2 + 1e-6)).sum(-1)

memory, s = Buffer(), np.zeros(3)
for t in range(30):
    with torch.no_grad():
        a = act(torch.as_tensor(s)[None])[0][0].numpy()
    memory.add(s, a, -np.abs(s).sum())
    s = 0.9 * s + 0.1 * np.random.randn(3) + 0.1 * a
    if t < 16 or t % 2:
        continue
    S, A, R, N = memory.sample(BATCH)
    alpha = log_alpha.exp().detach()
    with torch.no_grad():
        an, lp = act(N)
        n = torch.cat([N, an], 1)
        target = R + 0.9 * (torch.min(t1(n), t2(n)).squeeze(1) - alpha * lp)
    sa = torch.cat([S, A], 1)
    loss = F.mse_loss(q1(sa).squeeze(1), target) + F.mse_loss(q2(sa).squeeze(1), target)
    STEP(loss, oq)
    an, lp = act(S)
    n = torch.cat([S, an], 1)
    la = (alpha * lp - torch.min(q1(n), q2(n)).squeeze(1)).mean()
    oa.zero_grad()
    la.backward()
    oa.step()
    lt = -(log_alpha.exp() * (lp.detach() - 1.0)).mean()
    ot.zero_grad()
    lt.backward()
    ot.step()
    for net, tgt in ((q1, t1), (q2, t2)):
        for p, q in zip(net.parameters(), tgt.parameters()):
            q.data.copy_(0.05 * p.data + 0.95 * q.data)
record["valid"].append(log_alpha.item())
torch.save([m.state_dict() for m in (actor, q1, q2, t1, t2)], "model.pt")
""",
    "twin_delayed": """
actor, critics = mlp(3, WIDTH, 1).to(device), nn.ModuleList([mlp(4, WIDTH, 1) for _ in range(2)]).to(device)
actor_target, critics_target = copy.deepcopy(actor), copy.deepcopy(critics)
oa = OPTIMIZER(actor.parameters())
oc = OPTIMIZER(critics.parameters())
for t in range(8):
    S, A, N = torch.randn(BATCH, 3), torch.rand(BATCH, 1), torch.randn(BATCH, 3)
    R = -S.abs().sum(1, keepdim=True)
    with torch.no_grad():
        noise = (torch.randn_like(A) * 0.2).clamp(-0.5, 0.5)
        n = torch.cat([N, (actor_target(N) + noise).clamp(-1, 1)], 1)
        target = R + 0.9 * torch.min(*[c(n) for c in critics_target])
    loss = sum(F.mse_loss(c(torch.cat([S, A], 1)), target) for c in critics)
    STEP(loss, oc)
    if t % 2 == 0:
        la = -critics[0](torch.cat([S, actor(S)], 1)).mean()
        oa.zero_grad()
        la.backward()
        oa.step()
        for net, tgt in ((actor, actor_target), (critics, critics_target)):
            for p, q in zip(net.parameters(), tgt.parameters()):
                q.data.lerp_(p.data, 0.05)
torch.save([actor.state_dict(), critics.state_dict(), actor_target.state_dict()], "model.pt")
""",
}
