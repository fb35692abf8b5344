"""Decoders of transformers, by `model_type`: parameter shapes and what activations depend on.

Other models are built by `--exact`, which needs torch and transformers.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fsdplaunch.display_text import quoted
from fsdplaunch.errors import UsageError

Shapes = dict[str, tuple[int, ...]]
MOST = 2**31
"""No dimension of a model comes near it."""
MOST_BLOCKS = 4096
"""Each one is written out, with its tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationShape:
    """What activations depend on.

    Attributes:
        hidden: Width of the residual stream.
        layers: Blocks.
        heads: Elements of a token's queries: heads times head size.
        keys: Elements of a token's keys.
        ffn: Width inside the feed-forward part, times the experts each token visits.
        vocab: Width of the output; 0 for a model without a head over the vocabulary.
        gated: Whether the feed-forward part multiplies two branches.
        full_norm: Whether norms compute in fp32 step by step (RMSNorm) or in one kernel (LayerNorm).
        composite: Whether the activation function is written out in many steps (GPT-2's gelu_new).
        dropout: Dropout masks a block keeps, in widths of the residual stream.
        norms: Norms of a block that see the whole residual stream.
        head_norms: Norms of a block that see queries and keys.
        eager: Heads whose attention weights are kept in full, where no fused attention is used; 0 otherwise.
        head_count: Heads of queries; 0 where the configuration does not say.
        max_length: Longest sequence; 0 where none is set.
        capped: Whether logits and attention scores are squeezed through tanh.
    """

    hidden: int
    layers: int
    heads: int
    keys: int
    ffn: int
    vocab: int
    gated: bool = True
    full_norm: bool = True
    composite: bool = False
    dropout: float = 0
    norms: int = 2
    head_norms: int = 0
    eager: int = 0
    head_count: int = 0
    max_length: int = 0
    capped: bool = False


class ConfigNumbers:
    """Numbers of a configuration; a missing one is an error that names it."""

    def __init__(self, config: Mapping[str, Any], source: str) -> None:
        self.config, self.source = config, source

    def __call__(self, *names: str, default: int | None = None) -> int:
        """Return the first of these numbers that is there.

        Raises:
            ValueError: It is not a whole number, or too small or large to be one of a model.
            UsageError: None is there, and there is no default.
        """
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

    @property
    def labels(self) -> int:
        """Return how many classes a classifier has."""
        labels = self.config.get("id2label")
        return len(labels) if isinstance(labels, dict) and labels else self("num_labels", default=2)


Answer = tuple[Shapes, ActivationShape, dict[str, int]]
Family = Callable[..., Answer]


def _linear(name: str, out: int, into: int, *, bias: bool = True) -> Shapes:
    return {f"{name}.weight": (out, into)} | ({f"{name}.bias": (out,)} if bias else {})


def _norm(name: str, width: int) -> Shapes:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def _repeated(prefix: str, count: int, block: Shapes) -> Shapes:
    return {f"{prefix}.{number}.{name}": shape for number in range(count) for name, shape in block.items()}


def _head(read: ConfigNumbers, head: str, vocab: int, width: int, *, tied: bool) -> Shapes:
    """Return the tensors of a decoder's head: lm, classify or none; tied is what the family does by itself."""
    if head == "classify":
        return {"score.weight": (read.labels, width)}
    has_own = head == "lm" and not read.flag("tie_word_embeddings", default=tied)
    return {"lm_head.weight": (vocab, width)} if has_own else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """How one family of decoders differs from Llama."""

    qkv_bias: bool = False
    head_norm: bool = False
    wide_norm: bool = False
    post_norms: bool = False
    after_only: bool = False
    tied: bool = False
    experts: bool = False
    fused: bool = False
    capped: bool = False


