"""What a file leaves open is decided as the schema's texts say."""

import pytest

from fsdplaunch.config import environment
from fsdplaunch.config.environment import encode
from fsdplaunch.config.resolve import mesh_sizes, with_mesh, workers_per_node, world_size
from fsdplaunch.errors import UsageError
from tests.yaml_config import config_of


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("", 2),
        ("compute_environment: LOCAL_MACHINE\n", 1),
        ("fsdp_config: {fsdp_use_orig_params: false}\n", 1),
        ("fsdp_config: {fsdp_use_orig_params: true}\n", 1),
        ("fsdp_config: {fsdp_backward_prefetch_policy: BACKWARD_PRE}\n", 1),
        ("fsdp_config: {fsdp_state_dict_type: LOCAL_STATE_DICT}\n", 1),
        ("fsdp_config: {fsdp_sync_module_states: true}\n", 1),
        ("fsdp_config: {fsdp_activation_checkpointing: true}\n", 2),
        ("compute_environment: LOCAL_MACHINE\nfsdp_config: {fsdp_version: 2}\n", 2),
    ],
)
def test_the_version_of_a_file_that_names_none(text, version):
    assert config_of(text=text).fsdp_config.fsdp_version == version


@pytest.mark.parametrize(
    ("strategy", "machines", "reshard", "mesh"),
    [
        ("FULL_SHARD", 2, True, (1, 8)),
        ("NO_SHARD", 1, True, (8, 1)),
        ("HYBRID_SHARD", 2, True, (2, 4)),
        ("HYBRID_SHARD_ZERO2", 4, False, (4, 2)),
    ],
)
def test_a_strategy_becomes_reshard_and_mesh_under_version_2(strategy, machines, reshard, mesh):
    text = f"num_processes: 8\nnum_machines: {machines}\n"
    read = config_of(text=text + f"fsdp_config: {{fsdp_version: 2, fsdp_sharding_strategy: {strategy}}}\n")
    assert read.fsdp_config.fsdp_reshard_after_forward is reshard
    assert mesh_sizes(read, 8) == (*mesh, 1, 1)


def test_a_mesh_becomes_numbers_when_the_world_is_known():
    read = config_of(text="fsdp_config: {fsdp_version: 2}\nparallelism_config: {dp_replicate_size: 2}\n")
    sizes = with_mesh(read, 8).parallelism_config
    assert (sizes.parallelism_config_dp_replicate_size, sizes.parallelism_config_dp_shard_size) == (2, 4)
    flat = config_of(text="fsdp_config: {fsdp_version: 2}\n")
    assert with_mesh(flat, 8) == flat
    with pytest.raises(UsageError, match="does not fit 7 workers"):
        with_mesh(read, 7)


@pytest.mark.parametrize(
    ("text", "per_node", "world"),
    [
        ("", None, None),
        ("num_processes: 8\nnum_machines: 2\n", 4, 8),
        ("num_machines: 2\nlaunch: {workers_per_node: 4}\n", 4, 8),
        ("num_processes: 7\nnum_machines: 2\nlaunch: {workers_per_node: auto}\n", None, 7),
    ],
)
def test_the_number_of_workers_as_far_as_the_file_tells(text, per_node, world):
    assert (workers_per_node(config_of(text=text)), world_size(config_of(text=text))) == (per_node, world)


@pytest.mark.parametrize(
    ("text", "param", "reduce", "master"),
    [
        ("", None, None, None),
        ("mixed_precision: bf16\n", "bf16", "fp32", "fp32"),
        ("mixed_precision: NO\n", None, None, None),
        ("mixed_precision: bf16\nprecision: {reduce: bf16}\n", "bf16", "bf16", "fp32"),
        ("precision: {param: fp32}\n", "fp32", None, None),
    ],
)
def test_formats_follow_mixed_precision_unless_said(text, param, reduce, master):
    said = config_of(text=text).precision
    assert (said.param, said.reduce, said.master) == (param, reduce, master)


@pytest.mark.parametrize(
    ("text", "axes"),
    [
        ("tp_size: 2", (1, 4, 1, 2)),
        ("tp_size: -1, dp_shard_size: 2", (1, 2, 1, 4)),
        ("tp_size: 2, cp_size: 2", (1, 2, 2, 2)),
        ("dp_replicate_size: 2, dp_shard_size: 2, tp_size: 2", (2, 2, 1, 2)),
        ("dp_replicate_size: -1, dp_shard_size: 1, cp_size: 4", (2, 1, 4, 1)),
    ],
)
def test_all_axes_become_numbers(text, axes):
    read = config_of(text=f"fsdp_config: {{fsdp_version: 2}}\nparallelism_config: {{{text}}}\n")
    assert mesh_sizes(read, 8) == axes
    env = encode(with_mesh(read, 8))
    names = ("DP_REPLICATE", "DP_SHARD", "CP", "TP")
    assert tuple(int(env[f"PARALLELISM_CONFIG_{name}_SIZE"]) for name in names) == axes
    assert env["ACCELERATE_USE_PARALLELISM_CONFIG"] == "true"


def test_no_variable_of_a_run_reaches_one_that_is_launched_inside_of_it():
    ours = {
        value
        for name, value in vars(environment).items()
        if name.isupper() and str(value).startswith("FSDPLAUNCH_")
    }
    assert environment.DEVICE in ours
    assert environment.without_run(dict.fromkeys(ours, "1") | {"PATH": "/bin"}) == {"PATH": "/bin"}
