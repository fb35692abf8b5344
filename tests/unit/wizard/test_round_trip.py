"""Whatever a file says, the wizard gives it back unchanged."""

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from fsdplaunch.config.load import check
from fsdplaunch.config.render import render
from fsdplaunch.config.resolve import resolve
from fsdplaunch.config.schema.config import all_keys, build_config, value_at
from fsdplaunch.config.schema.kinds import STRATEGY
from fsdplaunch.wizard.run import run_wizard

VALUES = {
    ("num_processes",): ["auto", 1, 2, 4, 8, 16],
    ("num_machines",): [1, 2, 4],
    ("main_process_ip",): [None, "n1"],
    ("main_process_port",): [None, 29400],
    ("rdzv_backend",): ["c10d", "static"],
    ("mixed_precision",): ["no", "bf16", "fp16", "fp8"],
    ("use_cpu",): [False, True],
    ("gpu_ids",): [None, "0,1", "all"],
    ("fsdp_config", "fsdp_version"): [1, 2],
    ("fsdp_config", "fsdp_sharding_strategy"): [None, *STRATEGY.choices],
    ("fsdp_config", "fsdp_reshard_after_forward"): [None, True, False, 2],
    ("fsdp_config", "fsdp_offload_params"): [False, True],
    ("fsdp_config", "fsdp_auto_wrap_policy"): ["TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"],
    ("fsdp_config", "fsdp_transformer_layer_cls_to_wrap"): [(), ("A",), ("A", "B")],
    ("fsdp_config", "fsdp_min_num_params"): [100_000_000, 12],
    ("fsdp_config", "fsdp_activation_checkpointing"): [False, True],
    ("fsdp_config", "fsdp_state_dict_type"): [None, "FULL_STATE_DICT", "SHARDED_STATE_DICT"],
    ("parallelism_config", "parallelism_config_dp_replicate_size"): [None, 2],
    ("parallelism_config", "parallelism_config_dp_shard_size"): [None, 4],
    ("launch", "workers_per_node"): [None, "auto", 4, 8],
    ("launch", "rendezvous_endpoint"): [None, "n1:29400"],
    ("launch", "env"): [{}, {"A": "x, y: 'z'"}],
    ("checkpoint", "dir"): ["checkpoints", "else where"],
    ("fsdp_config", "xla"): [False, True],
    ("fsdp_config", "xla_fsdp_v2"): [False, True],
    ("fsdp_config", "xla_fsdp_grad_ckpt"): [False, True],
    ("fsdp_config", "xla_fsdp_settings"): [
        {},
        {"compute_dtype": "bfloat16", "flatten_parameters": True},
        {"sharding_groups": [[0, 1], [2, 3]]},
    ],
    ("precision", "reduce"): [None, "bf16"],
}


@st.composite
def configs(draw):
    values = {}
    for path in draw(st.sets(st.sampled_from(sorted(VALUES)), max_size=12)):
        value = draw(st.sampled_from(VALUES[path]))
        if value is not None:
            values[path] = value
    return build_config(values)


def differences(one, other):
    one, other = resolve(one), resolve(other)
    pairs = {key.dotted: (value_at(one, key.path), value_at(other, key.path)) for key in all_keys()}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


@pytest.fixture
def start(tmp_path):
    return tmp_path / "start.yaml"


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(config=configs(), machine=st.sampled_from(["laptop", "one_t4", "eight_h100", "slurm_2x8"]))
def test_run_wizard_starting_from_any_valid_file_says_the_same(config, machine, start, machines):
    assume(not check(config))
    start.write_text(render(config))
    kept = run_wizard(facts=machines[machine], say=pytest.fail, start_from=start, interactive=False, yes=True)
    assert differences(kept.config, config) == {}
