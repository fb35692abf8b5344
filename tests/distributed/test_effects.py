"""Every field of the plugin, every value it takes, both versions: what torch's own objects say afterwards.

A row names a field, a value, and what is then found on the sharded model, or the words the value is refused with.
All rows of a version run in one job of four ranks; a field or a value without a row fails a test.
"""

import dataclasses
import importlib.util
import os
from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.fsdp import (
    CPUOffload,
    FSDPModule,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
)
from torch.distributed.tensor import DTensor

import fsdplaunch
from fsdplaunch import FullyShardedDataParallelPlugin
from fsdplaunch.config.schema import kinds as value_kinds
from fsdplaunch.errors import LaunchError
from fsdplaunch.runtime import messages
from fsdplaunch.runtime.torch_internals.fsdp import mixed_precision_of, param_groups
from tests.distributed.pool import RankPool
from tests.distributed.tiny import Norm, TinyLM, adamw, batch, loss_of, my_part

RANKS = 4
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ONE_COPY = {"mesh": (RANKS,), "placements": ["Shard"]}
HYBRID = {"dp_replicate_size": 2}
ROWS_AND_COPIES = {"mesh": (2, 2), "placements": ["Replicate", "Shard"]}


class Model(TinyLM):
    """With a method beside forward that needs the root's parameters."""

    def embedded(self, ids: torch.Tensor) -> torch.Tensor:
        return self.embed(ids)


def small() -> Model:
    torch.manual_seed(0)
    return Model(width=8, layers=2)


# What is found


def sharded_modules(model: nn.Module) -> list[Any]:
    return [m for m in model.modules() if isinstance(m, FSDPModule | FullyShardedDataParallel)]


def facts(model: Any) -> dict[str, Any]:
    """What torch says of a sharded model, whichever version made it."""
    root, *units = sharded_modules(model)
    found: dict[str, Any] = {
        "units": len(units),
        "checkpointed": sum(isinstance(m, CheckpointWrapper) for m in model.modules()),
        "whole": sorted(whole_ones(model)),
    }
    unit = units[0] if units else root
    if isinstance(root, FullyShardedDataParallel):
        policy = unit.mixed_precision
        return found | {
            "version": 1,
            "strategy": root.sharding_strategy.name,
            "ranks": dist.get_world_size(root.process_group),
            "backward": root.backward_prefetch and root.backward_prefetch.name,
            "ahead": root.forward_prefetch,
            "formats": (policy.param_dtype, policy.reduce_dtype, policy.buffer_dtype),
            "limited": root.limit_all_gathers,
            "original": root._use_orig_params,
            "offloaded": root.cpu_offload.offload_params,
            "kept": {m._handle.flat_param.dtype for m in [root, *units] if m._handle},
        }
    group = param_groups(unit)[0]
    weight = next(p for p in model.parameters() if isinstance(p, DTensor))
    after = group.post_forward_mesh_info
    policy = mixed_precision_of(group)
    return found | {
        "version": 2,
        "mesh": tuple(weight.device_mesh.shape),
        "placements": [type(placement).__name__ for placement in weight.placements],
        "spread": after and after.shard_mesh_size,
        "ahead": bool(unit._get_fsdp_state()._states_to_forward_prefetch),
        "behind": bool(unit._get_fsdp_state()._states_to_backward_prefetch),
        "formats": (policy.param_dtype, policy.reduce_dtype, root._get_fsdp_state()._mp_policy.output_dtype),
        "offload": type(group.offload_policy).__name__,
        "kept": {p.dtype for p in model.parameters()},
    }


def whole_ones(model: Any) -> list[str]:
    """The parameters that are neither DTensors nor part of a flat parameter."""
    flat = [m._handle.flat_param for m in sharded_modules(model) if getattr(m, "_handle", None)]
    parts = {id(param) for each in flat for param in [each, *(each._params or [])]}
    named = fsdplaunch.named_parameters(model)
    return [name for name, param in named if not isinstance(param, DTensor) and id(param) not in parts]


def kind_of_state(model: Any) -> dict[str, Any]:
    """What the state dict holds in the context of the plugin's own type."""
    with fsdplaunch.state_dict_type(model):
        if isinstance(model, FullyShardedDataParallel):
            said = FullyShardedDataParallel.get_state_dict_type(model)
            kind = {"type": said.state_dict_type.name, "optimizer": type(said.optim_state_dict_config).__name__}
        else:
            kind = {}
        state = model.state_dict()
    kinds = {type(value).__name__ for value in state.values()}
    return kind | {"held": kinds, "entries": len(state)}


