"""The dtypes that training computes in, keeps and reduces in are those that were asked for."""

from typing import Any

import pytest
import torch
from torch import nn

import fsdplaunch
from fsdplaunch.runtime.torch_internals.fsdp import mixed_precision_of, param_groups
from tests.distributed.pool import RankPool
from tests.distributed.tiny import adamw, batch, build, loss_of, my_part, plugin, train_alone, train_sharded

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
STEPS = 6


def mixed_precision(fields: dict[str, Any]) -> tuple[Any, ...]:
    """Losses alone and sharded; the dtypes that layers compute in, and of parameters and of optimizer state."""
    alone = train_alone(build(), STEPS)
    model = build()
    model, optimizer = fsdplaunch.prepare(model, adamw(model.parameters()), plugin=plugin(**fields))
    seen: set[torch.dtype] = set()
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda _m, _args, output: seen.add(output.dtype))
    sharded = train_sharded(model, optimizer, STEPS)
    kept = {param.dtype for param in model.parameters()}
    return alone, sharded, seen, kept, next(iter(optimizer.state.values()))["exp_avg"].dtype


@pytest.mark.parametrize(("version", "name", "dtype"), [(1, "bf16", BF16), (2, "fp16", FP16)])
def test_mixed_precision_computes_low_and_keeps_fp32(
    two_ranks: RankPool, version: int, name: str, dtype: torch.dtype
) -> None:
    fields = {"fsdp_version": version, "mixed_precision_policy": name}
    alone, sharded, seen, kept, state = two_ranks.run(mixed_precision, fields)[0]
    assert (seen, kept, state) == ({dtype}, {FP32}, FP32)
    assert sharded == pytest.approx(alone, abs=0.05)
    assert sharded[-1] < sharded[0] - 0.1


def of_a_bf16_model(fields: dict[str, Any]) -> tuple[set[torch.dtype], set[torch.dtype]]:
    """The dtypes of trained and of frozen parameters."""
    model = build().to(BF16)
    model.head.weight.requires_grad_(False)
    model.layers[0].attention.out.weight.requires_grad_(False)
    params = list(fsdplaunch.prepare(model, plugin=plugin(**fields)).parameters())
    return {p.dtype for p in params if p.requires_grad}, {p.dtype for p in params if not p.requires_grad}


KEPT: dict[str, tuple[dict[str, Any], torch.dtype, torch.dtype]] = {
    "as they are": ({"fsdp_version": 2}, BF16, BF16),
    "mixed precision": ({"fsdp_version": 2, "mixed_precision_policy": "bf16"}, FP32, BF16),
    "frozen join their flat parameter": ({"fsdp_version": 1, "mixed_precision_policy": "bf16"}, FP32, FP32),
    "master dtype alone": ({"fsdp_version": 2, "master_dtype": "fp32"}, FP32, BF16),
}


@pytest.mark.parametrize("case", KEPT)
def test_trained_bf16_weights_are_kept_in_fp32_where_that_is_asked_for(two_ranks: RankPool, case: str) -> None:
    fields, trained, frozen = KEPT[case]
    assert two_ranks.run(of_a_bf16_model, fields)[0] == ({trained}, {frozen})


def of_outputs() -> tuple[torch.dtype, torch.dtype, Any]:
    """The dtypes of logits, of a block's output, and of the reduction in a block."""
    model = fsdplaunch.prepare(build())
    outputs: list[torch.dtype] = []
    model.layers[0].register_forward_hook(lambda _m, _a, output: outputs.append(output.dtype))
    logits = model(torch.zeros(2, 3, dtype=torch.long))
    return logits.dtype, outputs[0], mixed_precision_of(param_groups(model.layers[0])[0]).reduce_dtype


@pytest.mark.parametrize(
    ("key", "dtype", "expected"), [("OUTPUT", "fp32", (FP32, BF16, FP32)), ("REDUCE", "bf16", (BF16, BF16, BF16))]
)
def test_output_dtype_is_the_models_and_reduce_dtype_every_units(
    two_ranks: RankPool, key: str, dtype: str, expected: tuple[torch.dtype, ...]
) -> None:
    env = {"ACCELERATE_MIXED_PRECISION": "bf16", f"FSDPLAUNCH_PRECISION_{key}": dtype}
    assert two_ranks.run(of_outputs, env=env)[0] == expected


def scaled_down(version: int) -> list[float]:
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    model = build()
    fields = {"fsdp_version": version, "mixed_precision_policy": "fp16"}
    model, optimizer = fsdplaunch.prepare(model, adamw(model.parameters()), plugin=plugin(**fields))
    scaler = ShardedGradScaler(device="cpu", init_scale=1024.0) if version == 1 else torch.amp.GradScaler("cpu")
    losses = []
    for step in range(STEPS):
        loss = loss_of(model, my_part(batch(step)))
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        fsdplaunch.clip_grad_norm_(model, 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("version", [1, 2])
def test_fp16_learns_with_a_gradient_scaler(two_ranks: RankPool, version: int) -> None:
    losses = two_ranks.run(scaled_down, version)[0]
    assert losses[-1] < losses[0] - 0.1


def with_norms_in_fp32(version: int) -> Any:
    model = build().to(BF16)
    model.norm.float()
    found = fsdplaunch.describe(fsdplaunch.prepare(model, plugin=plugin(fsdp_version=version)))
    return [unit.name for unit in found.units], found.kept["float32"]


@pytest.mark.parametrize("version", [1, 2])
def test_modules_of_another_dtype_get_units_of_their_own(two_ranks: RankPool, version: int) -> None:
    assert two_ranks.run(with_norms_in_fp32, version)[0] == (["layers.0", "layers.1", "layers.2", "norm"], 16)


def in_float8() -> tuple[int, list[float]]:
    model = build(width=32)
    fields = {"fsdp_version": 2, "mixed_precision_policy": "fp8"}
    model, optimizer = fsdplaunch.prepare(model, adamw(model.parameters()), plugin=plugin(**fields))
    return fsdplaunch.describe(model).float8, train_sharded(model, optimizer, STEPS)


def test_float8_layers_learn(two_ranks: RankPool) -> None:
    pytest.importorskip("torchao", reason="torchao is an optional dependency (fp8)")
    layers, losses = two_ranks.run(in_float8, timeout=150)[0]
    assert layers == 3 * 5 - 1
    assert losses[-1] < losses[0] - 0.1
