"""Every family of models that the quick estimate knows, by its `model_type`."""

from collections.abc import Mapping

from fsdplaunch.estimate.families.decoders import Decoder, decoder
from fsdplaunch.estimate.families.encoders import bert, t5
from fsdplaunch.estimate.families.gpt import gpt2, gpt_neox, opt
from fsdplaunch.estimate.families.parts import Family

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
    "gpt_neox": gpt_neox,
    "opt": opt,
    "bert": bert("bert"),
    "roberta": bert("roberta", roberta=True),
    "t5": t5,
}
"""Every family by its `model_type`."""
