"""Read a model's tensors without loading it: from weight files' headers, a `config.json`, or a parameter count.

What activations depend on is known of the decoders of transformers that are described here, by `model_type`. Of
other models only what is kept and gathered is counted.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import astuple, dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, Literal

from fsdplaunch.checkpoint.dtypes import DTYPES
from fsdplaunch.checkpoint.model_weights import StoredWeight, find_weight_files
from fsdplaunch.checkpoint.untrusted_files import InvalidFileError, read_regular
from fsdplaunch.display_text import quoted, short_count, shortened
from fsdplaunch.errors import CheckpointError, UsageError
from fsdplaunch.files import JsonError, parse_json

LIMIT = 64 * 1024 * 1024
_FLOATS = ("F64", "F32", "F16", "BF16", "F8", "F4")
_MOST_DIGITS = 10  # of a block's number


@dataclass(frozen=True, slots=True)
class TensorSize:
    """One kind of tensor: its shape and its bytes per element."""

    shape: tuple[int, ...]
    itemsize: int

    @property
    def numel(self) -> int:
        """Return number of elements."""
        return prod(self.shape)

    def split(self, ranks: int) -> "TensorSize":
        """Return what one of the ranks that split a layer has: a part of a matrix, all of a vector."""
        for dim, size in enumerate(self.shape) if len(self.shape) > 1 else ():
            if size % ranks == 0:
                shape = (*self.shape[:dim], size // ranks, *self.shape[dim + 1 :])
                return TensorSize(shape=shape, itemsize=self.itemsize)
        return self

    def share(self, ranks: int) -> int:
        """Return elements that the first of `ranks` ranks holds: whole rows of the first dimension, rounded up."""
        rows = self.shape[0] if self.shape else 1
        return -(-rows // ranks) * (self.numel // rows if rows else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitSize:
    """Tensors that are gathered together, as often as the model repeats them."""

    tensors: tuple[tuple[TensorSize, int], ...]  # the tensors of one of them, and how many there are of each kind
    count: int = 1  # how many such units there are

    @property
    def parameters(self) -> int:
        """Return elements of one unit."""
        return sum(tensor.numel * number for tensor, number in self.tensors)

    @property
    def rows(self) -> int:
        """Return the longest first dimension: more ranks than this leave some without a shard."""
        return max((tensor.shape[0] for tensor, _ in self.tensors if tensor.shape), default=1)

    def split(self, ranks: int) -> "UnitSize":
        """Return what one of the ranks that split its layers has of it."""
        tensors = tuple((tensor.split(ranks), number) for tensor, number in self.tensors)
        return self if ranks == 1 else replace(self, tensors=tensors)

    def share(self, ranks: int, *, flat: bool = False) -> int:
        """Return elements of one unit that a rank holds; flat: cut anywhere, as FSDP1 does."""
        if flat:
            return -(-self.parameters // ranks)
        return sum(tensor.share(ranks) * number for tensor, number in self.tensors)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """A model."""

    source: str  # where the sizes come from, in words
    root: UnitSize  # what belongs to no repeated block: embeddings, head, last norm
    blocks: tuple[UnitSize, ...]  # the repeated blocks, one entry per kind
    itemsize: int  # bytes per element of most parameters
    names: Mapping[str, TensorSize]  # every tensor by its full name

    @property
    def parameters(self) -> int:
        """Return the elements of the full model."""
        return self.root.parameters + sum(unit.parameters * unit.count for unit in self.blocks)

    @property
    def depth(self) -> int:
        """Return repeated blocks of all kinds."""
        return sum(unit.count for unit in self.blocks)

    @property
    def words(self) -> str:
        """Return parameters, blocks and where they were counted."""
        blocks = f"{self.depth} blocks" if self.blocks else "no repeated blocks"
        return f"{short_count(self.parameters)} parameters, {blocks} ({self.source})"

    @property
    def stored(self) -> int:
        """Return bytes of all tensors in their own dtypes."""
        return sum(tensor.numel * tensor.itemsize for tensor in self.names.values())


def model_sizes(tensors: Mapping[str, TensorSize], source: str) -> ModelSizes:
    """Sort tensors into the model's repeated blocks and the rest."""
    members: dict[str, list[TensorSize]] = {name: [] for name in block_names(tensors)}
    root: list[TensorSize] = []
    widths: Counter[int] = Counter()
    for name, tensor in tensors.items():
        parts = name.split(".")
        parents = (".".join(parts[:length]) for length in range(1, len(parts)))
        members.get(next((each for each in parents if each in members), ""), root).append(tensor)
        widths[tensor.itemsize] += tensor.numel
    blocks = Counter(unit_of(content) for content in members.values() if content)
    return ModelSizes(
        source=source,
        root=unit_of(root),
        blocks=tuple(replace(unit, count=count) for unit, count in blocks.items()),
        itemsize=widths.most_common(1)[0][0] if widths else 4,
        names=dict(tensors),
    )


