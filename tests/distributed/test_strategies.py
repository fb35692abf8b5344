"""Every sharding strategy and dtype is what the sharded model has, and trains as the unsharded one."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Replicate, Shard

import fsdplaunch
from fsdplaunch.errors import ShardingError
from fsdplaunch.runtime.torch_internals.fsdp import mixed_precision_of, param_groups
from tests.distributed.pool import RankPool
from tests.distributed.tiny import adamw, build, plugin, train_alone, train_sharded

STEPS = 10


def largest_difference(one: list[float], other: list[float]) -> float:
    assert len(one) == len(other)
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def shape_of(model: nn.Module) -> dict[str, Any]:
    """What torch itself says about how a model is sharded."""
    if isinstance(model, FullyShardedDataParallel):
        return {"strategy": model.sharding_strategy.name, "ranks": dist.get_world_size(model.process_group)}
    weight = model.get_parameter("head.weight")
    assert isinstance(weight, DTensor)
    groups = [param_groups(m)[0] for m in model.layers]
    return {
        "mesh": tuple(weight.device_mesh.shape),
        "placements": [type(placement) for placement in weight.placements],
        "post_forward_ranks": {
            g.post_forward_mesh_info and g.post_forward_mesh_info.shard_mesh_size for g in groups
        },
    }


def run(fields: dict[str, Any]) -> dict[str, Any]:
    alone = train_alone(build(), STEPS)
    model = build()
    model, optimizer = fsdplaunch.prepare(model, adamw(model.parameters()), plugin=plugin(**fields))
    sharded = train_sharded(model, optimizer, STEPS)
    return {"alone": alone, "sharded": sharded, **shape_of(model)}


def test_shard_grad_op_fsdp2_keeps_parameters_gathered(two_ranks: RankPool) -> None:
    result = two_ranks.run(run, {"fsdp_version": 2, "sharding_strategy": "SHARD_GRAD_OP"})[0]
    assert largest_difference(result["alone"], result["sharded"]) < 1e-5
    assert result["post_forward_ranks"] == {None}


def test_full_shard_fsdp2_frees_parameters_after_forward(two_ranks: RankPool) -> None:
    result = two_ranks.run(run, {"fsdp_version": 2})[0]
    assert result["post_forward_ranks"] == {2}
    assert result["mesh"] == (2,)
    assert result["placements"] == [Shard]


def test_hybrid_shard_fsdp2_replicates_across_rows_and_shards_inside(four_ranks: RankPool) -> None:
    fields = {"fsdp_version": 2, "sharding_strategy": "HYBRID_SHARD", "dp_replicate_size": 2}
    result = four_ranks.run(run, fields)[0]
    assert largest_difference(result["alone"], result["sharded"]) < 1e-5
    assert (result["mesh"], result["placements"]) == ((2, 2), [Replicate, Shard])


def test_hybrid_shard_zero2_fsdp1_shards_over_half_the_ranks(four_ranks: RankPool) -> None:
    fields = {"fsdp_version": 1, "sharding_strategy": "HYBRID_SHARD_ZERO2", "dp_replicate_size": 2}
    result = four_ranks.run(run, fields)[0]
    assert largest_difference(result["alone"], result["sharded"]) < 1e-5
    assert (result["strategy"], result["ranks"]) == ("_HYBRID_SHARD_ZERO2", 2)


@pytest.mark.parametrize("version", [1, 2])
def test_no_shard_keeps_everything_on_every_rank(two_ranks: RankPool, version: int) -> None:
    result = two_ranks.run(run, {"fsdp_version": version, "sharding_strategy": "NO_SHARD"})[0]
    assert largest_difference(result["alone"], result["sharded"]) < 1e-5
    if version == 2:
        assert result["mesh"] == (2, 1)
    else:
        assert result["strategy"] == "NO_SHARD"


@pytest.mark.parametrize("strategy", ["SHARD_GRAD_OP", "FULL_SHARD"])
def test_fsdp1_strategy_is_the_one_torch_runs(two_ranks: RankPool, strategy: str) -> None:
    result = two_ranks.run(run, {"fsdp_version": 1, "sharding_strategy": strategy})[0]
    assert largest_difference(result["alone"], result["sharded"]) < 1e-5
    assert result["strategy"] == strategy


def test_reshard_to_a_number_of_ranks_uses_groups_of_that_size(four_ranks: RankPool) -> None:
    result = four_ranks.run(run, {"fsdp_version": 2, "reshard_after_forward": 2})[0]
    assert largest_difference(result["alone"], result["sharded"]) < 1e-5
    assert result["post_forward_ranks"] == {2}
    assert result["mesh"] == (4,)


def run_formats(fields: dict[str, Any]) -> dict[str, Any]:
    """Train in mixed precision and look at what was really computed in."""
    alone = train_alone(build(), STEPS)
    model = build()
    model, optimizer = fsdplaunch.prepare(model, adamw(model.parameters()), plugin=plugin(**fields))
    seen: set[torch.dtype] = set()
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda _m, _args, output: seen.add(output.dtype))
    sharded = train_sharded(model, optimizer, STEPS)
    state = next(iter(optimizer.state.values()))
    return {
        "alone": alone,
        "sharded": sharded,
        "computed": seen,
        "kept": {param.dtype for param in model.parameters()},
        "state": state["exp_avg"].dtype,
    }


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("format_name", ["bf16", "fp16"])
def test_mixed_precision_computes_low_and_keeps_fp32(two_ranks: RankPool, version: int, format_name: str) -> None:
    result = two_ranks.run(run_formats, {"fsdp_version": version, "mixed_precision_policy": format_name})[0]
    assert result["computed"] == {torch.bfloat16 if format_name == "bf16" else torch.float16}
    assert result["kept"] == {torch.float32}
    assert result["state"] == torch.float32
    assert largest_difference(result["alone"], result["sharded"]) < 0.05
    assert result["sharded"][-1] < result["sharded"][0] - 0.1


def low_precision_model(fields: dict[str, Any]) -> tuple[set[torch.dtype], set[torch.dtype]]:
    model = build().to(torch.bfloat16)
    model.head.weight.requires_grad_(False)
    model.layers[0].attention.out.weight.requires_grad_(False)
    model = fsdplaunch.prepare(model, plugin=plugin(**fields))
    frozen = {param.dtype for param in model.parameters() if not param.requires_grad}
    return {param.dtype for param in model.parameters() if param.requires_grad}, frozen


def test_bf16_weights_are_kept_in_fp32_under_mixed_precision_but_frozen_ones_stay(two_ranks: RankPool) -> None:
    fields = {"fsdp_version": 2, "mixed_precision_policy": "bf16"}
    assert two_ranks.run(low_precision_model, fields)[0] == ({torch.float32}, {torch.bfloat16})


def test_frozen_weights_join_the_dtype_of_their_flat_parameter(two_ranks: RankPool) -> None:
    fields = {"fsdp_version": 1, "mixed_precision_policy": "bf16"}
    assert two_ranks.run(low_precision_model, fields)[0] == ({torch.float32}, {torch.float32})


def test_bf16_weights_stay_bf16_without_mixed_precision(two_ranks: RankPool) -> None:
    assert two_ranks.run(low_precision_model, {"fsdp_version": 2})[0] == ({torch.bfloat16}, {torch.bfloat16})


def test_master_dtype_is_honoured_on_its_own(two_ranks: RankPool) -> None:
    fields = {"fsdp_version": 2, "master_dtype": "fp32"}
    assert two_ranks.run(low_precision_model, fields)[0] == ({torch.float32}, {torch.bfloat16})


def output_format(environment_says: None = None) -> tuple[torch.dtype, torch.dtype, Any]:
    model = fsdplaunch.prepare(build())
    block_outputs: list[torch.dtype] = []
    model.layers[0].register_forward_hook(lambda _m, _a, output: block_outputs.append(output.dtype))
    logits = model(torch.zeros(2, 3, dtype=torch.long))
    reduce = mixed_precision_of(param_groups(model.layers[0])[0]).reduce_dtype
    return logits.dtype, block_outputs[0], reduce


def test_output_dtype_applies_to_the_model_not_to_its_blocks(two_ranks: RankPool) -> None:
    env = {"ACCELERATE_MIXED_PRECISION": "bf16", "FSDPLAUNCH_PRECISION_OUTPUT": "fp32"}
    assert two_ranks.run(output_format, env=env)[0] == (torch.float32, torch.bfloat16, torch.float32)


def test_reduce_dtype_of_the_environment_reaches_every_unit(two_ranks: RankPool) -> None:
    env = {"ACCELERATE_MIXED_PRECISION": "bf16", "FSDPLAUNCH_PRECISION_REDUCE": "bf16"}
    assert two_ranks.run(output_format, env=env)[0] == (torch.bfloat16, torch.bfloat16, torch.bfloat16)


def prefetching(version: int) -> tuple[float, bool]:
    alone = train_alone(build(), STEPS)
    model = build()
    fields = {"fsdp_version": version, "forward_prefetch": True}
    model, optimizer = fsdplaunch.prepare(model, adamw(model.parameters()), plugin=plugin(**fields))
    if isinstance(model, FullyShardedDataParallel):
        ahead = model.forward_prefetch
    else:
        ahead = all(
            one._get_fsdp_state()._states_to_forward_prefetch == [following._get_fsdp_state()]
            for one, following in zip(model.layers, model.layers[1:], strict=False)
        )
    return largest_difference(alone, train_sharded(model, optimizer, STEPS)), ahead


@pytest.mark.parametrize("version", [1, 2])
def test_forward_prefetch_names_the_next_unit(two_ranks: RankPool, version: int) -> None:
    difference, ahead = two_ranks.run(prefetching, version)[0]
    assert difference < 1e-5
    assert ahead


@pytest.mark.parametrize("version", [1, 2])
def test_offload_without_gpus_trains_all_the_same(two_ranks: RankPool, version: int) -> None:
    result = two_ranks.run(run, {"fsdp_version": version, "cpu_offload": True})[0]
    assert largest_difference(result["alone"], result["sharded"]) < 1e-5


def unsynchronised(version: int, rank_1: str) -> str | float:
    """Nothing is to be sent. Largest difference of the weights to rank 0's, or what was raised."""
    if rank_1 == "empty" and dist.get_rank() == 1:
        with torch.device("meta"):
            model = build()
    else:
        model = build(seed=dist.get_rank() if rank_1 == "another seed" else 0)
    fields = {"fsdp_version": version, "sync_module_states": False, "sharding_strategy": "NO_SHARD"}
    try:
        model = fsdplaunch.prepare(model, plugin=plugin(**fields))
    except ShardingError as error:
        return str(error)
    weight = next(model.parameters())
    weight = weight.to_local() if isinstance(weight, DTensor) else weight
    return (weight - next(build(0).parameters()).reshape(weight.shape)).abs().max().item()


@pytest.mark.parametrize("version", [1, 2])
def test_weights_of_different_seeds_that_are_not_sent_are_refused(two_ranks: RankPool, version: int) -> None:
    for message in two_ranks.run(unsynchronised, version, "another seed"):
        assert "ranks hold different values of embed.weight and 16 more" in message
        assert "fsdp_sync_module_states" in message


@pytest.mark.parametrize("rank_1", ["the same", "empty"])
@pytest.mark.parametrize("version", [1, 2])
def test_rank_without_weights_gets_rank_0s_even_then(two_ranks: RankPool, version: int, rank_1: str) -> None:
    assert two_ranks.run(unsynchronised, version, rank_1) == [0.0, 0.0]