def whole_optimizer_state(model: Any) -> dict[str, Any]:
    optimizer = adamw(model.parameters())
    loss_of(model, my_part(batch(0))).backward()
    optimizer.step()
    return {"states": len(fsdplaunch.full_optim_state_dict(model, optimizer)) > 0}


def as_method(model: Any) -> dict[str, Any]:
    ids = batch(0)[:, :3]
    return {"same": torch.equal(model.embedded(ids), small().embedded(ids))}


def first_value(model: Any) -> dict[str, Any]:
    weight = next(model.parameters())
    local = weight.to_local() if isinstance(weight, DTensor) else weight
    return {"values": sorted(set(local.flatten().tolist()))}


def loading_variable(model: Any) -> dict[str, Any]:
    """What transformers reads, and whether rank 0's weights reached this rank."""
    with fsdplaunch.summon_full_params(model, writeback=False):
        named = dict(fsdplaunch.named_parameters(model))
        same = all(torch.equal(named[name], param) for name, param in small().named_parameters())
    return {"variable": os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"], "same": same}


# How the model is made


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return small()


def on_rank_0() -> nn.Module:
    return small() if dist.get_rank() == 0 else on_meta()


@torch.no_grad()
def fill(module: nn.Module) -> None:
    for tensor in [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
        tensor.fill_(0.5)


def norms(module: nn.Module) -> bool:
    return isinstance(module, Norm)


def never(module: nn.Module) -> bool:
    return False


def head_of(model: Any) -> dict[str, Any]:
    return {"ignored_modules": [model.head]}


# The table


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One value of one field.

    Attributes:
        value: Of the field; for modules, a function of the model.
        one: What is found under FSDP1; a text: the words it is refused with.
        two: The same under FSDP2.
        along: Further fields that the value needs.
        look: What to look at beside the common facts.
        make: What builds the model.
    """

    field: str
    value: Any
    one: dict[str, Any] | str
    two: dict[str, Any] | str
    along: dict[str, Any] = dataclasses.field(default_factory=dict)
    look: Callable[[Any], dict[str, Any]] | None = None
    make: Callable[[], nn.Module] = small


def rows(field: str, *cases: tuple[Any, Any, Any], **options: Any) -> list[Row]:
    return [Row(field=field, value=value, one=one, two=two, **options) for value, one, two in cases]


NOTHING_TO_OFFLOAD = {"notes": ["fsdp_offload_params changes nothing without a GPU"]}
UNUSED = "changes nothing under fsdp_version 2"
NO_TORCHAO = importlib.util.find_spec("torchao") is None
FLOAT8 = "fp8 needs torchao" if NO_TORCHAO else "no linear layer of Model can compute in float8"
ROWS: list[Row] = [
    *rows("fsdp_version", (1, {"version": 1}, {"version": 1}), (2, {"version": 2}, {"version": 2})),
    *rows(
        "sharding_strategy",
        ("FULL_SHARD", {"strategy": "FULL_SHARD"}, {**ONE_COPY, "spread": RANKS}),
        ("SHARD_GRAD_OP", {"strategy": "SHARD_GRAD_OP"}, {**ONE_COPY, "spread": None}),
        ("NO_SHARD", {"strategy": "NO_SHARD"}, {"mesh": (RANKS, 1)}),
    ),
    *rows(
        "sharding_strategy",
        ("HYBRID_SHARD", {"strategy": "HYBRID_SHARD", "ranks": 2}, {**ROWS_AND_COPIES, "spread": 2}),
        (
            "HYBRID_SHARD_ZERO2",
            {"strategy": "_HYBRID_SHARD_ZERO2", "ranks": 2},
            {**ROWS_AND_COPIES, "spread": None},
        ),
        along=HYBRID,
    ),
    *rows(  # one node: one replica, sharded over all ranks
        "sharding_strategy",
        ("HYBRID_SHARD", {"strategy": "FULL_SHARD"}, {**ONE_COPY, "spread": RANKS}),
        ("HYBRID_SHARD_ZERO2", {"strategy": "SHARD_GRAD_OP"}, {**ONE_COPY, "spread": None}),
    ),
    *rows(
        "reshard_after_forward",
        (True, "has no flag for reshard_after_forward", {"spread": RANKS}),
        (False, "has no flag for reshard_after_forward", {"spread": None}),
        (2, {"strategy": "SHARD_GRAD_OP"}, {"spread": 2, "mesh": (RANKS,)}),
        ("FULL_SHARD", {"strategy": "FULL_SHARD"}, "has no reshard_after_forward FULL_SHARD"),
        ("NO_SHARD", {"strategy": "NO_SHARD"}, "has no reshard_after_forward NO_SHARD"),
    ),
    *rows(
        "backward_prefetch",
        ("BACKWARD_PRE", {"backward": "BACKWARD_PRE"}, {"behind": False}),
        (
            "BACKWARD_POST",
            {"backward": "BACKWARD_POST"},
            {"behind": False, "notes": [f"backward_prefetch BACKWARD_POST {UNUSED}"]},
        ),
        ("NO_PREFETCH", {"backward": None}, {"behind": False}),
    ),
    *rows(
        "mixed_precision_policy",
        ("bf16", {"formats": (BF16, FP32, BF16), "kept": {FP32}}, {"formats": (BF16, FP32, None), "kept": {FP32}}),
        ("fp16", {"formats": (FP16, FP32, FP16), "kept": {FP32}}, {"formats": (FP16, FP32, None), "kept": {FP32}}),
        ("fp32", {"formats": (FP32, FP32, FP32)}, {"formats": (FP32, FP32, None)}),
        ("fp8", "fp8 needs fsdp_version 2", FLOAT8),
        ({"param_dtype": "bf16"}, {"formats": (BF16, BF16, None)}, {"formats": (BF16, None, None)}),
        ({"reduce_dtype": BF16}, {"formats": (None, BF16, None)}, {"formats": (None, BF16, None)}),
        ({"buffer_dtype": "fp16"}, {"formats": (None, None, FP16)}, "has no buffer_dtype"),
        ({"output_dtype": "bf16"}, "has no output_dtype", {"formats": (None, None, BF16)}),
        (
            MixedPrecision(param_dtype=BF16, reduce_dtype=FP32),
            {"formats": (BF16, FP32, None)},
            "must be MixedPrecisionPolicy under fsdp_version 2",
        ),
        (
            MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32),
            "must be MixedPrecision under fsdp_version 1",
            {"formats": (BF16, FP32, None)},
        ),
    ),
    *rows(
        "master_dtype",
        ("fp32", {"kept": {FP32}}, {"kept": {FP32}}),
        ("bf16", {"kept": {BF16}}, {"kept": {BF16}}),
        (FP16, {"kept": {FP16}}, {"kept": {FP16}}),
    ),
    *rows(
        "auto_wrap_policy",
        ("TRANSFORMER_BASED_WRAP", {"units": 2}, {"units": 2}),
        ("transformer_based_wrap", {"units": 2}, {"units": 2}),
        ("NO_WRAP", {"units": 0}, {"units": 0}),
        (norms, {"units": 5}, {"units": 5}),
        (never, "finds no unit in Model", "finds no unit in Model"),
    ),
    *rows("auto_wrap_policy", ("SIZE_BASED_WRAP", {"units": 6}, {"units": 6}), along={"min_num_params": 250}),
    *rows(
        "min_num_params",
        (250, {"units": 6}, {"units": 6}),
        (500, {"units": 2}, {"units": 2}),
        (10**6, "finds no unit in Model", "finds no unit in Model"),
        along={"auto_wrap_policy": "SIZE_BASED_WRAP"},
    ),
    *rows(
        "transformer_cls_names_to_wrap",
        (["Block"], {"units": 2}, {"units": 2}),
        ("Attention,FeedForward", {"units": 4}, {"units": 4}),
        (["Norm"], "leaves 1.28 k of 1.32 k parameters", "leaves 1.28 k of 1.32 k parameters"),
    ),
    *rows(
        "cpu_offload",
        (False, {"offloaded": False}, {"offload": "OffloadPolicy"}),
        (True, NOTHING_TO_OFFLOAD, NOTHING_TO_OFFLOAD),
        (CPUOffload(offload_params=True), NOTHING_TO_OFFLOAD, "cpu_offload must not be CPUOffload"),
        (OffloadPolicy(), "cpu_offload must not be OffloadPolicy", {"offload": "OffloadPolicy"}),
    ),
    *rows(
        "ignored_modules",
        ("head", {"whole": ["head.weight"]}, {"whole": ["head.weight"]}),
        (["head", "norm"], {"whole": ["head.weight", "norm.weight"]}, {"whole": ["head.weight", "norm.weight"]}),
        (head_of, {"whole": ["head.weight"]}, {"whole": ["head.weight"]}),
        ("(?:head)|(?:hea)", "'hea' matches no module", "'hea' matches no module"),
    ),
    *rows(
        "state_dict_type",
        ("FULL_STATE_DICT", {"type": "FULL_STATE_DICT", "held": {"Tensor"}}, {"held": {"Tensor"}}),
        ("SHARDED_STATE_DICT", {"type": "SHARDED_STATE_DICT", "held": {"DTensor"}}, {"held": {"DTensor"}}),
        look=kind_of_state,
    ),
    *rows(
        "state_dict_type",
        ("LOCAL_STATE_DICT", {"type": "LOCAL_STATE_DICT"}, "has no state_dict_type LOCAL_STATE_DICT"),
        look=kind_of_state,
    ),
    *rows(
        "state_dict_config",
        (FullStateDictConfig(rank0_only=True), {"entries": 17}, {"entries": 17}),
        (FullStateDictConfig(rank0_only=False), {"entries on rank 1": 17}, {"entries on rank 1": 17}),
        along={"state_dict_type": "FULL_STATE_DICT"},
        look=kind_of_state,
    ),
    *rows(
        "optim_state_dict_config",
        (FullOptimStateDictConfig(rank0_only=True), {"states on rank 1": False}, {"states on rank 1": False}),
        (FullOptimStateDictConfig(rank0_only=False), {"states on rank 1": True}, {"states on rank 1": True}),
        along={"state_dict_type": "FULL_STATE_DICT"},
        look=whole_optimizer_state,
    ),
    *rows(
        "limit_all_gathers",
        (True, {"limited": True}, {}),
        (False, {"limited": False}, {"version": 2}),
    ),
    *rows(
        "use_orig_params",
        (True, {"original": True}, {"version": 2}),
        (False, {"original": False}, {"notes": [f"use_orig_params=False {UNUSED}"]}),
    ),
    *rows("param_init_fn", (fill, {"values": [0.5]}, {"values": [0.5]}), look=first_value, make=on_meta),
    *rows(
        "sync_module_states",
        (True, {"tensors sent": True}, {"tensors sent": True}),
        (False, {"tensors sent": False}, {"tensors sent": False}),
    ),
    *rows(
        "forward_prefetch", (True, {"ahead": True}, {"ahead": True}), (False, {"ahead": False}, {"ahead": False})
    ),
    *rows(
        "activation_checkpointing",
        (True, {"checkpointed": 2}, {"checkpointed": 2}),
        (False, {"checkpointed": 0}, {"checkpointed": 0}),
    ),
    *rows(
        "activation_checkpointing_offload",
        (
            True,
            "has no activation_checkpointing_offload",
            {"checkpointed": 2, "notes": ["fsdp_activation_checkpointing_offload changes nothing without a GPU"]},
        ),
        (False, {"checkpointed": 2}, {"checkpointed": 2, "notes": []}),
        along={"activation_checkpointing": True},
    ),
    *rows(
        "activation_checkpointing_every",
        (1, {"checkpointed": 2}, {"checkpointed": 2}),
        (2, {"checkpointed": 1}, {"checkpointed": 1}),
        (3, "checkpoint_every is 3, and Model has 2 blocks", "checkpoint_every is 3, and Model has 2 blocks"),
        along={"activation_checkpointing": True},
    ),
    *rows(
        "cpu_ram_efficient_loading",
        (True, {"variable": "true", "same": True}, {"variable": "true", "same": True}),
        (False, {"variable": "false", "same": True}, {"variable": "false", "same": True}),
        look=loading_variable,
        make=on_rank_0,
    ),
    *rows(
        "dp_replicate_size",
        (1, {"ranks": RANKS}, ONE_COPY),
        (2, "FULL_SHARD does not fit a mesh of 2 x 2 ranks", ROWS_AND_COPIES),
    ),
    *rows(
        "dp_replicate_size",
        (2, {"ranks": 2}, ROWS_AND_COPIES),
        (-1, {"ranks": 2}, ROWS_AND_COPIES),
        along={"sharding_strategy": "HYBRID_SHARD", "dp_shard_size": 2},
    ),
    *rows(
        "dp_shard_size",
        (2, {"ranks": 2}, ROWS_AND_COPIES),
        (-1, {"ranks": 2}, ROWS_AND_COPIES),
        (3, "a mesh of 2 replicas x 3 shards needs 6 workers", "a mesh of 2 replicas x 3 shards needs 6 workers"),
        along={"sharding_strategy": "HYBRID_SHARD", "dp_replicate_size": 2},
    ),
    *rows(
        "forward_methods",
        (["embedded"], {"same": True}, {"same": True}),
        ("embedded", {"same": True}, {"same": True}),
        look=as_method,
    ),
    *rows("forward_methods", (["encode"], "Model has no method encode", "Model has no method encode")),
]


# Running it


def effect(row: Row, version: int) -> dict[str, Any] | str:
    """What one rank finds after preparing with one value."""
    model: Any = row.make()
    given = row.value(model) if row.value is head_of else {row.field: row.value}
    fields = {"fsdp_version": version, **row.along, **given}
    if row.field == "state_dict_type" and row.value == "LOCAL_STATE_DICT" and version == 1:
        fields["use_orig_params"] = False
    notes: list[str] = []
    sent: list[int] = []
    say, broadcast = messages.say, dist.broadcast
    messages.say = notes.append
    dist.broadcast = lambda *args, **kwargs: (sent.append(1), broadcast(*args, **kwargs))[1]
    try:
        model = fsdplaunch.prepare(model, plugin=FullyShardedDataParallelPlugin(**fields))
        found = facts(model) | {"notes": notes, "tensors sent": bool(sent)}
        return found | (row.look(model) if row.look else {})
    except LaunchError as error:
        return str(error)
    finally:
        messages.say, dist.broadcast = say, broadcast


def effects(version: int) -> list[dict[str, Any] | str]:
    os.environ["LOCAL_WORLD_SIZE"] = str(RANKS)
    return [effect(row, version) for row in ROWS]


@pytest.fixture(scope="module")
def found(four_ranks: RankPool) -> dict[int, list[list[Any]]]:
    """What each rank found, by version, for all rows."""
    return {version: four_ranks.run(effects, version, timeout=200) for version in (1, 2)}


def name_of(row: Row) -> str:
    value = row.value.__name__ if callable(row.value) and hasattr(row.value, "__name__") else str(row.value)
    return f"{row.field}={value}"


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("number", range(len(ROWS)), ids=[name_of(row) for row in ROWS])
def test_value_of_a_field_is_found_in_torchs_own_objects(
    found: dict[int, list[list[Any]]], number: int, version: int
) -> None:
    row = ROWS[number]
    expected = row.one if version == 1 else row.two
    first, second, *_ = [answers[number] for answers in found[version]]
    if isinstance(expected, str):
        assert isinstance(first, str), first
        assert expected in first
        return
    assert not isinstance(first, str), first
    for what, value in expected.items():
        if what == "notes":
            assert [note.split(":")[0] for note in first["notes"] if "changes nothing" in note] == value
        elif what.endswith(" on rank 1"):
            assert second[what.removesuffix(" on rank 1")] == value
        else:
            assert first[what] == value, what


def test_every_field_has_rows() -> None:
    fields = {entry.name for entry in dataclasses.fields(FullyShardedDataParallelPlugin) if entry.init}
    assert {row.field for row in ROWS} == fields


CHOICES = {
    "sharding_strategy": set(value_kinds.STRATEGY.choices),
    "backward_prefetch": set(get_args(value_kinds.PrefetchName)),
    "auto_wrap_policy": set(value_kinds.WRAP.choices),
    "state_dict_type": set(value_kinds.STATE_DICT.choices),
    "mixed_precision_policy": {"bf16", "fp16", "fp32", "fp8"},
    "fsdp_version": {"1", "2"},
    **{
        entry.name: {"True", "False"}
        for entry in dataclasses.fields(FullyShardedDataParallelPlugin)
        if entry.init and entry.type in (bool, bool | None)
    },
}


@pytest.mark.parametrize("field", CHOICES)
def test_every_value_of_a_field_has_a_row(field: str) -> None:
    assert CHOICES[field] <= {str(row.value) for row in ROWS if row.field == field}
