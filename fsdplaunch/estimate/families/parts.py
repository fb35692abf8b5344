"""What the families are written with: reading numbers, naming layers, what activations depend on."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fsdplaunch.errors import UsageError
from fsdplaunch.terminal_text import quoted

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
        eager: Heads whose attention weights are kept in full, where no fused attention is used; 0 otherwise.
        head_count: Heads of queries; 0 where the configuration does not say.
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
    head_count: int = 0
    max_length: int = 0
    upcasts: bool = True
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


def head_tensors(
    read: ConfigNumbers, head: str, vocab: int, width: int, *, tied: bool, output: str = "lm_head"
) -> Shapes:
    """Return the tensors of a decoder's head.

    Args:
        read: The configuration.
        head: lm, classify or none.
        vocab: Entries of the vocabulary.
        width: What the head reads.
        tied: Whether the family shares its embedding with the output, where the configuration does not say.
        output: The family's name of the matrix to the vocabulary.
    """
    if head == "classify":
        return {"score.weight": (read.labels, width)}
    has_own = head == "lm" and not read.flag("tie_word_embeddings", default=tied)
    return {f"{output}.weight": (vocab, width)} if has_own else {}
