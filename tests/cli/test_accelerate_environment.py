"""What a worker finds in its environment is what `accelerate launch` sets, but for a list of differences."""

import os
from contextlib import suppress
from pathlib import Path

import pytest

from fsdplaunch.config.environment import encode
from fsdplaunch.config.load import load_config
from fsdplaunch.config.resolve import with_mesh, world_size
from fsdplaunch.config.schema.config import all_keys, value_at
from fsdplaunch.launch.plan import LaunchTarget, NodeFacts, build_plan

HEAD = "compute_environment: LOCAL_MACHINE\ndistributed_type: {type}\nnum_machines: 1\nnum_processes: 4\n"
FSDP = HEAD.format(type="FSDP") + "mixed_precision: bf16\nfsdp_config:\n"
EIGHT = (
    "compute_environment: LOCAL_MACHINE\ndebug: false\ndistributed_type: FSDP\ndowncast_bf16: 'no'\n"
    "enable_cpu_affinity: false\nmachine_rank: 0\nmain_training_function: main\nmixed_precision: bf16\n"
    "num_machines: 1\nnum_processes: 8\nrdzv_backend: static\nsame_network: true\ntpu_env: []\n"
    "tpu_use_cluster: false\ntpu_use_sudo: false\nuse_cpu: false\nfsdp_config:\n"
    "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n  fsdp_cpu_ram_efficient_loading: true\n"
    "  fsdp_offload_params: false\n  fsdp_reshard_after_forward: true\n  fsdp_version: 2\n"
)
"""The keys of the example files that accelerate and TRL publish for meshes."""
FILES = {
    "the example of transformers' guide": (
        Path(__file__).parents[1] / "cases/transformers_guide.yaml"
    ).read_text(),
    "FSDP1": FSDP
    + "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer\n"
    "  fsdp_backward_prefetch: BACKWARD_POST\n  fsdp_sharding_strategy: SHARD_GRAD_OP\n"
    "  fsdp_offload_params: true\n"
    "  fsdp_forward_prefetch: true\n  fsdp_state_dict_type: SHARDED_STATE_DICT\n"
    "  fsdp_use_orig_params: false\n"
    "  fsdp_cpu_ram_efficient_loading: false\n  fsdp_sync_module_states: true\n  fsdp_version: 1\n",
    "FSDP1, hybrid on one node": FSDP + "  fsdp_auto_wrap_policy: SIZE_BASED_WRAP\n  fsdp_min_num_params: 2000\n"
    "  fsdp_sharding_strategy: HYBRID_SHARD\n"
    "  fsdp_state_dict_type: FULL_STATE_DICT\n  fsdp_backward_prefetch: NO_PREFETCH\n  fsdp_version: 1\n",
    "FSDP2": FSDP
    + "  fsdp_version: 2\n  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n  fsdp_reshard_after_forward: false\n"
    "  fsdp_cpu_ram_efficient_loading: true\n  fsdp_activation_checkpointing: true\n"
    "  fsdp_state_dict_type: FULL_STATE_DICT\n  fsdp_ignored_modules: 'lm_.*'\n",
    "FSDP2 with leftovers of FSDP1": FSDP
    + "  fsdp_version: 2\n  fsdp_auto_wrap_policy: NO_WRAP\n  fsdp_use_orig_params: false\n"
    "  fsdp_min_num_params: 0\n"
    "  fsdp_backward_prefetch: NO_PREFETCH\n  fsdp_state_dict_type: SHARDED_STATE_DICT\n",
    "FSDP2, mesh": FSDP + "  fsdp_version: 2\n  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n"
    "  fsdp_state_dict_type: SHARDED_STATE_DICT\nparallelism_config:\n  parallelism_config_dp_replicate_size: 2\n"
    "  parallelism_config_dp_shard_size: 2\n",
    "FSDP2, split layers": FSDP + "  fsdp_version: 2\n  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n"
    "  fsdp_state_dict_type: SHARDED_STATE_DICT\nparallelism_config:\n  parallelism_config_dp_shard_size: 2\n"
    "  parallelism_config_tp_size: 2\n",
    "FSDP2, split sequences": FSDP + "  fsdp_version: 2\n  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n"
    "  fsdp_state_dict_type: SHARDED_STATE_DICT\nparallelism_config:\n  parallelism_config_cp_size: 4\n"
    "  parallelism_config_dp_shard_size: 1\n  parallelism_config_cp_comm_strategy: alltoall\n",
    "a published mesh of three axes": EIGHT
    + "  fsdp_state_dict_type: SHARDED_STATE_DICT\nparallelism_config:\n  parallelism_config_cp_size: 1\n"
    "  parallelism_config_dp_replicate_size: 2\n  parallelism_config_dp_shard_size: 2\n"
    "  parallelism_config_tp_size: 2\n",
    "published split sequences": EIGHT
    + "  fsdp_state_dict_type: FULL_STATE_DICT\n  fsdp_activation_checkpointing: true\n"
    "  fsdp_activation_checkpointing_offload: true\nparallelism_config:\n"
    "  parallelism_config_dp_replicate_size: 1\n  parallelism_config_dp_shard_size: 1\n"
    "  parallelism_config_tp_size: 1\n  parallelism_config_cp_size: 8\n",
    "old places": HEAD.format(type="FSDP")
    + "fp16: true\ndynamo_backend: 'NO'\nfsdp_config:\n  fsdp_version: 2\n  fsdp_auto_wrap_policy: NO_WRAP\n"
    "  fsdp_state_dict_type: FULL_STATE_DICT\n",
    "compiled": FSDP
    + "  fsdp_version: 2\n  fsdp_auto_wrap_policy: NO_WRAP\n  fsdp_state_dict_type: FULL_STATE_DICT\n"
    "dynamo_config:\n  dynamo_backend: INDUCTOR\n  dynamo_mode: max-autotune\n  dynamo_use_dynamic: true\n",
    "MULTI_GPU with leftovers": HEAD.format(type="MULTI_GPU")
    + "mixed_precision: fp16\nfsdp_config:\n  fsdp_version: 2\ndeepspeed_config:\n  zero_stage: 3\n",
    "float8 by TransformerEngine, nothing sharded": HEAD.format(type="MULTI_GPU")
    + "mixed_precision: fp8\nfp8_config:\n  backend: TE\n  fp8_format: E4M3\n  amax_compute_algo: max\n"
    "  margin: 1\n  override_linear_precision: [true, false, false]\n  amax_history_len: 32\n  interval: 2\n"
    "  use_autocast_during_eval: true\n  use_mxfp8_block_scaling: true\n",
    "float8 by MS-AMP, nothing sharded": HEAD.format(type="MULTI_GPU")
    + "mixed_precision: fp8\nfp8_config:\n  backend: MSAMP\n  opt_level: O1\n",
    "float8 by torchao, compiled by units, sequences in DeepSpeed's keys": FSDP.replace("bf16", "fp8")
    + "  fsdp_version: 2\n  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n"
    "  fsdp_state_dict_type: SHARDED_STATE_DICT\n"
    "fp8_config:\n  backend: AO\n  enable_fsdp_float8_all_gather: false\n  pad_inner_dim: false\n"
    "dynamo_config:\n  dynamo_backend: INDUCTOR\n  dynamo_use_regional_compilation: true\n"
    "parallelism_config:\n  parallelism_config_dp_shard_size: 4\n  parallelism_config_cp_backend: torch\n"
    "  parallelism_config_sp_size: 1\n  parallelism_config_sp_backend: deepspeed\n"
    "  parallelism_config_sp_seq_length: 4096\n  parallelism_config_sp_seq_length_is_variable: true\n"
    "  parallelism_config_sp_attn_implementation: sdpa\n",
    "MULTI_GPU with a strategy left over": HEAD.format(type="MULTI_GPU")
    + "fsdp_config:\n  fsdp_version: 2\n  fsdp_sharding_strategy: NO_SHARD\n",
    "MULTI_GPU, mesh of a script": HEAD.format(type="MULTI_GPU") + "gpu_ids: 0,1,2,3,\n"
    "parallelism_config:\n  parallelism_config_dp_replicate_size: 2\n  parallelism_config_dp_shard_size: 4\n",
    "MULTI_CPU, mesh that nobody reads": HEAD.format(type="MULTI_CPU")
    + "use_cpu: true\nparallelism_config:\n  parallelism_config_dp_replicate_size: 2\n",
    "NO": HEAD.format(type="NO").replace("4", "1") + "mixed_precision: bf16\n",
    "NO, on a CPU, compiled, debugged": HEAD.format(type="NO").replace("4", "1")
    + "mixed_precision: fp16\nuse_cpu: true\ndebug: true\nenable_cpu_affinity: true\n"
    "dynamo_config:\n  dynamo_backend: INDUCTOR\n  dynamo_use_fullgraph: true\n",
}
"""Files in the manner of published ones."""