def _decoder(**traits: bool) -> Family:
    """Describe Llama and what is built like it."""
    kind = Decoder(**traits)

    def family(read: ConfigNumbers, *, head: str) -> Answer:
        h, vocab = read("hidden_size"), read("vocab_size")
        heads = read("num_attention_heads")
        size = read("head_dim", default=h // heads)
        q, kv = heads * size, read("num_key_value_heads", default=heads) * size
        layers = read("num_hidden_layers")
        ffn = read("moe_intermediate_size", "intermediate_size") if kind.experts else read("intermediate_size")
        block = _attention(read, kind, (h, q, kv), size) | _feed_forward(read, kind, h, ffn)
        shapes: Shapes = {"model.embed_tokens.weight": (vocab, h)}
        shapes |= _repeated("model.layers", layers, block)
        shapes["model.norm.weight"] = (h,)
        shapes |= _head(read, head, vocab, h, tied=kind.tied)
        shape = ActivationShape(
            hidden=h, layers=layers, heads=q, keys=kv, vocab=vocab if head == "lm" else 0,
            ffn=ffn * (read("num_experts_per_tok") if kind.experts else 1),
            norms=4 if kind.post_norms else 2, head_norms=2 if kind.head_norm or kind.wide_norm else 0,
            max_length=read("max_position_embeddings", default=0), capped=kind.capped,
            eager=heads if kind.capped else 0, head_count=heads,
        )  # fmt: skip
        return shapes, shape, {"model.layers": layers}

    return family


def _attention(read: ConfigNumbers, kind: Decoder, widths: tuple[int, int, int], size: int) -> Shapes:
    """Return the tensors of a block's attention, and the norms around its parts."""
    h, q, kv = widths
    biased = read.flag("attention_bias", default=False)
    block: Shapes = {}
    if kind.fused:
        block = {"self_attn.qkv_proj.weight": (q + 2 * kv, h), "self_attn.o_proj.weight": (h, q)}
    else:
        for name, width in (("q", q), ("k", kv), ("v", kv)):
            block |= _linear(f"self_attn.{name}_proj", width, h, bias=kind.qkv_bias or biased)
        block |= _linear("self_attn.o_proj", h, q, bias=biased and not kind.qkv_bias)
    if kind.head_norm or kind.wide_norm:
        block["self_attn.q_norm.weight"] = (size if kind.head_norm else q,)
        block["self_attn.k_norm.weight"] = (size if kind.head_norm else kv,)
    names = ["post_attention_layernorm"]
    names += [] if kind.after_only else ["input_layernorm"]
    names += ["pre_feedforward_layernorm"] if kind.post_norms else []
    names += ["post_feedforward_layernorm"] if kind.post_norms or kind.after_only else []
    return block | {f"{name}.weight": (h,) for name in names}


def _feed_forward(read: ConfigNumbers, kind: Decoder, h: int, ffn: int) -> Shapes:
    if kind.experts:
        experts = read("num_local_experts", "num_experts")
        return {
            "mlp.gate.weight": (experts, h),
            "mlp.experts.gate_up_proj": (experts, 2 * ffn, h),
            "mlp.experts.down_proj": (experts, h, ffn),
        }
    if kind.fused:
        return {"mlp.gate_up_proj.weight": (2 * ffn, h), "mlp.down_proj.weight": (h, ffn)}
    bias, found = read.flag("mlp_bias", default=False), Shapes()
    for name, out, into in (("gate", ffn, h), ("up", ffn, h), ("down", h, ffn)):
        found |= _linear(f"mlp.{name}_proj", out, into, bias=bias)
    return found


def _gpt2(read: ConfigNumbers, *, head: str) -> Answer:
    """Describe GPT-2 and what shares its code."""
    h, layers, vocab = read("n_embd", "hidden_size"), read("n_layer", "num_hidden_layers"), read("vocab_size")
    length = read("n_positions", "max_position_embeddings")
    ffn = read("n_inner", default=4 * h)
    shapes: Shapes = {"transformer.wte.weight": (vocab, h), "transformer.wpe.weight": (length, h)}
    block = _norm("ln_1", h) | _norm("ln_2", h)
    # Conv1D keeps its weight the other way round.
    for name, into, out in (
        ("attn.c_attn", h, 3 * h), ("attn.c_proj", h, h), ("mlp.c_fc", h, ffn), ("mlp.c_proj", ffn, h)
    ):  # fmt: skip
        block |= {f"{name}.weight": (into, out), f"{name}.bias": (out,)}
    shapes |= _repeated("transformer.h", layers, block) | _norm("transformer.ln_f", h)
    shapes |= _head(read, head, vocab, h, tied=True)
    composite = str(read.config.get("activation_function", "gelu_new")) in ("gelu_new", "gelu_fast")
    dropout = 2.0 if read.config.get("resid_pdrop", 0.1) else 0
    shape = ActivationShape(
        hidden=h, layers=layers, heads=h, keys=h, ffn=ffn, vocab=vocab if head == "lm" else 0, gated=False,
        full_norm=False, composite=composite, dropout=dropout, max_length=length,
        head_count=read("n_head", "num_attention_heads", default=0),
    )  # fmt: skip
    return shapes, shape, {"transformer.h": layers}


FAMILIES: Mapping[str, Family] = {
    "llama": _decoder(),
    "mistral": _decoder(),
    "granite": _decoder(),
    "smollm3": _decoder(tied=True),
    "qwen2": _decoder(qkv_bias=True),
    "qwen3": _decoder(head_norm=True),
    "phi3": _decoder(fused=True),
    "olmo2": _decoder(wide_norm=True, after_only=True),
    "gemma": _decoder(tied=True),
    "gemma2": _decoder(tied=True, post_norms=True, capped=True),
    "gemma3_text": _decoder(tied=True, post_norms=True, head_norm=True),
    "mixtral": _decoder(experts=True),
    "qwen3_moe": _decoder(head_norm=True, experts=True),
    "gpt2": _gpt2,
}
"""Every family by its `model_type`."""
