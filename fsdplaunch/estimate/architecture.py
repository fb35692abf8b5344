"""A transformers `config.json` -> the model's tensors, and the numbers its activations depend on. No transformers.

One function per family; families that differ in a bias or a norm share one. What is not known here is refused: a
wrong list would look as good as a right one.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdplaunch.errors import UsageError
from fsdplaunch.estimate.json_file import read_json_file
from fsdplaunch.estimate.sizes import Sizes, Tensor, sizes_of

Shapes = dict[str, tuple[int, ...]]
_WIDTHS = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What activations depend on.

    Attributes:
        hidden: Width of the residual stream.
        layers: Blocks, of encoder and decoder together.
        heads: Elements of a token's queries: heads times head size.
        keys: Elements of a token's keys.
        ffn: Width inside the feed-forward part, times the experts each token visits.
        vocab: Width of the output; 0 for a model without a head over the vocabulary.
        gated: Whether the feed-forward part multiplies two branches.
        full_norm: Whether norms compute in fp32 step by step (RMSNorm) or in one kernel (LayerNorm).
        relu: Whether the feed-forward part's only activation function is relu.
        composite: Whether the activation function is written out in many steps (GPT-2's gelu_new).
        dropout: Dropout masks a block keeps, in widths of the residual stream.
        norms: Norms of a block that see the whole residual stream.
        head_norms: Norms of a block that see queries and keys.
        cross: Attentions over the encoder that a decoder block adds.
        eager: Heads whose attention weights are kept whole, where no fused attention is used; 0 otherwise.
        max_length: Longest sequence; 0 where none is set.
        upcasts: Whether the loss is computed from an fp32 copy of the logits.
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
    relu: bool = False
    composite: bool = False
    dropout: float = 0
    norms: int = 2
    head_norms: int = 0
    cross: int = 0
    eager: int = 0
    max_length: int = 0
    upcasts: bool = True
    capped: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """A model as its `config.json` describes it.

    Attributes:
        sizes: Its tensors.
        shape: What its activations depend on.
        model_type: The family's name.
    """

    sizes: Sizes
    shape: Shape
    model_type: str


def read_architecture(path: Path) -> Described:
    """Describe the model of a `config.json`.

    Args:
        path: The file.

    Raises:
        UsageError: It cannot be read, its family is not known here, or it lacks a number.
    """
    return describe(read_json_file(path), source=str(path))


def describe(config: Mapping[str, Any], *, source: str) -> Described:
    """Describe the model of a configuration.

    Args:
        config: What `config.json` holds.
        source: Where it comes from, in words.

    Raises:
        UsageError: Its family is not known here, or it lacks a number.
    """
    kind = config.get("model_type")
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None:
        msg = f"{source}: the model type {kind!r} is not known to the quick estimate"
        hint = "use --exact, which builds the model, or name a function that does: script.py:build_model"
        raise UsageError(msg, hint=f"{hint}; known are {', '.join(sorted(FAMILIES))}")
    try:
        shapes, shape, lists = family(_Reader(config, source), head=_has_head(config))
    except (TypeError, ValueError, ZeroDivisionError) as error:
        msg = f"{source}: a number of this {kind} model has no meaning: {error}"
        raise UsageError(msg) from None
    width = _WIDTHS.get(str(config.get("dtype") or config.get("torch_dtype") or "float32"), 4)
    tensors = {name: Tensor(size, width) for name, size in shapes.items()}
    blocks = tuple(f"{prefix}.{number}" for prefix, count in lists.items() for number in range(count))
    return Described(sizes=sizes_of(tensors, source, prefixes=blocks), shape=shape, model_type=str(kind))


def _has_head(config: Mapping[str, Any]) -> str:
    """What stands on top, from the class's name: lm, masked, classify or none."""
    named = config.get("architectures")
    name = str(named[0]) if isinstance(named, list) and named else ""
    if name.endswith("ForSequenceClassification"):
        return "classify"
    if name.endswith("Model") and not name.endswith("LMHeadModel"):
        return "none"
    return "lm"


class _Reader:
    """Numbers of a configuration; a missing one is an error that names it."""

    def __init__(self, config: Mapping[str, Any], source: str) -> None:
        self.config, self.source = config, source

    def __call__(self, *names: str, default: int | None = None) -> int:
        for name in names:
            value = self.config.get(name)
            if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
                return value
            if value is not None:
                msg = f"{name} is {value!r}"
                raise ValueError(msg)
        if default is None:
            msg = f"{self.source} has no {names[0]}"
            raise UsageError(msg, hint="give the config.json that belongs to the model")
        return default

    def flag(self, name: str, *, default: bool) -> bool:
        value = self.config.get(name)
        return default if value is None else bool(value)

    @property
    def labels(self) -> int:
        labels = self.config.get("id2label")
        return len(labels) if isinstance(labels, dict) and labels else self("num_labels", default=2)