ONLY_UNDER_FSDP1 = {
    "FSDP_BACKWARD_PREFETCH": "accelerate's FSDP2 warns and drops it",
    "FSDP_USE_ORIG_PARAMS": "accelerate's FSDP2 warns and drops it",
    "FSDP_SYNC_MODULE_STATES": "accelerate's FSDP2 warns and drops it; rank 0's values are sent anyway",
}
ONLY_THEIRS = {
    "KMP_AFFINITY": "for Intel's OpenMP on a CPU, of workers alone on their node; here numa_binding says it",
    "KMP_BLOCKTIME": "for Intel's OpenMP on a CPU",
    "MASTER_ADDR": "set by the agent, for each worker",
    "MASTER_PORT": "set by the agent, for each worker",
    "OMP_NUM_THREADS": "accelerate gives each worker one thread; here the node's cores are divided among them",
    "CUDA_VISIBLE_DEVICES": "set by the plan, from the GPUs that are there",
    "FSDP_RESHARD_AFTER_FORWARD": "sent under FSDP1 too, where accelerate's plugin goes by the strategy",
    "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": "sent under FSDP1 too, which has no such key",
    "PARALLELISM_CONFIG_DP_SHARD_SIZE": "1, which is what leaving it out means",
    "PARALLELISM_CONFIG_SP_SIZE": "1, which is what leaving it out means",
    "PARALLELISM_CONFIG_SP_BACKEND": "read only with a size of more than 1",
    "CCL_WORKER_COUNT": "accelerate 1.12 sends 0 where a file has no mpirun_config",
    **ONLY_UNDER_FSDP1,
}
NEWER = {
    "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": "accelerate sends it from 1.15 on",
    "ACCELERATE_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER": "accelerate 1.12 has no option for it",
    "ACCELERATE_FP8_PAD_INNER_DIM": "accelerate 1.12 has no option for it",
}
ONLY_OURS = {
    **NEWER,
    "ACCELERATE_DEBUG_MODE": "false, which is what leaving it out means",
    "ACCELERATE_USE_CPU": "false, which is what leaving it out means",
    "ACCELERATE_CPU_AFFINITY": "false, which is what leaving it out means",
    "ACCELERATE_FP8_USE_MXFP8_BLOCK_SCALING": "its parser has no such option, its reader has; false sets nothing",
    "PARALLELISM_CONFIG_DP_SHARD_SIZE": "read only with ACCELERATE_USE_PARALLELISM_CONFIG",
    "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "read only with ACCELERATE_USE_PARALLELISM_CONFIG",
    "PARALLELISM_CONFIG_TP_SIZE": "read only with ACCELERATE_USE_PARALLELISM_CONFIG",
    "PARALLELISM_CONFIG_CP_SIZE": "read only with ACCELERATE_USE_PARALLELISM_CONFIG",
    "PARALLELISM_CONFIG_CP_BACKEND": "read only with ACCELERATE_USE_PARALLELISM_CONFIG",
    "PARALLELISM_CONFIG_CP_COMM_STRATEGY": "read only with a cp_size of more than 1",
    "PARALLELISM_CONFIG_SP_SEQ_LENGTH": "read only with an sp_size of more than 1",
    "PARALLELISM_CONFIG_SP_SEQ_LENGTH_IS_VARIABLE": "read only with an sp_size of more than 1",
    "PARALLELISM_CONFIG_SP_ATTN_IMPLEMENTATION": "read only with an sp_size of more than 1",
    "FSDP_BACKWARD_PREFETCH": "BACKWARD_PRE under FSDP1 where the file says none: units are gathered ahead",
    "FSDP_AUTO_WRAP_POLICY": "where the file says none, the blocks that the model repeats are units",
    "FSDP_STATE_DICT_TYPE": "where the file says none, what accelerate's plugin takes for the FSDP version",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "read from its other spellings too, which accelerate ignores",
}
OTHERWISE = {
    "FSDP_SHARDING_STRATEGY": "accelerate sends FULL_SHARD under FSDP2, where its plugin does not read it"
}
WITHOUT_FSDP = "FSDP_* are sent in runs that shard nothing too; nobody reads them without ACCELERATE_USE_FSDP"

