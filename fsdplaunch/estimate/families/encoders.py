"""BERT and RoBERTa, and T5, whose decoder reads an encoder."""

from fsdplaunch.estimate.families.parts import (
    ActivationShape,
    Answer,
    ConfigNumbers,
    Family,
    Shapes,
    linear,
    norm,
    repeated,
)


def bert(prefix: str, *, roberta: bool = False) -> Family:
    """Describe BERT and RoBERTa; `prefix` is what a head's names put before the encoder's."""

    def family(read: ConfigNumbers, *, head: str) -> Answer:
        h, layers, vocab = read("hidden_size"), read("num_hidden_layers"), read("vocab_size")
        ffn, length = read("intermediate_size"), read("max_position_embeddings")
        inside = f"{prefix}." if head != "none" else ""
        shapes: Shapes = {
            f"{inside}embeddings.word_embeddings.weight": (vocab, h),
            f"{inside}embeddings.position_embeddings.weight": (length, h),
            f"{inside}embeddings.token_type_embeddings.weight": (read("type_vocab_size", default=2), h),
        } | norm(f"{inside}embeddings.LayerNorm", h)
        block = norm("attention.output.LayerNorm", h) | norm("output.LayerNorm", h)
        for name in (
            "attention.self.query",
            "attention.self.key",
            "attention.self.value",
            "attention.output.dense",
        ):
            block |= linear(name, h, h)
        block |= linear("intermediate.dense", ffn, h) | linear("output.dense", h, ffn)
        shapes |= repeated(f"{inside}encoder.layer", layers, block)
        shapes |= _bert_head(read, head, h, vocab, roberta=roberta, inside=inside)
        dropout = 2.0 if read.config.get("hidden_dropout_prob", 0.1) else 0
        shape = ActivationShape(
            hidden=h, layers=layers, heads=h, keys=h, ffn=ffn, vocab=vocab if head == "lm" else 0, gated=False,
            full_norm=False, dropout=dropout, max_length=length - 2 if roberta else length, upcasts=False,
            head_count=read("num_attention_heads", default=0),
        )  # fmt: skip
        return shapes, shape, {f"{inside}encoder.layer": layers}

    return family


def _bert_head(read: ConfigNumbers, head: str, h: int, vocab: int, *, roberta: bool, inside: str) -> Shapes:
    if head == "lm":
        name = "lm_head" if roberta else "cls.predictions"
        inner = "" if roberta else ".transform"
        last = "layer_norm" if roberta else "transform.LayerNorm"
        own = {} if read.flag("tie_word_embeddings", default=True) else {f"{name}.decoder.weight": (vocab, h)}
        return linear(f"{name}{inner}.dense", h, h) | norm(f"{name}.{last}", h) | {f"{name}.bias": (vocab,)} | own
    pooler = linear(f"{inside}pooler.dense", h, h)
    if head == "none":
        return pooler
    if roberta:
        return linear("classifier.dense", h, h) | linear("classifier.out_proj", read.labels, h)
    return pooler | linear("classifier", read.labels, h)


def t5(read: ConfigNumbers, *, head: str) -> Answer:
    """Describe T5: an encoder, and a decoder that reads it."""
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
            layers_of_block = f"{side}.block.{number}.layer"
            for part in range(parts):
                name = "EncDecAttention" if part else "SelfAttention"
                for each in ("q", "k", "v"):
                    shapes[f"{layers_of_block}.{part}.{name}.{each}.weight"] = (q, h)
                shapes[f"{layers_of_block}.{part}.{name}.o.weight"] = (h, q)
                shapes[f"{layers_of_block}.{part}.layer_norm.weight"] = (h,)
            for each in ("wi_0", "wi_1") if gated else ("wi",):
                shapes[f"{layers_of_block}.{parts}.DenseReluDense.{each}.weight"] = (ffn, h)
            shapes[f"{layers_of_block}.{parts}.DenseReluDense.wo.weight"] = (h, ffn)
            shapes[f"{layers_of_block}.{parts}.layer_norm.weight"] = (h,)
        shapes[f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"] = (buckets, heads)
        shapes[f"{side}.final_layer_norm.weight"] = (h,)
        lists[f"{side}.block"] = count
    if head == "lm" and not read.flag("tie_word_embeddings", default=True):
        shapes["lm_head.weight"] = (vocab, h)
    shape = ActivationShape(
        hidden=h, layers=encoder + decoder, heads=q, keys=q, ffn=ffn, vocab=vocab if head == "lm" else 0,
        gated=gated, dropout=3.0 if read.config.get("dropout_rate", 0.1) else 0, eager=heads, upcasts=False,
        head_count=heads, cross=decoder,
        relu=not gated and "relu" in str(read.config.get("feed_forward_proj", "relu")),
    )  # fmt: skip
    return shapes, shape, lists