Answer = tuple[Shapes, Shape, dict[str, int]]
Family = Callable[..., Answer]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Decoder:
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


def _decoder(traits: _Decoder) -> Family:
    """Llama and what is built like it."""

    def family(read: _Reader, *, head: str) -> Answer:
        h, vocab = read("hidden_size"), read("vocab_size")
        heads = read("num_attention_heads")
        size = read("head_dim", default=h // heads)
        q, kv = heads * size, read("num_key_value_heads", default=heads) * size
        layers = read("num_hidden_layers")
        shapes: Shapes = {"model.embed_tokens.weight": (vocab, h)}
        for number in range(layers):
            block = _decoder_block(read, traits, h, q, kv, size)
            shapes |= {f"model.layers.{number}.{name}": shape for name, shape in block.items()}
        shapes["model.norm.weight"] = (h,)
        if head == "lm" and not read.flag("tie_word_embeddings", default=traits.tied):
            shapes["lm_head.weight"] = (vocab, h)
        if head == "classify":
            shapes["score.weight"] = (read.labels, h)
        active = read("num_experts_per_tok") if traits.experts else 1
        ffn = read("moe_intermediate_size", "intermediate_size") if traits.experts else read("intermediate_size")
        shape = Shape(
            hidden=h, layers=layers, heads=q, keys=kv, ffn=ffn * active, vocab=vocab if head == "lm" else 0,
            norms=4 if traits.post_norms else 2, head_norms=2 if traits.head_norm or traits.wide_norm else 0,
            max_length=read("max_position_embeddings", default=0), capped=traits.capped,
            eager=heads if traits.capped else 0,
        )  # fmt: skip
        return shapes, shape, {"model.layers": layers}

    return family


def _decoder_block(read: _Reader, traits: _Decoder, h: int, q: int, kv: int, size: int) -> Shapes:
    qkv_bias = traits.qkv_bias or read.flag("attention_bias", default=False)
    out_bias = traits.out_bias or (read.flag("attention_bias", default=False) and not traits.qkv_bias)
    block: Shapes = {}
    if traits.fused:
        block["self_attn.qkv_proj.weight"] = (q + 2 * kv, h)
        block["self_attn.o_proj.weight"] = (h, q)
    else:
        for name, width in (("q", q), ("k", kv), ("v", kv)):
            block |= _linear(f"self_attn.{name}_proj", width, h, bias=qkv_bias)
        block |= _linear("self_attn.o_proj", h, q, bias=out_bias)
    if traits.head_norm or traits.wide_norm:
        block["self_attn.q_norm.weight"] = (size if traits.head_norm else q,)
        block["self_attn.k_norm.weight"] = (size if traits.head_norm else kv,)
    block |= _feed_forward(read, traits, h)
    names = ["post_attention_layernorm"]
    names += [] if traits.after_only else ["input_layernorm"]
    names += ["pre_feedforward_layernorm"] if traits.post_norms else []
    names += ["post_feedforward_layernorm"] if traits.post_norms or traits.after_only else []
    return block | {f"{name}.weight": (h,) for name in names}


def _feed_forward(read: _Reader, traits: _Decoder, h: int) -> Shapes:
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
        _linear("mlp.gate_proj", ffn, h, bias=bias)
        | _linear("mlp.up_proj", ffn, h, bias=bias)
        | _linear("mlp.down_proj", h, ffn, bias=bias)
    )


def _linear(name: str, out: int, into: int, *, bias: bool = True) -> Shapes:
    return {f"{name}.weight": (out, into)} | ({f"{name}.bias": (out,)} if bias else {})


def _norm(name: str, width: int) -> Shapes:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def _prefixed(prefix: str, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, tuple[int, ...]]]:
    return ((f"{prefix}.{name}", shape) for name, shape in shapes.items())


def _gpt2(read: _Reader, *, head: str) -> Answer:
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
    for number in range(layers):
        shapes |= _prefixed(f"transformer.h.{number}", block)
    shapes |= _norm("transformer.ln_f", h)
    if head == "lm" and not read.flag("tie_word_embeddings", default=True):
        shapes["lm_head.weight"] = (vocab, h)
    if head == "classify":
        shapes["score.weight"] = (read.labels, h)
    composite = str(read.config.get("activation_function", "gelu_new")) in ("gelu_new", "gelu_fast")
    dropout = 2.0 if read.config.get("resid_pdrop", 0.1) else 0
    shape = Shape(
        hidden=h, layers=layers, heads=h, keys=h, ffn=ffn, vocab=vocab if head == "lm" else 0, gated=False,
        full_norm=False, composite=composite, dropout=dropout, max_length=length,
    )  # fmt: skip
    return shapes, shape, {"transformer.h": layers}


