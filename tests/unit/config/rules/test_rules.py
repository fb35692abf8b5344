"""Which combinations of keys are refused, and which are not."""

import pytest

from fsdplaunch.config.load import check, stack
from fsdplaunch.config.problems import ConfigError
from fsdplaunch.config.schema.config import build_config
from fsdplaunch.config.yaml_text import read_text


def fsdp(*lines, version=2):
    return "\n".join(["fsdp_config:", f"  fsdp_version: {version}", *(f"  fsdp_{line}" for line in lines)]) + "\n"


def sizes(copies=None, shards=None):
    lines = ["parallelism_config:"]
    lines += [f"  dp_replicate_size: {copies}"] if copies is not None else []
    lines += [f"  dp_shard_size: {shards}"] if shards is not None else []
    return "\n".join(lines) + "\n"


def ids(text):
    try:
        stack(read_text(text, "x"))
    except ConfigError as error:
        return sorted({problem.id for problem in error.problems})
    return []


REFUSED = {
    "a string under FSDP2": ("reshard-value", fsdp("reshard_after_forward: FULL_SHARD")),
    "6 is not a strategy": ("reshard-value", fsdp("reshard_after_forward: 6", version=1)),
    "reshard against strategy": (
        "strategy-against-reshard",
        fsdp("sharding_strategy: SHARD_GRAD_OP", "reshard_after_forward: true"),
    ),
    "strategy against reshard": (
        "strategy-against-reshard",
        fsdp("sharding_strategy: FULL_SHARD", "reshard_after_forward: false"),
    ),
    "a mesh under FSDP1": ("copies-without-hybrid", fsdp(version=1) + sizes(shards=4)),
    "no shard that shards": ("copies-without-hybrid", fsdp("sharding_strategy: NO_SHARD") + sizes(shards=4)),
    "two rests": ("mesh-size", sizes(-1, -1)),
    "a rest that does not divide": ("mesh-size", "num_processes: 8\n" + sizes(3, -1)),
    "a product that is too small": ("mesh-size", "num_processes: 8\n" + sizes(2, 2)),
    "copies that do not divide": ("mesh-size", "launch: {workers_per_node: 4}\nnum_machines: 2\n" + sizes(3)),
    "hybrid over machines that do not divide": (
        "mesh-size",
        "num_machines: 3\nlaunch: {workers_per_node: auto}\nnum_processes: 8\n" + fsdp("sharding_strategy: 4"),
    ),
    "a group that does not divide a copy": (
        "reshard-group",
        "num_processes: 8\n" + fsdp("reshard_after_forward: 8") + sizes(2),
    ),
    "activation offload under FSDP1": (
        "wrong-version",
        fsdp("activation_checkpointing: true", "activation_checkpointing_offload: true", version=1),
    ),
    "output dtype under FSDP1": ("wrong-version", fsdp(version=1) + "precision: {output: bf16}\n"),
    "ram without sync under FSDP2": (
        "ram-efficient-without-sync",
        fsdp("cpu_ram_efficient_loading: true", "sync_module_states: false"),
    ),
    "workers that contradict": (
        "workers-per-machine",
        "num_processes: 8\nnum_machines: 2\nlaunch: {workers_per_node: 2}\n",
    ),
    "a GPU twice": ("gpu-count", "gpu_ids: 0,0\n"),
    "too few GPUs per machine": ("gpu-count", "gpu_ids: '0'\nnum_processes: 4\nnum_machines: 2\n"),
    "two ports": ("two-addresses", "main_process_port: 1\nlaunch: {rendezvous_endpoint: 'a:2'}\n"),
    "a rank beyond the machines": ("machine-rank", "machine_rank: 1\n"),
    "local shards under FSDP2": ("local-state-dict", fsdp("state_dict_type: LOCAL_STATE_DICT")),
    "split layers in float8": (
        "split-layers",
        "mixed_precision: fp8\n" + fsdp() + "parallelism_config: {tp_size: 2}\n",
    ),
    "sequences split by DeepSpeed": ("unsupported-value", "parallelism_config: {sp_size: 2}\n"),
    "a switch of the launcher": ("variable-of-a-key", "launch: {env: {ACCELERATE_USE_FSDP: 'true'}}\n"),
}

