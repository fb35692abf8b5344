"""Every way a file can be wrong, and every note, has a file in tests/cases and the words the user gets for it."""

from pathlib import Path

import pytest

from fsdplaunch.config.load import check, load_config
from fsdplaunch.config.problems import TEXT_NOTES, TEXT_PROBLEMS, ConfigError
from fsdplaunch.config.rules.base import NOTES, RULES
from fsdplaunch.config.schema.config import build_config
from tests.yaml_config import loaded as read

CASES = Path(__file__).parents[3] / "cases"
NAMES = sorted(path.name.removesuffix(".expected.txt") for path in CASES.glob("*.expected.txt"))
NOT_IN_FILES = {"unread-variable", "option-without-effect", "follows", "variable-of-accelerate"}


@pytest.mark.parametrize("name", NAMES)
def test_a_file_is_answered_with_the_expected_words(name, monkeypatch):
    """Comments `# override: KEY=VALUE` in a file stand for the command line."""
    monkeypatch.chdir(CASES)
    path = Path(f"{name}.yaml")
    lines = path.read_bytes().decode(errors="replace").splitlines() if path.exists() else []
    overrides = [line.removeprefix("# override: ") for line in lines if line.startswith("# override: ")]
    try:
        found = load_config(path, environ={}, overrides=overrides).notes
        said = "\n".join(note.as_note() for note in found)
    except ConfigError as error:
        found, said = error.problems, str(error)
        assert said.isascii()
        assert not any(line.endswith(".") for line in said.splitlines())
    assert said + "\n" == (CASES / f"{name}.expected.txt").read_text()
    assert name.partition("_")[2] in {problem.id for problem in found}


def test_every_id_has_a_case_and_every_case_is_used():
    problems = {f"bad_{name}" for name in {*TEXT_PROBLEMS, *RULES} - {"too-large"}}  # see load/test_yaml_reader.py
    notes = {f"note_{name}" for name in {*TEXT_NOTES, *NOTES} - NOT_IN_FILES}
    assert set(NAMES) == problems | notes
    assert {path.stem for path in CASES.glob("*_*.yaml")} - {"transformers_guide"} == set(NAMES) - {"bad_no-file"}


def fsdp(*lines, version=2):
    return "\n".join(["fsdp_config:", f"  fsdp_version: {version}", *(f"  fsdp_{line}" for line in lines)]) + "\n"


def sizes(copies=None, shards=None):
    lines = ["parallelism_config:"]
    lines += [f"  dp_replicate_size: {copies}"] if copies is not None else []
    lines += [f"  dp_shard_size: {shards}"] if shards is not None else []
    return "\n".join(lines) + "\n"


def ids(text):
    try:
        read(text)
    except ConfigError as error:
        return sorted({problem.id for problem in error.problems})
    return []


