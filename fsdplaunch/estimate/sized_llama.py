"""A size such as 8b as a model: a llama of about that many parameters."""

from typing import Any

_WORDS = 32_000
_HEAD = 128
_STEP = 256
MOST_PARAMETERS = 4 * 10**12
"""What the largest of these shapes comes to."""


def llama_of(parameters: int) -> dict[str, Any]:
    """Return the configuration of the llama whose size is nearest, of a usual shape: one block per 128 of width.

    Args:
        parameters: Number of parameters.
    """
    widths = range(_HEAD, 32_769, _HEAD)
    shapes = [(width, depth) for width in widths for depth in _depths(width)]
    width, depth = min(shapes, key=lambda shape: abs(count_parameters(*shape) - parameters))
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": width,
        "intermediate_size": _inner(width),
        "num_hidden_layers": depth,
        "num_attention_heads": width // _HEAD,
        "vocab_size": _WORDS,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }


def _depths(width: int) -> range:
    usual = width // _HEAD
    return range(max(1, usual * 3 // 4), usual * 5 // 4 + 1)


def _inner(width: int) -> int:
    """Return the width inside the feed-forward part: 8/3 of the model's, up to a multiple of 256."""
    return -(-8 * width // (3 * _STEP)) * _STEP


def count_parameters(width: int, depth: int) -> int:
    """Return how many parameters a llama of this width and depth has.

    Args:
        width: `hidden_size`.
        depth: `num_hidden_layers`.
    """
    block = 4 * width * width + 3 * width * _inner(width) + 2 * width
    return depth * block + 2 * _WORDS * width + width
