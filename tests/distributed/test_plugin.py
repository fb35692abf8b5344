"""The plugin holds what the environment says, what code says on top of it, and refuses what cannot be honoured."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import (
    CPUOffload,
    CPUOffloadPolicy,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy

from fsdplaunch import FullyShardedDataParallelPlugin
from fsdplaunch.config.environment import decode, encode
from fsdplaunch.config.resolve import resolve
from fsdplaunch.config.schema.config import build_config
from fsdplaunch.errors import ShardingError, UsageError
from fsdplaunch.runtime.plugin import ambient_plugin
from fsdplaunch.runtime.sharding.settings import settings_of
from tests.distributed.tiny import Block, build


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No variable of a configuration, before and after."""
    for name in [name for name in os.environ if name.startswith(("FSDP", "ACCELERATE", "PARALLELISM"))]:
        monkeypatch.delenv(name)
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


def launched(monkeypatch: pytest.MonkeyPatch, values: dict[str, Any]) -> Any:
    """Set the environment that a launch with these values, by dotted name, would set; return its configuration."""
    config = resolve(build_config({tuple(name.split(".")): value for name, value in values.items()}))
    for name, text in encode(config).items():
        monkeypatch.setenv(name, text)
    return config


CONFIGURATIONS: list[dict[str, Any]] = [
    {},
    {"fsdp_config.fsdp_version": 1, "fsdp_config.fsdp_sharding_strategy": "HYBRID_SHARD_ZERO2"},
    {"fsdp_config.fsdp_reshard_after_forward": 4, "fsdp_config.fsdp_offload_params": True},
    {"fsdp_config.fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_config.fsdp_min_num_params": 1234},
    {"fsdp_config.fsdp_auto_wrap_policy": "NO_WRAP", "fsdp_config.fsdp_ignored_modules": r"head|layers\.0"},
    {
        "precision.param": "bf16",
        "precision.reduce": "bf16",
        "precision.output": "fp32",
        "precision.master": "bf16",
    },
    {
        "parallelism_config.parallelism_config_dp_replicate_size": 2,
        "parallelism_config.parallelism_config_dp_shard_size": -1,
    },
]


@pytest.mark.parametrize("values", CONFIGURATIONS)
def test_settings_of_the_plugin_are_those_of_the_file(
    monkeypatch: pytest.MonkeyPatch, values: dict[str, Any]
) -> None:
    config = launched(monkeypatch, values)
    assert FullyShardedDataParallelPlugin().settings() == settings_of(config)
    assert settings_of(decode()) == settings_of(config)


def test_code_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    launched(
        monkeypatch,
        {
            "fsdp_config.fsdp_sharding_strategy": "SHARD_GRAD_OP",
            "fsdp_config.fsdp_activation_checkpointing": True,
            "mixed_precision": "bf16",
        },
    )
    plugin = FullyShardedDataParallelPlugin(
        sharding_strategy="full shard", activation_checkpointing=False, mixed_precision_policy="fp16"
    )
    settings = plugin.settings()
    assert (settings.strategy, settings.reshard_after_forward) == ("FULL_SHARD", True)
    assert settings.activation_checkpointing is False
    assert settings.dtypes.param == torch.float16


SAME: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"fsdp_version": 1, "sharding_strategy": 2}, {"fsdp_version": 1, "sharding_strategy": "SHARD_GRAD_OP"}),
    (
        {"fsdp_version": 1, "sharding_strategy": ShardingStrategy._HYBRID_SHARD_ZERO2},
        {"fsdp_version": 1, "reshard_after_forward": "HYBRID_SHARD_ZERO2"},
    ),
    (
        {"auto_wrap_policy": "size_based_wrap", "min_num_params": "1e3"},
        {"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 1000},
    ),
    ({"fsdp_version": 2, "cpu_offload": True}, {"fsdp_version": 2, "cpu_offload": CPUOffloadPolicy()}),
    ({"fsdp_version": 1, "cpu_offload": "true"}, {"fsdp_version": 1, "cpu_offload": CPUOffload(True)}),
    ({"fsdp_version": 1, "backward_prefetch": 2}, {"fsdp_version": 1, "backward_prefetch": "backward_post"}),
    ({"fsdp_version": 2, "reshard_after_forward": "false"}, {"fsdp_version": 2, "reshard_after_forward": False}),
    ({"state_dict_type": "1"}, {"state_dict_type": StateDictType.FULL_STATE_DICT}),
    (
        {"mixed_precision_policy": {"param_dtype": "bf16", "reduce_dtype": torch.float32}},
        {"mixed_precision_policy": MixedPrecision(torch.bfloat16, torch.float32)},
    ),
]


@pytest.mark.parametrize(("one", "other"), SAME)
def test_forms_of_a_value_mean_the_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert FullyShardedDataParallelPlugin(**one).settings() == FullyShardedDataParallelPlugin(**other).settings()


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"fsdp_version": 3}, "fsdp_version must be one of 1, 2, got 3"),
    ({"cpu_offload": "maybe"}, "cpu_offload must be true or false, got 'maybe'"),
    (
        {"fsdp_version": 1, "cpu_offload": CPUOffloadPolicy(pin_memory=False)},
        "cpu_offload must not be CPUOffloadP",
    ),
    ({"fsdp_version": 2, "activation_checkpointing_offload": True}, "needs activation_checkpointing"),
    (
        {"mixed_precision_policy": MixedPrecision(torch.bfloat16, keep_low_precision_grads=True)},
        "must be MixedPrecisionPolicy",
    ),
    ({"mixed_precision_policy": "int8"}, "mixed_precision_policy must be one of fp32"),
    ({"mixed_precision_policy": {"param": "bf16"}}, "mixed_precision_policy must be a name, or a mapping of"),
]
"""Beside what tests/distributed/test_effects.py has."""