def _gpt_neox(read: _Reader, *, head: str) -> Answer:
    h, layers, vocab = read("hidden_size"), read("num_hidden_layers"), read("vocab_size")
    ffn, bias = read("intermediate_size"), read.flag("attention_bias", default=True)
    block = _norm("input_layernorm", h) | _norm("post_attention_layernorm", h)
    block |= _linear("attention.query_key_value", 3 * h, h, bias=bias)
    block |= _linear("attention.dense", h, h, bias=bias)
    block |= _linear("mlp.dense_h_to_4h", ffn, h) | _linear("mlp.dense_4h_to_h", h, ffn)
    shapes: Shapes = {"gpt_neox.embed_in.weight": (vocab, h)}
    for number in range(layers):
        shapes |= _prefixed(f"gpt_neox.layers.{number}", block)
    shapes |= _norm("gpt_neox.final_layer_norm", h)
    if head == "lm" and not read.flag("tie_word_embeddings", default=False):
        shapes["embed_out.weight"] = (vocab, h)
    if head == "classify":
        shapes["score.weight"] = (read.labels, h)
    shape = Shape(
        hidden=h, layers=layers, heads=h, keys=h, ffn=ffn, vocab=vocab if head == "lm" else 0, gated=False,
        full_norm=False, max_length=read("max_position_embeddings", default=0),
    )  # fmt: skip
    return shapes, shape, {"gpt_neox.layers": layers}


def _opt(read: _Reader, *, head: str) -> Answer:
    h, layers, vocab, ffn = (
        read("hidden_size"), read("num_hidden_layers"), read("vocab_size"), read("ffn_dim")
    )  # fmt: skip
    width, bias = read("word_embed_proj_dim", default=h), read.flag("enable_bias", default=True)
    length = read("max_position_embeddings")
    inside = "model.decoder"
    shapes: Shapes = {
        f"{inside}.embed_tokens.weight": (vocab, width), f"{inside}.embed_positions.weight": (length + 2, h)
    }  # fmt: skip
    if width != h:
        shapes |= {f"{inside}.project_in.weight": (h, width), f"{inside}.project_out.weight": (width, h)}
    block = _norm("self_attn_layer_norm", h) | _norm("final_layer_norm", h)
    for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
        block |= _linear(f"self_attn.{name}", h, h, bias=bias)
    block |= _linear("fc1", ffn, h, bias=bias) | _linear("fc2", h, ffn, bias=bias)
    for number in range(layers):
        shapes |= _prefixed(f"{inside}.layers.{number}", block)
    if read.flag("do_layer_norm_before", default=True) and not read.flag(
        "_remove_final_layer_norm", default=False
    ):
        shapes |= _norm(f"{inside}.final_layer_norm", h)
    if head == "lm" and not read.flag("tie_word_embeddings", default=True):
        shapes["lm_head.weight"] = (vocab, width)
    if head == "classify":
        shapes["score.weight"] = (read.labels, width)
    dropout = 2.0 if read.config.get("dropout", 0.1) else 0
    shape = Shape(
        hidden=h, layers=layers, heads=h, keys=h, ffn=ffn, vocab=vocab if head == "lm" else 0, gated=False,
        full_norm=False, dropout=dropout, max_length=length,
        relu=read.config.get("activation_function", "relu") == "relu",
    )  # fmt: skip
    return shapes, shape, {f"{inside}.layers": layers}


def _bert(prefix: str, *, roberta: bool = False) -> Family:
    def family(read: _Reader, *, head: str) -> Answer:
        h, layers, vocab = read("hidden_size"), read("num_hidden_layers"), read("vocab_size")
        ffn, length = read("intermediate_size"), read("max_position_embeddings")
        inside = f"{prefix}." if head != "none" else ""
        shapes: Shapes = {
            f"{inside}embeddings.word_embeddings.weight": (vocab, h),
            f"{inside}embeddings.position_embeddings.weight": (length, h),
            f"{inside}embeddings.token_type_embeddings.weight": (read("type_vocab_size", default=2), h),
        } | _norm(f"{inside}embeddings.LayerNorm", h)
        block = _norm("attention.output.LayerNorm", h) | _norm("output.LayerNorm", h)
        for name in (
            "attention.self.query",
            "attention.self.key",
            "attention.self.value",
            "attention.output.dense",
        ):
            block |= _linear(name, h, h)
        block |= _linear("intermediate.dense", ffn, h) | _linear("output.dense", h, ffn)
        for number in range(layers):
            shapes |= _prefixed(f"{inside}encoder.layer.{number}", block)
        shapes |= _bert_head(read, head, h, vocab, roberta=roberta, inside=inside)
        dropout = 2.0 if read.config.get("hidden_dropout_prob", 0.1) else 0
        shape = Shape(
            hidden=h, layers=layers, heads=h, keys=h, ffn=ffn, vocab=vocab if head == "lm" else 0, gated=False,
            full_norm=False, dropout=dropout, max_length=length - 2 if roberta else length, upcasts=False,
        )  # fmt: skip
        return shapes, shape, {f"{inside}encoder.layer": layers}

    return family