WITHOUT_FP8 = "ACCELERATE_FP8_* are sent under other dtypes too, where nobody reads them"
NO_MESH = "sizes of 1 alone say no mesh: all ranks share one replica's shards"


def sent(path):
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env, prepare_simple_launcher_cmd_env

    arguments = launch_command_parser().parse_args(["--config_file", str(path), "train.py"])
    arguments, _, _ = _validate_launch_command(arguments)
    many = arguments.use_fsdp or arguments.multi_gpu
    return prepare_multi_gpu_env(arguments) if many else prepare_simple_launcher_cmd_env(arguments)[1]


def theirs(path):
    before = dict(os.environ)
    return {name: text for name, text in sent(path).items() if before.get(name) != text}


def ours(path, environ=None):
    config = load_config(path, environ=environ or {}).config
    made = encode(with_mesh(config, world_size(config)))
    return {name: text for name, text in made.items() if not name.startswith("FSDPLAUNCH_")}


def sizes(variables):
    """The mesh that accelerate makes of the variables; a size that is not there is 1."""
    names = [f"PARALLELISM_CONFIG_{axis}_SIZE" for axis in ("DP_REPLICATE", "DP_SHARD", "TP", "CP", "SP")]
    return [variables.get(name, "1") for name in names]


def meaning(name, text):
    """What a variable's text says for its key: `1` and `FULL_SHARD` say the same."""
    kinds = {spec.env: spec.key.kind for spec in all_keys()}
    try:
        return kinds[name].parse(text) if name in kinds else text.lower()
    except ValueError:
        return text