ACCEPTED = {
    "an empty file": "",
    "group size": "num_processes: 8\n" + fsdp("reshard_after_forward: 4"),
    "group size of a copy": "num_processes: 8\n" + fsdp("reshard_after_forward: 2") + sizes(2),
    "hybrid over machines": "num_machines: 2\n" + fsdp("sharding_strategy: HYBRID_SHARD"),
    "hybrid over machines, FSDP1": "num_machines: 2\n" + fsdp("sharding_strategy: HYBRID_SHARD", version=1),
    "hybrid on one machine with copies": "num_processes: 8\n" + fsdp("sharding_strategy: 4") + sizes(2),
    "hybrid with a shard size": "num_processes: 8\n" + fsdp("sharding_strategy: 4", version=1) + sizes(2, 4),
    "no shard": "num_processes: 8\n" + fsdp("sharding_strategy: NO_SHARD"),
    "a rest that divides": "num_processes: 8\n" + sizes(2, -1),
    "the same set twice, FSDP1": fsdp("sharding_strategy: 2", "reshard_after_forward: 2", version=1),
    "the same set twice, FSDP2": fsdp("sharding_strategy: 2", "reshard_after_forward: false"),
    "what FSDP2 does anyway": fsdp(
        "backward_prefetch: BACKWARD_PRE", "use_orig_params: true", "sync_module_states: false"
    ),
    "sync under FSDP2": fsdp("sync_module_states: true"),
    "no sync under FSDP2": fsdp("sync_module_states: false"),
    "sync with ram under FSDP2": fsdp("sync_module_states: true", "cpu_ram_efficient_loading: true"),
    "gpu ids on a CPU run": "gpu_ids: '0'\nnum_processes: 4\nuse_cpu: true\n",
    "the same address twice": ("main_process_ip: a\nmain_process_port: 2\nlaunch: {rendezvous_endpoint: 'a:2'}\n"),
    "other variables": "launch: {env: {NCCL_DEBUG: INFO, OMP_NUM_THREADS: 4}}\n",
    "checkpointed blocks": fsdp("activation_checkpointing: true", "activation_checkpointing_offload: true"),
    "size wrap without a size": fsdp("auto_wrap_policy: SIZE_BASED_WRAP"),
    "transformer wrap without names": fsdp("auto_wrap_policy: TRANSFORMER_BASED_WRAP"),
    "empty names as accelerate writes them": fsdp("transformer_layer_cls_to_wrap: ''"),
    "keys without effect at their defaults": "dynamo_config: {dynamo_backend: 'NO'}\nenable_cpu_affinity: false\n",
    "empty sections of other engines": "deepspeed_config: {}\nmegatron_lm_config: {}\nmpirun_config:\n",
    "mesh sizes of one": "parallelism_config: {parallelism_config_tp_size: 1, parallelism_config_cp_size: 1}\n",
    "unequal machines": "num_processes: 7\nnum_machines: 2\nlaunch: {workers_per_node: auto}\n",
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_contradiction_is_refused(case):
    rule, text = REFUSED[case]
    assert ids(text) == [rule]


@pytest.mark.parametrize("case", ACCEPTED)
def test_what_agrees_is_accepted(case):
    assert ids(ACCEPTED[case]) == []


def test_a_rule_is_silent_about_a_key_that_is_wrong_itself():
    """Otherwise one mistake would be reported twice, the second time with a value nobody wrote."""
    assert ids("num_machines: two\nmachine_rank: 1\n") == ["wrong-value"]
    assert ids("num_processes: x\nlaunch: {show_ranks: 5}\nnum_machines: 1\n") == ["wrong-value"]


def test_a_configuration_built_in_code_is_checked_by_the_same_rules():
    version_1 = {("fsdp_config", "fsdp_version"): 1}
    config = build_config({("machine_rank",): 3, ("mixed_precision",): "fp8", **version_1})
    assert sorted(problem.id for problem in check(config)) == ["fp8", "machine-rank"]
    assert check(build_config({("num_processes",): 4})) == ()
