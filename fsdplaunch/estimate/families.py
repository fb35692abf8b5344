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
            ValueError: It is not a whole number.
            UsageError: None is there, and there is no default.
        """
        for name in names:
            value = self.config.get(name)
            if value is not None:
                return _checked(name, value, least=0 if default == 0 else 1)
        if default is None:
            msg = f"{self.source} has no {names[0]}"
            raise UsageError(msg, hint="give the config.json that belongs to the model")
        return default

    def flag(self, name: str, *, default: bool) -> bool:
        """Tell whether something is switched on."""
        value = self.config.get(name)
        return default if value is None else bool(value)

    @property
    def labels(self) -> int:
        """Return how many classes a classifier has."""
        labels = self.config.get("id2label")
        return len(labels) if isinstance(labels, dict) and labels else self("num_labels", default=2)


def _checked(name: str, value: Any, *, least: int) -> int:
    """Return a number that a model may have.

    Raises:
        ValueError: It is not whole, or too small or large to be one.
    """
    most = MOST_BLOCKS if "layer" in name else MOST
    if isinstance(value, int) and not isinstance(value, bool) and least <= value <= most:
        return value
    shown = quoted(value) if isinstance(value, str) else type(value).__name__
    if isinstance(value, int | float):
        shown = str(value) if abs(value) < 10 * MOST else f"{'-' if value < 0 else ''}more than {10 * MOST}"
    msg = f"{name} is {shown}, and not a whole number from {least} to {most}"
    raise ValueError(msg)


Answer = tuple[Shapes, ActivationShape, dict[str, int]]
Family = Callable[..., Answer]


def linear(name: str, out: int, into: int, *, bias: bool = True) -> Shapes:
    """Return tensors of an `nn.Linear`: weight (out, into) and, by default, bias (out,)."""
    return {f"{name}.weight": (out, into)} | ({f"{name}.bias": (out,)} if bias else {})


def norm(name: str, width: int) -> Shapes:
    """Return tensors of an `nn.LayerNorm`: weight and bias (width,)."""
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def repeated(prefix: str, count: int, block: Shapes) -> Shapes:
    """Return the tensors of a list of equal blocks: `prefix`, the block's number, the name inside of it."""
    return {f"{prefix}.{number}.{name}": shape for number in range(count) for name, shape in block.items()}


def head_tensors(read: ConfigNumbers, head: str, vocab: int, width: int, *, tied: bool) -> Shapes:
    """Return the tensors of a decoder's head.

    Args:
        read: The configuration.
        head: lm, classify or none.
        vocab: Entries of the vocabulary.
        width: What the head reads.
        tied: Whether the family shares its embedding with the output, where the configuration does not say.
    """
    if head == "classify":
        return {"score.weight": (read.labels, width)}
    has_own = head == "lm" and not read.flag("tie_word_embeddings", default=tied)
    return {"lm_head.weight": (vocab, width)} if has_own else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """How one family of decoders differs from Llama."""

    qkv_bias: bool = False
    out_bias: bool = False
    head_norm: bool = False
    wide_norm: bool = False
    post_norms: bool = False
    after_only: bool = False
    tied: bool = False
    experts: bool = False
    fused: bool = False
    capped: bool = False