def unlisted(here, there):
    """Every difference between two environments of a worker that no list above gives a reason for."""
    if "ACCELERATE_USE_FSDP" not in there:
        assert WITHOUT_FSDP
        here = {key: text for key, text in here.items() if not key.startswith("FSDP_")}
    if here.get("ACCELERATE_MIXED_PRECISION") != "fp8":
        assert WITHOUT_FP8
        here = {key: text for key, text in here.items() if not key.startswith("ACCELERATE_FP8_")}
    if {*sizes(here), *sizes(there)} == {"1"}:
        assert NO_MESH
        there = {key: text for key, text in there.items() if "PARALLELISM_CONFIG" not in key}
    first = here.get("FSDP_VERSION") == "1"
    listed = set(ONLY_THEIRS) - (set(ONLY_UNDER_FSDP1) if first else set())
    found = [f"{key} is only there" for key in set(there) - set(here) - listed]
    found += [f"{key} is only here" for key in set(here) - set(there) - set(ONLY_OURS)]
    for key in set(here) & set(there) - (set() if first else set(OTHERWISE)):
        if meaning(key, here[key]) != meaning(key, there[key]):
            found.append(f"{key} is {here[key]} here and {there[key]} there")
    switch = "ACCELERATE_USE_PARALLELISM_CONFIG"
    if switch in there and (here.get(switch), sizes(here)) != (there[switch], sizes(there)):
        found.append(f"the mesh is {sizes(here)} here and {sizes(there)} there")
    return sorted(found)


@pytest.mark.parametrize("name", FILES)
def test_a_worker_sees_what_accelerate_sets(name, tmp_path, monkeypatch):
    monkeypatch.setattr("accelerate.utils.launch.is_fp8_available", lambda: True)  # of this machine
    path = tmp_path / "config.yaml"
    path.write_text(FILES[name])
    assert unlisted(ours(path), theirs(path)) == []


def another(spec, value):
    """A text for a key's variable that says something else than a value."""
    for text in (*spec.key.kind.choices, "true", "false", "7", "other"):
        with suppress(ValueError):
            if spec.key.kind.parse(text) != value:
                return text
    return "wrong"  # the only value that there is, is the file's