def _bert_head(read: _Reader, head: str, h: int, vocab: int, *, roberta: bool, inside: str) -> Shapes:
    if head == "lm":
        name = "lm_head" if roberta else "cls.predictions"
        inner = "" if roberta else ".transform"
        norm = "layer_norm" if roberta else "transform.LayerNorm"
        own = {} if read.flag("tie_word_embeddings", default=True) else {f"{name}.decoder.weight": (vocab, h)}
        return (
            _linear(f"{name}{inner}.dense", h, h) | _norm(f"{name}.{norm}", h) | {f"{name}.bias": (vocab,)} | own
        )
    pooler = _linear(f"{inside}pooler.dense", h, h)
    if head == "none":
        return pooler
    if roberta:
        return _linear("classifier.dense", h, h) | _linear("classifier.out_proj", read.labels, h)
    return pooler | _linear("classifier", read.labels, h)


def _t5(read: _Reader, *, head: str) -> Answer:
    h, vocab, ffn = read("d_model"), read("vocab_size"), read("d_ff")
    heads = read("num_heads")
    q = heads * read("d_kv")
    encoder, buckets = read("num_layers"), read("relative_attention_num_buckets", default=32)
    decoder = read("num_decoder_layers", default=encoder)
    gated = "gated" in str(read.config.get("feed_forward_proj", "relu"))
    shapes: Shapes = {"shared.weight": (vocab, h)}
    lists = {}
    for side, count, parts in (("encoder", encoder, 1), ("decoder", decoder, 2)):
        for number in range(count):
            place = f"{side}.block.{number}.layer"
            for part in range(parts):
                name = "EncDecAttention" if part else "SelfAttention"
                for each in ("q", "k", "v"):
                    shapes[f"{place}.{part}.{name}.{each}.weight"] = (q, h)
                shapes[f"{place}.{part}.{name}.o.weight"] = (h, q)
                shapes[f"{place}.{part}.layer_norm.weight"] = (h,)
            for each in ("wi_0", "wi_1") if gated else ("wi",):
                shapes[f"{place}.{parts}.DenseReluDense.{each}.weight"] = (ffn, h)
            shapes[f"{place}.{parts}.DenseReluDense.wo.weight"] = (h, ffn)
            shapes[f"{place}.{parts}.layer_norm.weight"] = (h,)
        shapes[f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"] = (buckets, heads)
        shapes[f"{side}.final_layer_norm.weight"] = (h,)
        lists[f"{side}.block"] = count
    if head == "lm" and not read.flag("tie_word_embeddings", default=True):
        shapes["lm_head.weight"] = (vocab, h)
    shape = Shape(
        hidden=h, layers=encoder + decoder, heads=q, keys=q, ffn=ffn, vocab=vocab if head == "lm" else 0,
        gated=gated, dropout=3.0 if read.config.get("dropout_rate", 0.1) else 0, eager=heads, upcasts=False,
        cross=decoder, relu=not gated and "relu" in str(read.config.get("feed_forward_proj", "relu")),
    )  # fmt: skip
    return shapes, shape, lists


FAMILIES: Mapping[str, Family] = {
    "llama": _decoder(_Decoder()),
    "mistral": _decoder(_Decoder()),
    "granite": _decoder(_Decoder()),
    "smollm3": _decoder(_Decoder(tied=True)),
    "qwen2": _decoder(_Decoder(qkv_bias=True)),
    "qwen3": _decoder(_Decoder(head_norm=True)),
    "phi3": _decoder(_Decoder(fused=True)),
    "olmo2": _decoder(_Decoder(wide_norm=True, after_only=True)),
    "gemma": _decoder(_Decoder(tied=True)),
    "gemma2": _decoder(_Decoder(tied=True, post_norms=True, capped=True)),
    "gemma3_text": _decoder(_Decoder(tied=True, post_norms=True, head_norm=True)),
    "mixtral": _decoder(_Decoder(experts=True)),
    "qwen3_moe": _decoder(_Decoder(head_norm=True, experts=True)),
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "opt": _opt,
    "bert": _bert("bert"),
    "roberta": _bert("roberta", roberta=True),
    "t5": _t5,
}
"""Every family by its `model_type`."""