def decoder(traits: Decoder) -> Family:
    """Describe Llama and what is built like it."""

    def family(read: ConfigNumbers, *, head: str) -> Answer:
        h, vocab = read("hidden_size"), read("vocab_size")
        heads = read("num_attention_heads")
        size = read("head_dim", default=h // heads)
        q, kv = heads * size, read("num_key_value_heads", default=heads) * size
        layers = read("num_hidden_layers")
        shapes: Shapes = {"model.embed_tokens.weight": (vocab, h)}
        shapes |= repeated("model.layers", layers, _decoder_block(read, traits, h, q, kv, size))
        shapes["model.norm.weight"] = (h,)
        shapes |= head_tensors(read, head, vocab, h, tied=traits.tied)
        active = read("num_experts_per_tok") if traits.experts else 1
        ffn = read("moe_intermediate_size", "intermediate_size") if traits.experts else read("intermediate_size")
        shape = ActivationShape(
            hidden=h, layers=layers, heads=q, keys=kv, ffn=ffn * active, vocab=vocab if head == "lm" else 0,
            norms=4 if traits.post_norms else 2, head_norms=2 if traits.head_norm or traits.wide_norm else 0,
            max_length=read("max_position_embeddings", default=0), capped=traits.capped,
            eager=heads if traits.capped else 0, head_count=heads,
        )  # fmt: skip
        return shapes, shape, {"model.layers": layers}

    return family


def _decoder_block(read: ConfigNumbers, traits: Decoder, h: int, q: int, kv: int, size: int) -> Shapes:
    qkv_bias = traits.qkv_bias or read.flag("attention_bias", default=False)
    out_bias = traits.out_bias or (read.flag("attention_bias", default=False) and not traits.qkv_bias)
    block: Shapes = {}
    if traits.fused:
        block["self_attn.qkv_proj.weight"] = (q + 2 * kv, h)
        block["self_attn.o_proj.weight"] = (h, q)
    else:
        for name, width in (("q", q), ("k", kv), ("v", kv)):
            block |= linear(f"self_attn.{name}_proj", width, h, bias=qkv_bias)
        block |= linear("self_attn.o_proj", h, q, bias=out_bias)
    if traits.head_norm or traits.wide_norm:
        block["self_attn.q_norm.weight"] = (size if traits.head_norm else q,)
        block["self_attn.k_norm.weight"] = (size if traits.head_norm else kv,)
    block |= _feed_forward(read, traits, h)
    names = ["post_attention_layernorm"]
    names += [] if traits.after_only else ["input_layernorm"]
    names += ["pre_feedforward_layernorm"] if traits.post_norms else []
    names += ["post_feedforward_layernorm"] if traits.post_norms or traits.after_only else []
    return block | {f"{name}.weight": (h,) for name in names}


def _feed_forward(read: ConfigNumbers, traits: Decoder, h: int) -> Shapes:
    if traits.experts:
        ffn, experts = read("moe_intermediate_size", "intermediate_size"), read("num_local_experts", "num_experts")
        return {
            "mlp.gate.weight": (experts, h),
            "mlp.experts.gate_up_proj": (experts, 2 * ffn, h),
            "mlp.experts.down_proj": (experts, h, ffn),
        }
    ffn, bias = read("intermediate_size"), read.flag("mlp_bias", default=False)
    if traits.fused:
        return {"mlp.gate_up_proj.weight": (2 * ffn, h), "mlp.down_proj.weight": (h, ffn)}
    return (
        linear("mlp.gate_proj", ffn, h, bias=bias)
        | linear("mlp.up_proj", ffn, h, bias=bias)
        | linear("mlp.down_proj", h, ffn, bias=bias)
    )


def gpt2(read: ConfigNumbers, *, head: str) -> Answer:
    """Describe GPT-2 and what shares its code."""
    h, layers, vocab = read("n_embd", "hidden_size"), read("n_layer", "num_hidden_layers"), read("vocab_size")
    length = read("n_positions", "max_position_embeddings")
    ffn = read("n_inner", default=4 * h)
    shapes: Shapes = {"transformer.wte.weight": (vocab, h), "transformer.wpe.weight": (length, h)}
    block = norm("ln_1", h) | norm("ln_2", h)
    # Conv1D keeps its weight the other way round.
    for name, into, out in (
        ("attn.c_attn", h, 3 * h), ("attn.c_proj", h, h), ("mlp.c_fc", h, ffn), ("mlp.c_proj", ffn, h)
    ):  # fmt: skip
        block |= {f"{name}.weight": (into, out), f"{name}.bias": (out,)}
    shapes |= repeated("transformer.h", layers, block) | norm("transformer.ln_f", h)
    shapes |= head_tensors(read, head, vocab, h, tied=True)
    composite = str(read.config.get("activation_function", "gelu_new")) in ("gelu_new", "gelu_fast")
    dropout = 2.0 if read.config.get("resid_pdrop", 0.1) else 0
    shape = ActivationShape(
        hidden=h, layers=layers, heads=h, keys=h, ffn=ffn, vocab=vocab if head == "lm" else 0, gated=False,
        full_norm=False, composite=composite, dropout=dropout, max_length=length,
        head_count=read("n_head", "num_attention_heads", default=0),
    )  # fmt: skip
    return shapes, shape, {"transformer.h": layers}


FAMILIES: Mapping[str, Family] = {
    "llama": decoder(Decoder()),
    "mistral": decoder(Decoder()),
    "granite": decoder(Decoder()),
    "smollm3": decoder(Decoder(tied=True)),
    "qwen2": decoder(Decoder(qkv_bias=True)),
    "qwen3": decoder(Decoder(head_norm=True)),
    "phi3": decoder(Decoder(fused=True)),
    "olmo2": decoder(Decoder(wide_norm=True, after_only=True)),
    "gemma": decoder(Decoder(tied=True)),
    "gemma2": decoder(Decoder(tied=True, post_norms=True, capped=True)),
    "gemma3_text": decoder(Decoder(tied=True, post_norms=True, head_norm=True)),
    "mixtral": decoder(Decoder(experts=True)),
    "qwen3_moe": decoder(Decoder(head_norm=True, experts=True)),
    "gpt2": gpt2,
}
"""Every family by its `model_type`."""
