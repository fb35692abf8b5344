"""Llama and the decoders built like it."""

from dataclasses import dataclass

from fsdplaunch.estimate.families.parts import (
    ActivationShape,
    Answer,
    ConfigNumbers,
    Family,
    Shapes,
    head_tensors,
    linear,
    repeated,
)


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
