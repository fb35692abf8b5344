"""Models of the shapes people train, built small from configurations, train sharded as they do whole.

All cases of a world size run in one job of the ranks; each is compared with the same model, unsharded, on the same
batches.
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import fsdplaunch
from tests.distributed.pool import RankPool
from tests.distributed.tiny import (
    adamw,
    batch,
    build,
    loss_of,
    mean_over_ranks,
    my_part,
    plugin,
    train_alone,
    train_sharded,
)

transformers = pytest.importorskip("transformers", reason="transformers is a development dependency")

STEPS = 10
TOLERANCE = 2e-5
HYBRID = {"sharding_strategy": "HYBRID_SHARD", "dp_replicate_size": 2, "dp_shard_size": 2}


def llama() -> nn.Module:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
        )
    )


def bert() -> nn.Module:
    return transformers.BertForMaskedLM(
        transformers.BertConfig(
            vocab_size=64,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


def t5() -> nn.Module:
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=64,
            d_model=16,
            d_kv=8,
            d_ff=32,
            num_layers=2,
            num_heads=2,
            dropout_rate=0.0,
            pad_token_id=0,
            decoder_start_token_id=0,
        )
    )


def gpt2() -> nn.Module:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=64,
            n_positions=32,
            n_embd=16,
            n_layer=2,
            n_head=2,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
    )


def mixtral() -> nn.Module:
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(
            vocab_size=64,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            num_local_experts=2,
            num_experts_per_tok=2,
        )
    )


FAMILIES: dict[str, tuple[Callable[[], nn.Module], set[str]]] = {
    "Llama": (llama, {"LlamaDecoderLayer"}),
    "BERT": (bert, {"BertLayer"}),
    "T5": (t5, {"T5Block"}),
    "GPT-2": (gpt2, {"GPT2Block"}),
    "Mixtral": (mixtral, {"MixtralDecoderLayer"}),
}


def ids_of(step: int) -> torch.Tensor:
    return torch.randint(1, 64, (8, 10), generator=torch.Generator().manual_seed(step))


def made(family: str) -> nn.Module:
    transformers.utils.logging.set_verbosity_error()
    torch.manual_seed(0)
    return FAMILIES[family][0]()


def train(model: Any, optimizer: Any, cut: Callable[[torch.Tensor], torch.Tensor]) -> list[float]:
    losses = []
    for step in range(STEPS):
        ids = cut(ids_of(step % 3))
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean_over_ranks(loss))
    return losses


def both(family: str, version: int) -> tuple[float, float, set[str]]:
    """Largest difference of the losses, how far the loss fell, and the classes of the units."""
    alone = made(family)
    expected = train(alone, adamw(alone.parameters()), lambda ids: ids)
    model = made(family)
    model, optimizer = fsdplaunch.prepare(model, adamw(model.parameters()), plugin=plugin(fsdp_version=version))
    losses = train(model, optimizer, my_part)
    kinds = {unit.kind for unit in fsdplaunch.describe(model).units}
    return max(abs(a - b) for a, b in zip(expected, losses, strict=True)), expected[0] - expected[-1], kinds


def all_families() -> dict[tuple[str, int], tuple[float, float, set[str]]]:
    return {(family, version): both(family, version) for family in FAMILIES for version in (1, 2)}


@pytest.fixture(scope="module")
def trained(two_ranks: RankPool) -> dict[tuple[str, int], tuple[float, float, set[str]]]:
    found: dict[tuple[str, int], tuple[float, float, set[str]]] = two_ranks.run(all_families, timeout=200)[0]
    return found


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_model_of_transformers_trains_as_alone(trained: Any, family: str, version: int) -> None:
    difference, fell, kinds = trained[family, version]
    assert difference < TOLERANCE
    assert fell > 0.1, "the run must learn, or equal losses say little"
    assert kinds == FAMILIES[family][1]


# Ways of training, for the small model of this folder


class Scaled(nn.Module):
    """A scalar, a parameter of one row and one of few rows beside the model."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = build()
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.row = nn.Parameter(torch.zeros(1, 37))
        self.few = nn.Parameter(torch.zeros(3))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.inner(ids) * self.scale + self.row + self.few.sum()


def scaled() -> nn.Module:
    torch.manual_seed(0)
    return Scaled()


def with_adapters() -> nn.Module:
    """Everything frozen in bf16 but a few small trained layers in fp32, as adapters are trained."""
    model = build()
    model.requires_grad_(False)
    for layer in model.layers:
        layer.feed_forward.up.weight.requires_grad_(True)
    return model


def two_formats() -> nn.Module:
    model = build()
    for layer in model.layers:
        layer.attention_norm.double()
        layer.attention.float()
    return model