REFUSED = {
    "a string under FSDP2": ("reshard-value", fsdp("reshard_after_forward: FULL_SHARD")),
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
    "a rest that does not divide": ("mesh-size", "num_processes: 8\n" + sizes(3, -1)),
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
    "group size of a copy": "num_processes: 8\n" + fsdp("reshard_after_forward: 2") + sizes(2),
    "hybrid over machines": "num_machines: 2\n" + fsdp("sharding_strategy: HYBRID_SHARD"),
    "hybrid on one machine with copies": "num_processes: 8\n" + fsdp("sharding_strategy: 4") + sizes(2),
    "hybrid with a shard size": "num_processes: 8\n" + fsdp("sharding_strategy: 4", version=1) + sizes(2, 4),
    "no shard": "num_processes: 8\n" + fsdp("sharding_strategy: NO_SHARD"),
    "the same set twice, FSDP2": fsdp("sharding_strategy: 2", "reshard_after_forward: false"),
    "what FSDP2 does anyway": fsdp(
        "backward_prefetch: BACKWARD_PRE", "use_orig_params: true", "sync_module_states: false"
    ),
    "sync with ram under FSDP2": fsdp("sync_module_states: true", "cpu_ram_efficient_loading: true"),
    "gpu ids on a CPU run": "gpu_ids: '0'\nnum_processes: 4\nuse_cpu: true\n",
    "the same address twice": ("main_process_ip: a\nmain_process_port: 2\nlaunch: {rendezvous_endpoint: 'a:2'}\n"),
    "checkpointed blocks": fsdp("activation_checkpointing: true", "activation_checkpointing_offload: true"),
    "empty names as accelerate writes them": fsdp("transformer_layer_cls_to_wrap: ''"),
    "keys without effect at their defaults": "dynamo_config: {dynamo_backend: 'NO'}\nenable_cpu_affinity: false\n",
    "empty sections of other engines": "deepspeed_config: {}\nmegatron_lm_config: {}\nmpirun_config:\n",
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


FSDP2 = "fsdp_config:\n  fsdp_version: 2\n"
FSDP1 = "fsdp_config:\n  fsdp_version: 1\n"


@pytest.mark.parametrize(
    ("noted", "plain"),
    [
        (FSDP2 + "  fsdp_use_orig_params: false\n  fsdp_backward_prefetch: NO_PREFETCH\n", FSDP2),
        (FSDP2 + "  limit_all_gathers: false\n", FSDP2),
        (FSDP1 + "  fsdp_reshard_after_forward: true\n", FSDP1),
        ("distributed_type: NO\nnum_processes: 8\n", "distributed_type: NO\nnum_processes: 1\n"),
        ("downcast_bf16: fp16\n", ""),
        ("fp16: true\n", "mixed_precision: fp16\n"),
        ("bf16: true\n", "mixed_precision: bf16\n"),
        ("fp16:\n", ""),
        ("fp16: true\nmixed_precision: fp16\n", "mixed_precision: fp16\n"),
        (FSDP2 + "  mixed_precision: bf16\n", FSDP2 + "mixed_precision: bf16\n"),
        (FSDP2 + "  fsdp_mixed_precision: no\n", FSDP2),
        ("dynamo_backend: no\n", ""),
        ("dynamo_backend: inductor\n", "dynamo_config: {dynamo_backend: INDUCTOR}\n"),
        (
            FSDP2 + "  auto_wrap_policy: SIZE_BASED_WRAP\n  min_num_params: 0\n",
            FSDP2 + "  auto_wrap_policy: NO_WRAP\n  min_num_params: 0\n",
        ),
    ],
)
def test_what_is_noted_changes_nothing(noted, plain):
    assert read(noted).config == read(plain).config


@pytest.mark.parametrize(
    "text",
    [
        FSDP2 + "  fsdp_min_num_params: 0\n",
        "deepspeed_config: {}\nmegatron_lm_config:\nmpirun_config: {}\n",
        "distributed_type: NO\nnum_processes: 1\nfsdp_config: {}\n",
        "dynamo_config: {dynamo_backend: 'NO'}\n",
    ],
)
def test_what_says_nothing_is_not_noted(text):
    assert read(text).notes == ()


def test_an_old_place_that_contradicts_its_key_is_refused():
    for text in ("fp16: true\nmixed_precision: bf16\n", "fp16: true\nbf16: true\n"):
        with pytest.raises(ConfigError) as caught:
            read(text)
        assert [problem.id for problem in caught.value.problems] == ["duplicate-key"]
    with pytest.raises(ConfigError) as caught:
        read("fp16: perhaps\n")
    assert str(caught.value).startswith("x.yaml:1:1: fp16: must be true or false")


def test_a_file_for_another_engine_is_refused_with_one_sentence():
    text = "distributed_type: DEEPSPEED\ndeepspeed_config:\n  zero_stage: 3\n"
    with pytest.raises(ConfigError) as caught:
        read(text + "parallelism_config: {dp_shard_size: 2}\ncompute_environment: LOCAL_MACHINE\n")
    assert [problem.key for problem in caught.value.problems] == ["distributed_type"]
    assert [note.id for note in caught.value.notes] == ["other-spelling"]


FSDP_JSON = """{
  "version": 1, "reshard_after_forward": "full_shard", "cpu_offload": true, "auto_wrap_policy":
  "TRANSFORMER_BASED_WRAP", "transformer_layer_cls_to_wrap": ["BertLayer"], "min_num_params": 0,
  "backward_prefetch": "backward_pre", "forward_prefetch": "false", "limit_all_gathers": true,
  "use_orig_params": "true", "sync_module_states": "true", "cpu_ram_efficient_loading": "true",
  "activation_checkpointing": true, "state_dict_type": "FULL_STATE_DICT", "xla": false, "xla_fsdp_v2": false,
  "xla_fsdp_grad_ckpt": false, "xla_fsdp_settings": {"compute_dtype": "bfloat16"}
}
"""


def test_every_key_that_transformers_reads_from_its_own_file_is_understood():
    config = read(FSDP_JSON).config.fsdp_config
    assert (config.fsdp_version, config.fsdp_sharding_strategy, config.fsdp_offload_params) == (
        1,
        "FULL_SHARD",
        True,
    )
    assert config.fsdp_transformer_layer_cls_to_wrap == ("BertLayer",)
    assert (config.fsdp_limit_all_gathers, config.fsdp_activation_checkpointing) == (True, True)


def test_a_misspelt_key_in_such_a_file_is_the_only_problem():
    with pytest.raises(ConfigError) as caught:
        read('{"version": 2, "cpu_ofload": true, "activation_checkpointing": true}')
    assert [(problem.key, problem.hint) for problem in caught.value.problems] == [
        ("fsdp_config.cpu_ofload", "did you mean fsdp_offload_params?")
    ]


@pytest.mark.parametrize(
    ("launch", "noted"),
    [
        ("num_machines: 1\nlaunch: {rendezvous_options: {read_timeout: 9}}\n", False),
        ("num_machines: 1\nlaunch: {rendezvous_options: {join_timeout: 9}}\n", True),
        ("num_machines: 2\nlaunch: {rendezvous_options: {join_timeout: 9}}\n", False),
        ("num_machines: 2\nlaunch: {rendezvous_options: {last_call_timeout: 9}}\n", True),
        ("launch: {nodes: '1:2', rendezvous_options: {last_call_timeout: 9}}\n", False),
        ("launch: {nodes: '1:2', rendezvous_options: {store_type: file}}\n", True),
        ("main_process_ip: 10.0.0.1\nssh: {hosts: [a, b]}\n", False),
        ("num_machines: 2\nmain_process_ip: 10.0.0.1\n", False),
        ("launch: {rendezvous_timeout_seconds: 9}\n", True),
    ],
)
def test_what_this_runs_rendezvous_does_not_read_is_noted(launch, noted):
    ids = {note.id for note in read(launch).notes}
    assert bool(ids & {"unused-rendezvous-options", "one-node"}) is noted
