"""Decoders of transformers, by `model_type`: parameter shapes and what activations depend on.

Of other models only what is kept and gathered is counted.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from fsdplaunch.display_text import quoted
from fsdplaunch.errors import UsageError

Shapes = dict[str, tuple[int, ...]]
MOST = 2**31
"""No dimension of a model comes near it."""
MOST_BLOCKS = 4096  # each one is written out, with its tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationShape:
    """What activations depend on."""

    hidden: int  # width of the residual stream
    layers: int  # blocks
    heads: int  # elements of a token's queries: heads times head size
    keys: int  # elements of a token's keys
    ffn: int  # width inside the feed-forward part, times the experts each token visits
    vocab: int  # width of the output; 0 for a model without a head over the vocabulary
    norms: int = 2  # norms of a block that see the whole residual stream
    head_norms: int = 0  # norms of a block that see queries and keys
    eager: int = 0  # heads whose attention weights are kept in full, where no fused attention is used; 0 otherwise
    head_count: int = 0  # heads of queries; 0 where the configuration does not say
    max_length: int = 0  # longest sequence; 0 where none is set
    capped: bool = False  # whether logits and attention scores are squeezed through tanh


class ConfigNumbers:
    """Numbers of a configuration; a missing one is an error that names it."""

    def __init__(self, config: Mapping[str, Any], source: str) -> None:
        self.config, self.source = config, source

    def __call__(self, *names: str, default: int | None = None) -> int:
        """Return the first of these numbers that is there; a ValueError for one that no model can have."""
        name = next((each for each in names if self.config.get(each) is not None), None)
        if name is None:
            if default is None:
                msg = f"{self.source} has no {names[0]}"
                raise UsageError(msg, hint="give the config.json that belongs to the model")
            return default
        value, least, most = self.config[name], 0 if default == 0 else 1, MOST_BLOCKS if "layer" in name else MOST
        if isinstance(value, int) and not isinstance(value, bool) and least <= value <= most:
            return value
        shown = quoted(value) if isinstance(value, str) else type(value).__name__
        if isinstance(value, int | float):
            shown = str(value) if abs(value) < 10 * MOST else f"{'-' if value < 0 else ''}more than {10 * MOST}"
        msg = f"{name} is {shown}, and not a whole number from {least} to {most}"
        raise ValueError(msg)

    def flag(self, name: str, *, default: bool) -> bool:
        """Return whether something is switched on."""
        value = self.config.get(name)
        return default if value is None else bool(value)


Answer = tuple[Shapes, ActivationShape, dict[str, int]]
Family = Callable[..., Answer]


def _linear(name: str, out: int, into: int, *, bias: bool = True) -> Shapes:
    return {f"{name}.weight": (out, into)} | ({f"{name}.bias": (out,)} if bias else {})


Trait = Literal[
    "qkv_bias", "head_norm", "wide_norm", "post_norms", "after_only", "tied", "experts", "fused", "capped"
]
"""How a family of decoders differs from Llama."""


def _decoder(*kind: Trait) -> Family:
    """Describe Llama and what is built like it."""

    def family(read: ConfigNumbers, *, has_head: bool) -> Answer:
        h, vocab = read("hidden_size"), read("vocab_size")
        heads = read("num_attention_heads")
        size = read("head_dim", default=h // heads)
        q, kv = heads * size, read("num_key_value_heads", default=heads) * size
        layers = read("num_hidden_layers")
        ffn = (
            read("moe_intermediate_size", "intermediate_size") if "experts" in kind else read("intermediate_size")
        )
        block = _attention(read, kind, (h, q, kv), size) | _feed_forward(read, kind, h, ffn)
        shapes: Shapes = {"model.embed_tokens.weight": (vocab, h)}
        for number in range(layers):
            shapes |= {f"model.layers.{number}.{name}": shape for name, shape in block.items()}
        shapes["model.norm.weight"] = (h,)
        if has_head and not read.flag("tie_word_embeddings", default="tied" in kind):
            shapes["lm_head.weight"] = (vocab, h)
        shape = ActivationShape(
            hidden=h, layers=layers, heads=q, keys=kv, vocab=vocab if has_head else 0,
            ffn=ffn * (read("num_experts_per_tok") if "experts" in kind else 1),
            norms=4 if "post_norms" in kind else 2, head_norms=2 if {"head_norm", "wide_norm"} & {*kind} else 0,
            max_length=read("max_position_embeddings", default=0), capped="capped" in kind,
            eager=heads if "capped" in kind else 0, head_count=heads,
        )  # fmt: skip
        return shapes, shape, {"model.layers": layers}

    return family


def _attention(read: ConfigNumbers, kind: tuple[Trait, ...], widths: tuple[int, int, int], size: int) -> Shapes:
    h, q, kv = widths
    biased = read.flag("attention_bias", default=False)
    block: Shapes = {}
    if "fused" in kind:
        block = {"self_attn.qkv_proj.weight": (q + 2 * kv, h), "self_attn.o_proj.weight": (h, q)}
    else:
        for name, width in (("q", q), ("k", kv), ("v", kv)):
            block |= _linear(f"self_attn.{name}_proj", width, h, bias="qkv_bias" in kind or biased)
        block |= _linear("self_attn.o_proj", h, q, bias=biased and "qkv_bias" not in kind)
    if "head_norm" in kind or "wide_norm" in kind:
        block["self_attn.q_norm.weight"] = (size if "head_norm" in kind else q,)
        block["self_attn.k_norm.weight"] = (size if "head_norm" in kind else kv,)
    names = ["post_attention_layernorm"]
    names += [] if "after_only" in kind else ["input_layernorm"]
    names += ["pre_feedforward_layernorm"] if "post_norms" in kind else []
    names += ["post_feedforward_layernorm"] if "post_norms" in kind or "after_only" in kind else []
    return block | {f"{name}.weight": (h,) for name in names}


def _feed_forward(read: ConfigNumbers, kind: tuple[Trait, ...], h: int, ffn: int) -> Shapes:
    if "experts" in kind:
        experts = read("num_local_experts", "num_experts")
        return {
            "mlp.gate.weight": (experts, h),
            "mlp.experts.gate_up_proj": (experts, 2 * ffn, h),
            "mlp.experts.down_proj": (experts, h, ffn),
        }
    if "fused" in kind:
        return {"mlp.gate_up_proj.weight": (2 * ffn, h), "mlp.down_proj.weight": (h, ffn)}
    bias, found = read.flag("mlp_bias", default=False), Shapes()
    for name, out, into in (("gate", ffn, h), ("up", ffn, h), ("down", h, ffn)):
        found |= _linear(f"mlp.{name}_proj", out, into, bias=bias)
    return found


FAMILIES: Mapping[str, Family] = {
    "llama": _decoder(),
    "mistral": _decoder(),
    "granite": _decoder(),
    "smollm3": _decoder("tied"),
    "qwen2": _decoder("qkv_bias"),
    "qwen3": _decoder("head_norm"),
    "phi3": _decoder("fused"),
    "olmo2": _decoder("wide_norm", "after_only"),
    "gemma": _decoder("tied"),
    "gemma2": _decoder("tied", "post_norms", "capped"),
    "gemma3_text": _decoder("tied", "post_norms", "head_norm"),
    "mixtral": _decoder("experts"),
    "qwen3_moe": _decoder("head_norm", "experts"),
}
"""Every family by its `model_type`."""