def said_by(loaded):
    """The keys that a file says and accelerate has a variable for."""
    said = [spec for spec in all_keys() if loaded.origins[spec.path].layer == "file"]
    return [spec for spec in said if not spec.env.startswith("FSDPLAUNCH_")]


def test_the_files_say_every_key_that_accelerate_has_a_variable_for(tmp_path):
    unsaid = {spec.env for spec in all_keys() if not spec.env.startswith("FSDPLAUNCH_")}
    for text in FILES.values():
        (tmp_path / "config.yaml").write_text(text)
        unsaid -= {spec.env for spec in said_by(load_config(tmp_path / "config.yaml", environ={}))}
    assert unsaid == set()


@pytest.mark.parametrize("name", FILES)
def test_a_file_beats_accelerates_variables_here_as_there(name, tmp_path, monkeypatch):
    monkeypatch.setattr("accelerate.utils.launch.is_fp8_available", lambda: True)  # of this machine
    path = tmp_path / "config.yaml"
    path.write_text(FILES[name])
    loaded = load_config(path, environ={})
    variables = {spec.env: another(spec, value_at(loaded.config, spec.path)) for spec in said_by(loaded)}
    alone = sent(path)
    for variable, text in variables.items():
        monkeypatch.setenv(variable, text)
    said, there = {name for name in variables if name in alone}, sent(path)
    assert {name: there[name] for name in said} == {name: alone[name] for name in said}
    assert ours(path, variables) == ours(path)


TPU = {
    "as accelerate config writes it": "  # TPU\n",
    "bf16": "mixed_precision: bf16\ndowncast_bf16: 'no'\ntpu_env: ['']\ntpu_vm: ['']\n",
    "debugged": "mixed_precision: bf16\ndebug: true\ntpu_use_cluster: false\nmain_training_function: main\n",
}
ONLY_OURS_ON_TPUS = {
    **ONLY_OURS,
    "ACCELERATE_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER": "read only under fp8",
    "ACCELERATE_FP8_PAD_INNER_DIM": "read only under fp8",
    "ACCELERATE_MIXED_PRECISION": "accelerate leaves bf16 to PyTorch/XLA; an Accelerator sets its variable again",
    "ACCELERATE_DYNAMO_BACKEND": "NO, which is what leaving it out means",
    "ACCELERATE_DYNAMO_MODE": "read only with a backend",
    "ACCELERATE_DYNAMO_USE_DYNAMIC": "read only with a backend",
    "ACCELERATE_DYNAMO_USE_FULLGRAPH": "read only with a backend",
    "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": "read only with a backend",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "1, which is what leaving it out means",
    "OMP_NUM_THREADS": "the host's cores are divided among its processes",
    "PJRT_DEVICE": "TPU, which PyTorch/XLA finds by itself",
    "TF_CPP_MIN_LOG_LEVEL": "a line for every compilation otherwise",
}


@pytest.mark.parametrize("name", TPU)
def test_a_worker_on_a_tpu_sees_what_accelerate_sets(name, tmp_path, monkeypatch):
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils import launch

    path = tmp_path / "config.yaml"
    path.write_text(HEAD.format(type="XLA") + TPU[name])
    monkeypatch.setattr(launch, "is_torch_xla_available", lambda **_: True)
    arguments = launch_command_parser().parse_args(["--config_file", str(path), "train.py"])
    arguments, _, _ = _validate_launch_command(arguments)
    assert arguments.tpu
    there = launch.prepare_tpu(arguments, {})[1]
    node = NodeFacts(cpus=8, tpu_chips=4, environ={})
    config = load_config(path, environ={}).config
    env = build_plan(config, node=node, target=LaunchTarget(name="t.py"), run_id="r", run_dir=tmp_path).env
    own = ("FSDPLAUNCH_", "FSDP_", "TORCH_")  # FSDP_*: nobody reads them without ACCELERATE_USE_FSDP
    here = {key: text for key, text in env.items() if not key.startswith(own)}
    assert {key: here.get(key) for key in there} == there
    assert set(here) - set(there) <= set(ONLY_OURS_ON_TPUS)
    assert "ACCELERATE_USE_FSDP" not in here
