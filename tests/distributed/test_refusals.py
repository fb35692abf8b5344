"""What cannot be sharded, trained or clipped so is refused by name and with a way out, on every rank."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdplaunch
from tests.distributed.pool import RankPool
from tests.distributed.tiny import adamw, batch, build, loss_of, my_part, plugin, words_of


class OneLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.only = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.only(x)


class Encoder(nn.Module):
    """Most of its parameters are not where the named blocks are."""

    def __init__(self) -> None:
        super().__init__()
        self.small = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.large = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.small[1](self.small[0](x))


def half_frozen() -> nn.Module:
    model = build()
    model.layers[0].attention.out.weight.requires_grad_(False)
    return model


def mixed_inside() -> nn.Module:
    model = build().to(torch.bfloat16)
    model.layers[0].attention_norm.register_parameter("bias", nn.Parameter(torch.zeros(3)))
    return model


def compiled() -> Any:
    return torch.compile(build(), backend="eager")


def of_another_width() -> nn.Module:
    return build(width=16 + 2 * dist.get_rank())


def of_another_seed() -> nn.Module:
    return build(seed=dist.get_rank())


def preparing(make: Callable[[], Any], fields: dict[str, Any]) -> None:
    fsdplaunch.prepare(make(), plugin=plugin(**fields))


def preparing_with_other_settings(_: Any, fields: dict[str, Any]) -> None:
    fields = fields | ({"mixed_precision_policy": "bf16"} if dist.get_rank() else {})
    fsdplaunch.prepare(build(), plugin=plugin(**fields))


def preparing_two_groups(_: Any, fields: dict[str, Any]) -> None:
    model = build()
    params = list(model.parameters())
    optimizer = adamw([{"params": params[:2]}, {"params": params[2:]}])
    fsdplaunch.prepare(model, optimizer, plugin=plugin(**fields))


def preparing_a_stranger(_: Any, fields: dict[str, Any]) -> None:
    model = build()
    optimizer = adamw([*model.parameters(), nn.Parameter(torch.ones(3, 4))])
    fsdplaunch.prepare(model, optimizer, plugin=plugin(**fields))


def clipping(given: Callable[[nn.Module], Any], fields: dict[str, Any]) -> None:
    model = fsdplaunch.prepare(build(), plugin=plugin(**fields))
    loss_of(model, my_part(batch(0))).backward()
    fsdplaunch.clip_grad_norm_(given(model), 1.0)


def first_two(model: nn.Module) -> list[nn.Parameter]:
    return list(model.parameters())[:2]


class Outer(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner


Case = tuple[Callable[..., None], Any, dict[str, Any], list[str]]
CASES: dict[str, Case] = {
    "unknown class": (
        preparing,
        build,
        {"transformer_cls_names_to_wrap": ["Blok"]},
        ["no module of class Blok in TinyLM", "did you mean Block?", "3 x Block (2.592 k parameters each)"],
    ),
    "no blocks": (preparing, OneLinear, {}, ["no repeated blocks found in OneLinear", "NO_WRAP"]),
    "most of the model in no unit": (
        preparing,
        Encoder,
        {},
        [
            "leaves 4.16 k of 4.2 k parameters of Encoder in no unit: it wraps 2 x Linear only",
            "the largest left are large.weight, large.bias",
        ],
    ),
    "another model": (preparing, of_another_width, {}, ["embed.weight is 37x16 on rank 0 and 37x18 on rank 1"]),
    "other settings": (
        preparing_with_other_settings,
        None,
        {},
        ["ranks would shard differently: dtypes is", "on rank 1"],
    ),
    **{
        f"other weights that are not sent, FSDP{version}": (
            preparing,
            of_another_seed,
            {"fsdp_version": version, "sync_module_states": False, "sharding_strategy": "NO_SHARD"},
            ["ranks hold different values of embed.weight and 16 more", "fsdp_sync_module_states"],
        )
        for version in (1, 2)
    },
    **{
        f"dtypes mixed inside a module, FSDP{version}": (
            preparing,
            mixed_inside,
            {"fsdp_version": version},
            ["mixes parameters kept in bfloat16 with attention_norm.bias in float32"],
        )
        for version in (1, 2)
    },
    "frozen and trained in one flat parameter": (
        preparing,
        half_frozen,
        {"fsdp_version": 1, "use_orig_params": False},
        ["torch cannot shard layers.0: Must flatten tensors with uniform `requires_grad`"],
    ),
    "compiled, FSDP1": (
        preparing,
        compiled,
        {"fsdp_version": 1},
        ["cannot shard modules that torch.compile has wrapped", "compile what prepare returns"],
    ),
    "hybrid with one shard": (
        preparing,
        build,
        {"fsdp_version": 1, "sharding_strategy": "HYBRID_SHARD", "dp_replicate_size": 2},
        ["has only one rank per replica", "NO_SHARD"],
    ),
    "groups of flat parameters": (
        preparing_two_groups,
        None,
        {"fsdp_version": 1, "use_orig_params": False},
        ["2 parameter groups", "fsdp_use_orig_params"],
    ),
    "parameter of no model": (preparing_a_stranger, None, {}, ["parameter 24 of group 0, of shape (3, 4)"]),
    "norm of some parameters": (clipping, first_two, {"fsdp_version": 1}, ["only some parameters"]),
    "norm of a module around": (clipping, Outer, {"fsdp_version": 1}, ["only some of Outer is sharded"]),
}


@pytest.mark.parametrize("case", CASES)
def test_refusal_names_what_and_what_to_do(two_ranks: RankPool, case: str) -> None:
    act, what, fields, texts = CASES[case]
    for message in two_ranks.run(words_of, act, what, fields):
        for text in texts:
            assert text in message


def test_backend_that_torch_does_not_have_is_refused(two_ranks: RankPool) -> None:
    message = two_ranks.run(words_of, preparing, build, {}, env={"ACCELERATE_DYNAMO_BACKEND": "FX2TRT"})[0]
    assert "dynamo_backend FX2TRT is not one this torch has" in message
    assert "INDUCTOR" in message
