"""Tiny models whose layers ranks can split, and one training run of each, alone or over a mesh."""

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import fsdplaunch
from fsdplaunch.runtime.sharding.mesh import data_ranks
from fsdplaunch.runtime.sharding.registry import registered

STEPS, ROWS, LENGTH, WORDS = 6, 4, 12, 96
SIZES = {"vocab_size": WORDS, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, 8)).transpose(1, 2) for part in (self.q, self.k, self.v))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        result: torch.Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return result


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.attn, self.after = nn.LayerNorm(32), Attention(), nn.LayerNorm(32)
        self.up, self.down, self.gain = nn.Linear(32, 64), nn.Linear(64, 32), nn.Parameter(torch.ones(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.before(x))
        result: torch.Tensor = x + self.down(torch.relu(self.up(self.after(x))) * self.gain)
        return result


class Plain(nn.Module):
    """A model of the user's own, with its output layer tied to its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(WORDS, 32), nn.LayerNorm(32)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(32, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))[:, :-1]
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten()), logits


class Whole(Plain):
    """The same model, given positions, with its loss outside."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Embedding(32, 32)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> Any:  # type: ignore[override]
        x = self.embed(input_ids) + self.places(positions)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


PLAIN_PLAN = {
    "embed": "embedding_rowwise",
    "layers.*.attn.q": "colwise",
    "layers.*.attn.k": "colwise",
    "layers.*.attn.v": "colwise",
    "layers.*.attn.out": "rowwise",
    "layers.*.after": "sequence_parallel",
    "layers.*.up": "colwise",
    "layers.*.gain": "colwise",
    "layers.*.down": "rowwise",
}
GPT2_PLAN = {
    "transformer.h.*.attn.c_attn": "colwise_gather_output",
    "transformer.h.*.attn.c_proj": "rowwise_split_input",
    "transformer.h.*.mlp.c_fc": "colwise",
    "transformer.h.*.mlp.c_proj": "rowwise",
}


def _llama(**more: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    heads = int(os.environ.get("SPLIT_MODELS_KV_HEADS", "4"))
    return LlamaForCausalLM(LlamaConfig(**SIZES, intermediate_size=64, num_key_value_heads=heads, **more))


def _qwen3() -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = {**SIZES, "intermediate_size": 64, "num_key_value_heads": 4, "head_dim": 8}
    return Qwen3ForCausalLM(Qwen3Config(**sizes, tie_word_embeddings=True))


def _mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {**SIZES, "intermediate_size": 48, "num_key_value_heads": 4, "num_local_experts": 4}
    return MixtralForCausalLM(MixtralConfig(**sizes))


def _deepseek() -> nn.Module:
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    ranks = {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
    sizes = {**SIZES, **ranks, **experts, "intermediate_size": 48, "moe_intermediate_size": 16}
    return DeepseekV3ForCausalLM(DeepseekV3Config(**sizes, num_key_value_heads=4, first_k_dense_replace=1))


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=WORDS, n_positions=32, n_embd=32, n_layer=2, n_head=4, **dropouts)
    )


MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, str]]] = {
    "plain": (Plain, PLAIN_PLAN),
    "llama": (_llama, {}),
    "qwen3": (_qwen3, {}),
    "mixtral": (_mixtral, {}),
    "gpt2": (_gpt2, GPT2_PLAN),
    "deepseek": (_deepseek, {}),
}
"""Each with the plan that the configuration has for it; {}: the model brings its own."""


def built(name: str) -> nn.Module:
    """Return a model with values that are the same on every rank."""
    torch.manual_seed(7)
    return MODELS[name][0]().train()


def batch(step: int) -> torch.Tensor:
    """Return one step's token ids, for all ranks together."""
    starts = torch.randint(0, 9, (ROWS, 1), generator=torch.Generator().manual_seed(step))
    return starts + torch.arange(LENGTH)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-4)


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, first: int = 0, steps: int = STEPS
) -> list[float]:
    """Return the losses of all ranks together, gradients clipped by their norm in every step."""
    prepared = registered(model)
    axis = prepared.sequences.axis if prepared is not None and prepared.sequences is not None else None
    ranks = None if prepared is None else data_ranks(prepared.mesh, axis)
    losses = []
    for step in range(first, first + steps):
        ids = batch(step).to(next(model.parameters()).device)
        mine = ids if ranks is None else ids.chunk(ranks.size)[ranks.rank]
        loss = model(input_ids=mine, labels=mine)[0]
        loss.backward()
        norm = fsdplaunch.clip_grad_norm_(model, 0.1)
        assert norm > 0.1, "nothing was clipped"
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        if ranks is not None:
            dist.all_reduce(total)
            total /= dist.get_world_size()
        losses.append(total.item())
    return losses


def full_values(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return every parameter in full."""
    with torch.no_grad():
        named = fsdplaunch.named_parameters(model)
        return {n: p.full_tensor() if hasattr(p, "full_tensor") else p for n, p in named}


def difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Return the largest difference between two models."""
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)
