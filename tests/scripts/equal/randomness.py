"""Models that draw while they train: dropout of every kind, noise, recomputation, diffusion."""

import random
import sys

import numpy as np
import torch
import torch.distributions as D
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
inputs, wanted = torch.randn(32, 5, 8), torch.randn(32, 4)


class Noisy(nn.Module):
    """Noise of parameters, as in Rainbow's networks."""

    def __init__(self, size):
        super().__init__()
        self.size = size
        self.sigma = nn.Parameter(torch.full((size,), 0.3))
        self.register_buffer("noise", torch.zeros(size))

    def drawn(self, size):
        noise = torch.randn(size)
        return noise.sign() * noise.abs().sqrt()

    def forward(self, h):
        if self.training:
            self.noise.copy_(self.drawn(self.size) + torch.randn(self.size))
        return h + self.sigma * self.noise


class Net(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.embed, self.inner, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, 0.3, batch_first=kind != "time first")
        self.recurrent = nn.LSTM(8, 8, 2, dropout=0.4)
        self.rows_first = nn.GRU(8, 8, 2, dropout=0.4, batch_first=True)
        self.channels = nn.Sequential(nn.Conv1d(5, 5, 1), nn.Dropout1d(0.3))
        self.drop, self.with_noise = nn.Dropout(0.5), Noisy(8)

    def forward(self, x):
        hidden = self.drop(self.embed(x))
        return self.last(getattr(self, self.kind.replace(" ", "_"))(hidden).mean(1))

    def time_first(self, h):
        return self.encoder(h.transpose(0, 1)).transpose(0, 1)

    def batch_first(self, h):
        return self.encoder(h)

    def lstm(self, h):
        return self.recurrent(h.transpose(0, 1))[0].transpose(0, 1)

    def gru(self, h):
        return self.rows_first(h)[0]

    def conv(self, h):
        return self.channels(h)

    def vae(self, h):
        mean = self.inner(h)
        return mean + torch.randn_like(mean) * mean.exp().clamp(max=2)

    def attention(self, h):
        q = h.view(*h.shape[:2], 2, 4).transpose(1, 2)
        out = F.scaled_dot_product_attention(q, q, q, dropout_p=0.2, is_causal=True)
        return out.transpose(1, 2).reshape(h.shape)

    def flat(self, h):
        return F.dropout(h.reshape(-1, 8), 0.4, self.training).view(h.shape)

    def recomputed(self, h):
        return checkpoint(lambda z: self.drop(self.inner(z)), h, use_reentrant=False)

    def diffusion(self, h):
        return h

    def numpy(self, h):
        return h

    def distributions(self, h):
        return h

    def attack(self, h):
        return h

    def decisions(self, h):
        return h

    def views(self, h):
        both = self.drop(torch.cat([h, 0.5 * h])) + h.repeat(2, 1, 1)
        first, second = (both + 0.1 * torch.rand_like(both)).chunk(2)
        return first - 2 * second

    def shapes(self, h):
        return h

    def noisy(self, h):
        return self.with_noise(h)

    def targets(self, h):
        return h

    def several(self, h):
        return h


def noised(x):
    with torch.no_grad():
        step = torch.randint(0, 10, (x.size(0),)).view(-1, 1, 1)
        noise = torch.randn_like(x) + torch.normal(0.0, 1.0, size=(x.size(0), 1, 8))
        noise = noise + torch.randn(x.size(0), 1, 8, generator=own) + torch.empty_like(x).normal_(generator=own)
        return x + 0.1 * step * noise * torch.rand(x.size(0), 1, 1) + torch.empty(x.size(0), 5, 1).uniform_()


def noised_by_distributions(x):
    rows = (x.size(0), 1, 8)
    noise = D.Beta(0.4, 0.4).sample(rows) + D.Gamma(2.0, 1.0).sample(rows) + D.StudentT(5.0).sample(rows)
    noise = noise + D.Poisson(3.0).sample(rows) + D.Binomial(4, torch.tensor(0.5)).sample(rows)
    noise = noise + D.LogNormal(0.0, 1.0).sample(rows) + torch.empty(rows).geometric_(0.5)
    return (
        x + 0.05 * noise + 0.01 * torch.empty_like(x).log_normal_() + 0.01 * torch.empty_like(x).cauchy_().tanh()
    )


def noised_by_numpy(x):
    step = np.random.randint(0, 10, len(x)) + np.random.normal(size=len(x)) + rng.integers(0, 3, size=len(x))
    noise = np.random.normal(0, 1, (len(x), 5, 8)) + np.random.rand(len(x), 1, 8) + np.random.uniform()
    noise = noise + rng.standard_normal((len(x), 5, 8)) * rng.random((len(x), 1, 1))
    noise = noise + np.random.beta(0.4, 0.4, (len(x), 1, 1)) + np.random.gamma(2, 1, (len(x), 1, 1))
    noise = noise + rng.beta(0.4, 0.4, size=(len(x), 1, 1)) + rng.gumbel(size=(len(x), 1, 8))
    return x + 0.1 * torch.from_numpy(step[:, None, None] * noise).float()


def decided(x):
    """Draws for the batch as a whole, and for its rows."""
    if torch.rand(1) < 0.5:
        x = x.flip(2)
    if np.random.rand(1) < 0.5:
        x = x * (1 + 0.1 * torch.empty(1).uniform_() + 0.1 * torch.randint(0, 3, (1,)))
    return x + 0.1 * torch.rand(len(x)).view(-1, 1, 1) * float(np.random.normal(size=1)[0])


