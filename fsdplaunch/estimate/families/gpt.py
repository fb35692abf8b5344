"""GPT-2, GPT-NeoX and OPT: decoders with LayerNorm and biases."""

from fsdplaunch.estimate.families.parts import (
    ActivationShape,
    Answer,
    ConfigNumbers,
    Shapes,
    head_tensors,
    linear,
    norm,
    repeated,
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


def gpt_neox(read: ConfigNumbers, *, head: str) -> Answer:
    """Describe GPT-NeoX and Pythia."""
    h, layers, vocab = read("hidden_size"), read("num_hidden_layers"), read("vocab_size")
    ffn, bias = read("intermediate_size"), read.flag("attention_bias", default=True)
    block = norm("input_layernorm", h) | norm("post_attention_layernorm", h)
    block |= linear("attention.query_key_value", 3 * h, h, bias=bias)
    block |= linear("attention.dense", h, h, bias=bias)
    block |= linear("mlp.dense_h_to_4h", ffn, h) | linear("mlp.dense_4h_to_h", h, ffn)
    shapes: Shapes = {"gpt_neox.embed_in.weight": (vocab, h)}
    shapes |= repeated("gpt_neox.layers", layers, block) | norm("gpt_neox.final_layer_norm", h)
    shapes |= head_tensors(read, head, vocab, h, tied=False, output="embed_out")
    shape = ActivationShape(
        hidden=h, layers=layers, heads=h, keys=h, ffn=ffn, vocab=vocab if head == "lm" else 0, gated=False,
        full_norm=False, max_length=read("max_position_embeddings", default=0),
        head_count=read("num_attention_heads", default=0),
    )  # fmt: skip
    return shapes, shape, {"gpt_neox.layers": layers}


def opt(read: ConfigNumbers, *, head: str) -> Answer:
    """Describe OPT."""
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
    block = norm("self_attn_layer_norm", h) | norm("final_layer_norm", h)
    for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
        block |= linear(f"self_attn.{name}", h, h, bias=bias)
    block |= linear("fc1", ffn, h, bias=bias) | linear("fc2", h, ffn, bias=bias)
    shapes |= repeated(f"{inside}.layers", layers, block)
    if read.flag("do_layer_norm_before", default=True) and not read.flag(
        "_remove_final_layer_norm", default=False
    ):
        shapes |= norm(f"{inside}.final_layer_norm", h)
    shapes |= head_tensors(read, head, vocab, width, tied=True)
    dropout = 2.0 if read.config.get("dropout", 0.1) else 0
    shape = ActivationShape(
        hidden=h, layers=layers, heads=h, keys=h, ffn=ffn, vocab=vocab if head == "lm" else 0, gated=False,
        full_norm=False, dropout=dropout, max_length=length, head_count=read("num_attention_heads", default=0),
        relu=read.config.get("activation_function", "relu") == "relu",
    )  # fmt: skip
    return shapes, shape, {f"{inside}.layers": layers}
