"""A small decoder-only transformer, and training runs of it, sharded and not."""

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import fsdplaunch
from fsdplaunch import FullyShardedDataParallelPlugin
from fsdplaunch.errors import LaunchError

VOCAB = 37
BATCH = 8
LENGTH = 6


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class FeedForward(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, 2 * width, bias=False)
        self.up = nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = Norm(width)
        self.attention = Attention(width, heads)
        self.feed_forward_norm = Norm(width)
        self.feed_forward = FeedForward(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.feed_forward_norm(x))


class TinyLM(nn.Module):
    """Token ids (batch, length) -> logits (batch, length, vocabulary)."""

    def __init__(self, *, width: int = 16, layers: int = 3, heads: int = 2, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.layers = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = Norm(width)
        self.head = nn.Linear(width, VOCAB, bias=False)
        self.register_buffer("scale", torch.tensor(1.0), persistent=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) * self.scale
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def build(seed: int = 0, **options: Any) -> TinyLM:
    """A model whose weights depend on the seed only."""
    torch.manual_seed(seed)
    return TinyLM(**options)


def batch(step: int) -> torch.Tensor:
    """The global batch of a step, the same everywhere: ids of shape (BATCH, LENGTH + 1) that follow a rule."""
    ids = torch.randint(VOCAB, (BATCH, 1), generator=torch.Generator().manual_seed(1000 + step))
    for _ in range(LENGTH):
        ids = torch.cat([ids, (5 * ids[:, -1:] + 3) % VOCAB], dim=1)
    return ids


def my_part(ids: torch.Tensor) -> torch.Tensor:
    """This rank's slice of a global batch."""
    each = len(ids) // dist.get_world_size()
    return ids[dist.get_rank() * each : (dist.get_rank() + 1) * each]


def loss_of(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    logits = model(ids[:, :-1])
    return functional.cross_entropy(logits.float().reshape(-1, VOCAB), ids[:, 1:].reshape(-1))


def mean_over_ranks(value: torch.Tensor) -> float:
    total = value.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1)


def train_alone(
    model: nn.Module,
    steps: int,
    *,
    make: Callable[[Any], torch.optim.Optimizer] = adamw,
    first: int = 0,
    clip: float = 0.5,
) -> list[float]:
    """Losses of an unsharded run on whole batches, in this one process."""
    optimizer = make(model.parameters())
    losses = []
    for step in range(first, first + steps):
        loss = loss_of(model, batch(step))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train_sharded(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, *, first: int = 0, clip: float = 0.5
) -> list[float]:
    """Losses of a prepared model, each rank on its part of the same batches."""
    losses = []
    for step in range(first, first + steps):
        loss = loss_of(model, my_part(batch(step)))
        loss.backward()
        fsdplaunch.clip_grad_norm_(model, clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean_over_ranks(loss))
    return losses


def words_of(call: Callable[..., Any], *args: Any, **named: Any) -> str:
    """What a call raises, with its hint."""
    try:
        call(*args, **named)
    except (LaunchError, FileNotFoundError) as error:
        return str(error)
    return "nothing was raised"


def plugin(**fields: Any) -> FullyShardedDataParallelPlugin:
    """A plugin of FSDP2 where neither the fields nor the environment say otherwise."""
    if "FSDP_VERSION" not in os.environ:
        fields.setdefault("fsdp_version", 2)
    return FullyShardedDataParallelPlugin(**fields)