def block_names(names: Iterable[str], prefix: str = "") -> Iterator[str]:
    """Yield the name of each block of the outermost lists of modules whose members are mostly alike.

    A list counts when its numbers run from 0 and at least half of its members hold the same names. A list of
    unlike stages (a convolution network's) is looked into instead.
    """
    lists: dict[str, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name in names:
        parts = name.split(".")
        numbers = (place for place, part in enumerate(parts[:-1]) if part.isdecimal() and len(part) < _MOST_DIGITS)
        at = next(numbers, None)
        if at is not None:
            lists[".".join(parts[:at])][int(parts[at])].append(".".join(parts[at + 1 :]))
    for place, members in lists.items():
        alike = Counter(map(frozenset, members.values())).most_common(1)[0][1]
        is_run = set(members) == set(range(len(members))) and alike >= max(2, len(members) / 2)
        for number, inside in members.items():
            block = f"{prefix}{place}.{number}" if place else f"{prefix}{number}"  # a model may be a list itself
            if is_run:
                yield block
            else:
                yield from block_names(inside, f"{block}.")


def unit_of(tensors: Iterable[TensorSize]) -> UnitSize:
    """Return the unit that holds some tensors."""
    return UnitSize(tensors=tuple(sorted(Counter(tensors).items(), key=lambda kind: astuple(kind[0]))))


def read_sizes(folder: Path) -> ModelSizes:
    """Read the sizes from the headers of a model folder's safetensors files; no tensor is read."""
    try:
        files = find_weight_files(folder)
    except CheckpointError as error:
        raise UsageError(error.message, hint=error.hint) from None
    stored: dict[tuple[Any, ...], StoredWeight] = {}  # a tensor with two names counts once
    for weight in files.weights.values():
        if weight.code.startswith(_FLOATS):
            stored.setdefault((weight.file, weight.start, weight.shape), weight)
    # Elements of other dtypes than a copy knows are of a byte or less.
    tensors = {
        one.name: TensorSize(one.shape, 1 if one.dtype is None else one.dtype.size) for one in stored.values()
    }
    count = len(files.paths)
    return model_sizes(tensors, f"headers of {count} file{'s' if count > 1 else ''} in {folder}")


def read_json_file(path: Path) -> dict[str, Any]:
    """Return the mapping a file holds; a UsageError where there is none."""
    try:
        found = parse_json(read_regular(path, LIMIT))
    except InvalidFileError as error:
        reason = str(error).removeprefix("it cannot be opened: ")
        msg = f"{path} cannot be read: {reason[:1].lower()}{reason[1:]}"
        raise UsageError(msg) from None
    except JsonError as error:
        msg = f"{path} is not JSON: {error}"
        raise UsageError(msg) from None
    if not isinstance(found, dict):
        msg = f"{path} holds no JSON mapping"
        raise UsageError(msg)
    return found


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
            shown = shortened(str(value), 20)
        msg = f"{name} is {shown}, not a whole number from {least} to {most}"
        raise ValueError(msg)

    def flag(self, name: str, *, default: bool) -> bool:
        """Return whether something is switched on."""
        value = self.config.get(name)
        return default if value is None else bool(value)


Family = Callable[..., tuple[Shapes, ActivationShape]]


def _linear(name: str, out: int, into: int, *, bias: bool = True) -> Shapes:
    return {f"{name}.weight": (out, into)} | ({f"{name}.bias": (out,)} if bias else {})


Trait = Literal[
    "qkv_bias", "head_norm", "wide_norm", "post_norms", "after_only", "tied", "experts", "fused", "capped"
]
"""How a family of decoders differs from Llama."""


def _decoder(*kind: Trait) -> Family:
    """Describe Llama and what is built like it."""

    def family(read: ConfigNumbers, *, has_head: bool) -> tuple[Shapes, ActivationShape]:
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
        return shapes, shape

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model."""

    sizes: ModelSizes  # its tensors
    shape: ActivationShape | None  # what its activations depend on; None where that is not known


def describe(config: Mapping[str, Any], *, source: str) -> Model:
    """Describe the model of a `config.json`'s content.

    Raises:
        UsageError: Its family is not known here, or it lacks a number.
    """
    kind = config.get("model_type")
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None:
        msg = f"{source}: the model type {kind!r} is not known"
        hint = "give its folder of weights, or name a function that builds it: script.py:build_model"
        raise UsageError(msg, hint=f"{hint}; known are {', '.join(sorted(FAMILIES))}")
    named = config.get("architectures")
    name = str(named[0]) if isinstance(named, list) and named else ""
    has_head = not name.endswith(("Model", "Classification")) or name.endswith("LMHeadModel")
    try:
        shapes, shape = family(ConfigNumbers(config, source), has_head=has_head)
    except UsageError:
        raise
    except (TypeError, ValueError, ZeroDivisionError) as error:
        msg = f"{source}: the sizes of this {kind} model are invalid: {error}"
        raise UsageError(msg) from None
    dtype = DTYPES.get(str(config.get("dtype") or config.get("torch_dtype")), DTYPES["float32"])
    tensors = {name: TensorSize(size, dtype.size) for name, size in shapes.items()}
    return Model(sizes=model_sizes(tensors, source), shape=shape)


_WORDS = 32_000
_HEAD = 128
MOST_PARAMETERS = 4 * 10**12
"""What the largest of the llamas below comes to."""


def llama_of(parameters: int) -> dict[str, Any]:
    """Return the configuration of the llama of nearest size and usual shape: one block per 128 of width."""
    usual = ((width, width // _HEAD) for width in range(_HEAD, 32_769, _HEAD))
    shapes = ((width, depth) for width, most in usual for depth in range(max(1, most * 3 // 4), most * 5 // 4 + 1))
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


def _inner(width: int) -> int:
    """Return the width inside the feed-forward part: 8/3 of the model's, up to a multiple of 256."""
    return -(-8 * width // (3 * 256)) * 256


def count_parameters(width: int, depth: int) -> int:
    """Return how many parameters a llama of this width and depth has."""
    block = 4 * width * width + 3 * width * _inner(width) + 2 * width
    return depth * block + 2 * _WORDS * width + width