class Casting(nn.Module):
    """Norms in fp64 inside of a fp32 model."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = two_formats()
        for layer in self.inner.layers:
            layer.attention_norm.register_forward_pre_hook(lambda _, args: (args[0].double(),))
            layer.attention_norm.register_forward_hook(lambda *given: given[-1].float())

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.inner(ids)


def accumulate(model: nn.Module, optimizer: Any, cut: Any, quiet: Any) -> list[float]:
    losses = []
    for step in range(STEPS):
        for part in (0, 1):
            with quiet(model) if part == 0 else nullcontext():
                loss = loss_of(model, cut(batch(2 * step + part))) / 2
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean_over_ranks(loss))
    return losses


def by_value(model: nn.Module, optimizer: Any, cut: Any, clip: Any) -> list[float]:
    losses = []
    for step in range(STEPS):
        loss = loss_of(model, cut(batch(step)))
        loss.backward()
        clip(model)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean_over_ranks(loss))
    return losses


WAYS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "reshard": (build, {"reshard_after_forward": True}),
    "kept": (build, {"reshard_after_forward": False}),
    "to two ranks": (build, {"reshard_after_forward": 2}),
    "tied": (lambda: build(tied=True), {}),
    "scalar and few rows": (scaled, {}),
    "adapters": (with_adapters, {}),
    "two formats": (Casting, {}),
    "half checkpointed": (build, {"activation_checkpointing": True, "activation_checkpointing_every": 2}),
    "prefetching": (build, {"forward_prefetch": True}),
    "hybrid": (build, HYBRID),
    "copies": (build, {"sharding_strategy": "NO_SHARD"}),
}
ONLY_2 = ("reshard", "kept", "to two ranks", "two formats")  # FSDP1 clips no fp64 gradients


@cache
def losses_alone(make: Callable[[], nn.Module]) -> list[float]:
    return train_alone(make(), STEPS)


def way(name: str, version: int) -> float:
    make, fields = WAYS[name]
    alone = losses_alone(make)
    model = make()
    trained = [param for param in model.parameters() if param.requires_grad]
    model, optimizer = fsdplaunch.prepare(model, adamw(trained), plugin=plugin(fsdp_version=version, **fields))
    sharded = train_sharded(model, optimizer, STEPS)
    return max(abs(a - b) for a, b in zip(alone, sharded, strict=True))


def accumulated(version: int, synchronised: bool) -> float:
    one = build()
    alone = accumulate(one, adamw(one.parameters()), lambda ids: ids, lambda _: nullcontext())
    model = build()
    model, optimizer = fsdplaunch.prepare(model, adamw(model.parameters()), plugin=plugin(fsdp_version=version))
    quiet = (lambda _: nullcontext()) if synchronised else fsdplaunch.no_sync
    return max(abs(a - b) for a, b in zip(alone, accumulate(model, optimizer, my_part, quiet), strict=True))


def clipped_by_value(version: int) -> float:
    one = build()
    alone = by_value(
        one,
        adamw(one.parameters()),
        lambda ids: ids,
        lambda model: nn.utils.clip_grad_value_(model.parameters(), 0.01),
    )
    model = build()
    model, optimizer = fsdplaunch.prepare(model, adamw(model.parameters()), plugin=plugin(fsdp_version=version))
    sharded = by_value(model, optimizer, my_part, lambda each: fsdplaunch.clip_grad_value_(each, 0.01))
    return max(abs(a - b) for a, b in zip(alone, sharded, strict=True))


def all_ways() -> dict[tuple[str, int], float]:
    import os

    os.environ["LOCAL_WORLD_SIZE"] = "4"
    found = {}
    for version in (1, 2):
        for name in WAYS:
            if version == 2 or name not in ONLY_2:
                found[name, version] = way(name, version)
        found["accumulation with sync", version] = accumulated(version, synchronised=True)
        found["accumulation without sync", version] = accumulated(version, synchronised=False)
        found["clipping by value", version] = clipped_by_value(version)
    return found


@pytest.fixture(scope="module")
def differences(four_ranks: RankPool) -> dict[tuple[str, int], float]:
    found: dict[tuple[str, int], float] = four_ranks.run(all_ways, timeout=200)[0]
    return found


CASES = [*WAYS, "accumulation with sync", "accumulation without sync", "clipping by value"]


@pytest.mark.parametrize("name", CASES)
def test_way_of_training_equals_training_alone(differences: dict[tuple[str, int], float], name: str) -> None:
    versions = [version for version in (1, 2) if version == 2 or name not in ONLY_2]
    assert {version: differences[name, version] < TOLERANCE for version in versions} == dict.fromkeys(
        versions, True
    )