@pytest.mark.parametrize(("fields", "words"), REFUSED)
def test_value_that_cannot_be_honoured_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        FullyShardedDataParallelPlugin(**{"fsdp_version": 2, **fields})
    assert words in str(caught.value)


def test_version_is_the_references_where_nobody_names_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert FullyShardedDataParallelPlugin().fsdp_version == 1
    assert ambient_plugin.__wrapped__().fsdp_version == 2
    monkeypatch.setenv("FSDP_VERSION", "2")
    assert FullyShardedDataParallelPlugin().fsdp_version == 2
    assert FullyShardedDataParallelPlugin(fsdp_version=1).fsdp_version == 1


def test_strategy_stands_in_the_field_of_its_version() -> None:
    one = FullyShardedDataParallelPlugin(fsdp_version=1, sharding_strategy="SHARD_GRAD_OP")
    assert (one.sharding_strategy, one.reshard_after_forward) == (ShardingStrategy.SHARD_GRAD_OP, None)
    other = FullyShardedDataParallelPlugin(fsdp_version=1, reshard_after_forward="SHARD_GRAD_OP")
    assert other.sharding_strategy is other.reshard_after_forward is ShardingStrategy.SHARD_GRAD_OP
    two = FullyShardedDataParallelPlugin(fsdp_version=2, sharding_strategy="SHARD_GRAD_OP")
    assert (two.sharding_strategy, two.reshard_after_forward) == (None, False)
    assert two.settings().strategy == "SHARD_GRAD_OP"


def test_wrap_policy_nobody_chose_makes_one_unit_of_a_model_without_blocks() -> None:
    plugin = FullyShardedDataParallelPlugin()
    plugin.set_auto_wrap_policy(nn.Linear(2, 2))
    assert plugin.auto_wrap_policy is None
    chosen = FullyShardedDataParallelPlugin(auto_wrap_policy="TRANSFORMER_BASED_WRAP")
    with pytest.raises(ShardingError, match="no repeated blocks"):
        chosen.set_auto_wrap_policy(nn.Linear(2, 2))
    named = FullyShardedDataParallelPlugin(transformer_cls_names_to_wrap=["LlamaDecoderLayer"])
    with pytest.raises(ShardingError, match="no module of class LlamaDecoderLayer in TinyLM"):
        named.set_auto_wrap_policy(build())


def test_wrap_policy_is_bound_to_a_models_classes() -> None:
    plugin = FullyShardedDataParallelPlugin(auto_wrap_policy="transformer_based_wrap")
    plugin.set_auto_wrap_policy(build())
    assert plugin.auto_wrap_policy.func is transformer_auto_wrap_policy
    assert plugin.auto_wrap_policy.keywords == {"transformer_layer_cls": {Block}}
    sized = FullyShardedDataParallelPlugin(auto_wrap_policy="size_based_wrap", min_num_params=50)
    sized.set_auto_wrap_policy(build())
    assert sized.auto_wrap_policy.func is size_based_auto_wrap_policy
    assert sized.auto_wrap_policy.keywords == {"min_num_params": 50}


def test_state_dict_type_may_change_and_its_options_with_it() -> None:
    options = FullStateDictConfig(offload_to_cpu=False, rank0_only=False)
    given = FullyShardedDataParallelPlugin(state_dict_type="FULL_STATE_DICT", state_dict_config=options)
    assert given.state_dict_config is options
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
    assert isinstance(plugin.state_dict_config, ShardedStateDictConfig)
    plugin.set_state_dict_type("FULL_STATE_DICT")
    assert isinstance(plugin.state_dict_config, FullStateDictConfig)
    assert isinstance(plugin.optim_state_dict_config, FullOptimStateDictConfig)
    assert plugin.settings().state_dict_type == "FULL_STATE_DICT"
    with pytest.raises(UsageError, match="has no state_dict_type LOCAL_STATE_DICT"):
        plugin.set_state_dict_type("LOCAL_STATE_DICT")


def test_policy_object_keeps_what_else_it_sets() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=False)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, mixed_precision_policy=policy)
    assert plugin.mixed_precision_policy.cast_forward_inputs is False
    assert plugin.settings().dtypes.template.cast_forward_inputs is False


def test_mixed_precision_is_set_unless_a_policy_is_there() -> None:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=1)
    plugin.set_mixed_precision(torch.bfloat16)
    assert plugin.settings().dtypes.param == torch.bfloat16
    plugin.set_mixed_precision("fp16")
    assert plugin.settings().dtypes.param == torch.bfloat16
    plugin.set_mixed_precision("fp16", override=True, buffer_autocast=True)
    assert plugin.settings().dtypes.param == torch.float16
    assert plugin.mixed_precision_policy.buffer_dtype == torch.float32