def noised_by_shape(x):
    """Draws with whole numbers beside the size, by methods, by name, and into tensors of every kind."""
    flat = x.flatten(1)
    chances = flat.softmax(1)
    taken = (
        chances.multinomial(1)
        + torch.multinomial(chances, 2)[:, :1]
        + torch.randint_like(chances.argmax(1), 3)[:, None]
    )
    noise = torch.normal(flat, 1) + torch.normal(mean=flat, std=0.1) + torch.normal(0, 1, flat.shape)
    noise = noise + chances.bernoulli() + torch.sigmoid(flat).bernoulli(0.3) + torch.dropout(flat, 0.2, True)
    noise = noise + torch.Tensor(flat.size()).normal_() + torch.FloatTensor(len(x), 1).uniform_()
    noise = noise + x.new_empty(len(x), 1).normal_() + x.new(flat.size()).exponential_()
    return x + 0.02 * (noise + taken).view(x.shape)


def noised_by_several(x):
    """Several numbers for each row in one go, and several rows of one sample side by side."""
    n, k = len(x), 3
    ids = torch.multinomial(weights, n * k, replacement=True) + weights.multinomial(k * x.size(0), True)
    ids = ids + torch.multinomial(weights, num_samples=n * k, replacement=True) + torch.randint(0, 9, (n * k,))
    ids = ids + D.Categorical(weights).sample((n * k,)) + torch.tensor(random.choices(range(9), k=n * k))
    ids = ids + torch.from_numpy(np.random.choice(9, n * k) + rng.choice(9, size=n * k, replace=True))
    ids = ids.view(n, k) + D.Categorical(weights).sample((n, k)) + D.Multinomial(4, weights).sample((n,))[:, :k]
    count = n * k
    noise = torch.rand(n * k) + torch.randn(count) + torch.bernoulli(torch.full((n * k,), 0.5))
    noise = noise + torch.empty(n * k).normal_() + D.Laplace(0.0, 1.0).sample((n * k,)) + np.random.rand(n * k)
    noise = noise + D.Beta(0.4, 0.4).sample((n * k,)) + torch.normal(0.0, 1.0, (n * k,))
    drawn = (0.1 * ids + noise.view(n, k)).float().sum(1)[:, None, None]
    sides = F.dropout(x.unsqueeze(1).expand(-1, 2, -1, -1).reshape(-1, 5, 8), 0.3).view(n, 2, 5, 8)
    sides = sides + F.dropout(x.repeat_interleave(2, 0), 0.3).view(sides.shape)
    shares = F.dropout(torch.stack([x, -x]).flatten(0, 1), 0.3) + F.dropout(x.tile(2, 1, 1), 0.3)
    return x + 0.1 * drawn + 0.1 * sides.sum(1) + 0.1 * shares.view(2, n, 5, 8).diff(dim=0)[0]


def attacked(x):
    model.eval()
    noised = (x + 0.2 * torch.randn_like(x) + 0.2 * torch.randn(x.shape)).requires_grad_()
    (gradient,) = torch.autograd.grad(model(noised).pow(2).mean(), noised)
    model.train()
    return x + 0.2 * noised.detach() + 0.2 * gradient.sign()


weights = torch.rand(9)


def aimed(x):
    """Targets by the model in evaluation, of rows with noise."""
    model.eval()
    with torch.no_grad():
        aim = model(F.dropout(x, 0.3) + 0.1 * torch.randn_like(x)) + 0.1 * torch.rand(len(x), 1)
    model.train()
    return x + 0.1 * aim.sum(1)[:, None, None]


own, rng = torch.Generator().manual_seed(2), np.random.default_rng(2)
NOISES = {
    "diffusion": noised,
    "numpy": noised_by_numpy,
    "distributions": noised_by_distributions,
    "attack": attacked,
    "decisions": decided,
    "shapes": noised_by_shape,
    "several": noised_by_several,
    "targets": aimed,
}
KINDS = (
    "batch first",
    "time first",
    "lstm",
    "gru",
    "conv",
    "vae",
    "attention",
    "flat",
    "recomputed",
    "diffusion",
    "numpy",
    "distributions",
    "attack",
    "decisions",
    "shapes",
    "targets",
    "noisy",
    "views",
    "several",
)
ranks = int(sys.argv[1])
BATCHES = dict.fromkeys(KINDS, 8) | {
    "decisions of 1": ranks,
    "several": 4 * ranks,  # not as many as there are shares
    # A rank has as many rows as there are features, or positions.
    **{f"{kind} of 8": 8 * ranks for kind in ("batch first", "time first", "attention", "flat", "lstm", "noisy")},
    **{
        f"{kind} of 5": 5 * ranks
        for kind in ("batch first", "gru", "attention", "flat", "conv", "vae", "recomputed")
    },
}
for name, rows in BATCHES.items():
    kind = name.partition(" of ")[0]
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    model = Net(kind).to("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(2 if " of " in name else 1):  # as many batches
        model.train()
        for x, y in DataLoader(TensorDataset(inputs, wanted), batch_size=rows, shuffle=True):
            optimizer.zero_grad()
            F.mse_loss(model(NOISES.get(kind, nn.Identity())(x)), y).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            loss = F.mse_loss(model(inputs), wanted).item()
    after = torch.rand(1)  # for all: also where a share has one row
    print(f"{name}: {loss:.6f} {after.item():.6f}")
