"""Everything that the installed accelerate takes is taken here, noted, or refused with a sentence."""

import argparse
import dataclasses
import shlex
from enum import Enum

import pytest

from fsdplaunch.cli.app import run
from fsdplaunch.cli.commands import own_options
from fsdplaunch.cli.key_options import expand, option_notes
from fsdplaunch.config.problems import ConfigError
from fsdplaunch.errors import UsageError
from tests.yaml_config import loaded

NO_ANSWER = {"unknown-key", "misplaced-key", "wrong-value"}
SAMPLES = {
    "main_process_ip": "10.0.0.1",
    "gpu_ids": "0,1",
    "rdzv_backend": "c10d",
    "rdzv_conf": "read_timeout=30",
    "fp8_override_linear_precision": "true,false,false",
    "fsdp_sharding_strategy": "SHARD_GRAD_OP",
    "fsdp_reshard_after_forward": "FULL_SHARD",
    "fsdp_auto_wrap_policy": "NO_WRAP",
    "fsdp_backward_prefetch": "BACKWARD_POST",
    "fsdp_state_dict_type": "FULL_STATE_DICT",
    "tee": "3",
    "env": "A=1",
}
"""Values for options that take more than a number, a flag or any text."""


def parser_actions():
    """Every option of `accelerate launch`."""
    from accelerate.commands.launch import launch_command_parser

    return [action for action in launch_command_parser()._actions if action.option_strings]


def takes_value(action):
    return action.nargs is None and not isinstance(action, argparse._StoreConstAction)


def sample_values(action):
    """Every choice of an option, or one value that accelerate's parser takes."""
    if action.choices:
        return [str(choice) for choice in action.choices]
    if action.dest in SAMPLES:
        return [SAMPLES[action.dest]]
    flags = isinstance(action.default, str) and action.default in ("true", "false")
    return ["true"] if flags or action.type is bool else ["2"]


def arguments():
    for action in parser_actions():
        for option in action.option_strings:
            for value in sample_values(action) if takes_value(action) else [None]:
                yield [option] if value is None else [option, value]


def answer_to(written):
    """`taken`, `noted`, or the sentence of a refusal; fails where there is none."""
    flags, options = own_options("launch")
    try:
        *given, script = expand([*written, "t.py"], own_flags=flags, own_options=options)
    except UsageError as error:
        assert "no such option" not in error.message
        return error.message
    assert script == "t.py"
    if "--noted" in given:
        return option_notes([given[given.index("--noted") + 1]])[0].message
    overrides = [given[i + 1] for i, word in enumerate(given) if word == "--set"]
    try:
        found = loaded(overrides=overrides)
    except ConfigError as error:
        assert not {problem.id for problem in error.problems} & NO_ANSWER, error
        return str(error)
    return "noted" if found.notes else "taken"


def test_every_option_and_choice_of_accelerate_launch_has_an_answer():
    answers = {" ".join(written): answer_to(written) for written in arguments()}
    assert len(answers) > 200
    assert answers["--num_processes 2"] == answers["--fsdp-version 2"] == answers["--use_fsdp"] == "taken"
    assert answers["--zero_stage 2"].startswith("is read by DeepSpeed only")
    assert answers["--same_network"] == "noted"
    assert answers["--use_deepspeed"] == "--use_deepspeed: DeepSpeed needs accelerate launch"


def test_what_only_older_versions_take_has_an_answer():
    """Their parsers and classes, 1.12 to 1.15, compared: these are gone in the newest."""
    assert answer_to(["--use_xpu"]) == answer_to(["--use-xpu"]) == "is ignored by accelerate as well"
    assert answer_to(["--mpirun-ccl", "1"]).startswith("is read by mpirun only")
    assert answer_to(["--dynamo_backend", "ipex"]) == "taken"
    assert answer_to_file("ipex_config: {use_xpu: false}\n") == [
        "is not used: this run does not use Intel's extension of torch"
    ]
    assert answer_to_file("tp_config: {tp_size: 2}\n") == ["is not used: parallelism_config_tp_size splits layers"]
    assert answer_to(["--fp16"]) == answer_to(["--bf16"]) == "taken"
    assert answer_to(["--ipex"]).startswith("is read by Intel's extension of torch only")
    assert answer_to(["--use_mps_device"]).startswith("--use_mps_device is not supported: fsdplaunch runs on")
    assert answer_to(["--use-tp"]).endswith("split layers are FSDP with parallelism_config_tp_size")
    assert "MPS is not supported: fsdplaunch runs on" in answer_to_file("distributed_type: MPS\n")
    assert "NVFUSER is not supported: torch no longer has it" in answer_to_file("dynamo_backend: NVFUSER\n")


def test_what_only_newer_versions_take_has_an_answer():
    assert answer_to(["--fsdp_activation_checkpointing_offload", "false"]) == "taken"
    assert answer_to(["--fp8_pad_inner_dim", "true"]) in ("taken", "noted")
    assert answer_to(["--megatron_lm_no_load_optim", "true"]).startswith("is read by Megatron-LM only")
    for text in ("dynamo_backend: NEURON\n", "distributed_type: MULTI_NEURON\n"):
        assert "NEURON is not supported: fsdplaunch runs on NVIDIA GPUs, CPUs and TPUs" in answer_to_file(text)


def answer_to_file(text):
    """The notes of a file, or the sentence of its refusal; fails where accelerate's key or value is not known."""
    try:
        return [note.message for note in loaded(text).notes]
    except ConfigError as error:
        assert not {problem.id for problem in error.problems} & NO_ANSWER, error
        return str(error)


def test_every_field_of_its_configuration_classes_is_a_key():
    from accelerate.commands.config.config_args import ClusterConfig, SageMakerConfig

    values = {"int": "1", "bool": "false", "dict": "{}", "list": "[]"}
    for config_class in (ClusterConfig, SageMakerConfig):
        for field in dataclasses.fields(config_class):
            kind = str(field.type)
            value = next((text for word, text in values.items() if word in kind), "x")
            value = {
                "compute_environment": "LOCAL_MACHINE",
                "distributed_type": "FSDP",
                "mixed_precision": "bf16",
            }.get(field.name, value)
            value = {"rdzv_backend": "static", "gpu_ids": "all"}.get(field.name, value)
            answer_to_file(f"machine_rank: {0}\n" if field.name == "machine_rank" else f"{field.name}: {value}\n")


def enumerations():
    from accelerate.utils import dataclasses as theirs
    from accelerate.utils.constants import (
        FSDP_AUTO_WRAP_POLICY,
        FSDP_BACKWARD_PREFETCH,
        FSDP_SHARDING_STRATEGY,
        FSDP_STATE_DICT_TYPE,
    )

    return {
        "distributed_type: {}": theirs.DistributedType,
        "compute_environment: {}": theirs.ComputeEnvironment,
        "mixed_precision: {}": theirs.PrecisionType,
        "dynamo_backend: {}": theirs.DynamoBackend,
        "dynamo_config: {{dynamo_backend: {}}}": theirs.DynamoBackend,
        "compute_environment: AMAZON_SAGEMAKER\ndistributed_type: {}": theirs.SageMakerDistributedType,
        "fsdp_config: {{fsdp_version: 1, fsdp_sharding_strategy: {}}}": FSDP_SHARDING_STRATEGY,
        "fsdp_config: {{fsdp_version: 1, fsdp_reshard_after_forward: {}}}": FSDP_SHARDING_STRATEGY,
        "fsdp_config: {{fsdp_version: 1, fsdp_backward_prefetch: {}}}": FSDP_BACKWARD_PREFETCH,
        "fsdp_config: {{fsdp_version: 1, fsdp_state_dict_type: {}}}": FSDP_STATE_DICT_TYPE,
        "fsdp_config: {{fsdp_auto_wrap_policy: {}}}": FSDP_AUTO_WRAP_POLICY,
        "mixed_precision: fp8\nfp8_config: {{backend: {}}}": theirs.FP8BackendType,
    }


def test_every_value_of_its_enumerations_has_an_answer():
    taken = set()
    for template, values in enumerations().items():
        for value in values:
            word = value.value if isinstance(value, Enum) else value
            if word and isinstance(answer_to_file(template.format(word)), list):
                taken.add(word)
    words = {"FSDP", "MULTI_GPU", "NO", "bf16", "INDUCTOR", "HYBRID_SHARD", "LOCAL_STATE_DICT", "AO", "XLA"}
    assert words <= taken
    assert not {"DEEPSPEED", "MEGATRON_LM", "AMAZON_SAGEMAKER", "TE", "MULTI_XPU"} & taken


LINES = """
--multi_gpu --num_processes 2 train.py
--num_processes=2 train.py --arg1 --arg2
--multi_gpu --mixed_precision=fp16 --num_processes=2 train.py
--cpu train.py
--mixed_precision fp16 train.py
--config_file config.yaml train.py --data_dir path_to_data
--config-file config.yaml train.py --sequence-length=128000
--debug train.py --arg1
--use-fsdp --fsdp-activation-checkpointing=TRUE train.py --cp-size=8
--mixed_precision="fp16" --zero_stage=3 --gradient_accumulation_steps=5 --gradient_clipping=1.0 train.py
--fp8_backend=ao train.py
--num-processes 8 train.py --dp-replicate-size 2 --dp-shard-size 2 --tp-size 2
--main_process_port=29803 --num_processes=1 --gpu_ids='1' --num_machines=1 --dynamo_backend=no train.py
--use_fsdp --fsdp_offload_params true --fsdp_sharding_strategy 1 --fsdp_auto_wrap_policy NO_WRAP train.py
train.py --mixed_precision fp16 --cpu 0
--num_processes=2 train.py --data_path "https://host/a.tar" --prompt "<CAPTION>"
-m --config_file config.yaml --machine_rank 0 --main_process_ip 0.0.0.0 --num_machines 1 train.py --config x.yaml
--num_machines 2 --num_processes 4 --machine_rank 0 --main_process_ip 10.0.0.1 --main_process_port 29500 train.py
"""


@pytest.mark.parametrize("line", LINES.strip().splitlines())
def test_lines_of_its_documentation_run(line, tmp_path, capsys):
    (tmp_path / "train.py").write_text("")
    (tmp_path / "config.yaml").write_text("compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\n")
    words = shlex.split(line)
    assert run(["launch", "--use-cpu", "--dry-run", *words]) == 0
    script = words.index("train.py")
    assert capsys.readouterr().out.rstrip().endswith(shlex.join(["train.py", *words[script + 1 :]]))


@pytest.mark.parametrize(
    ("option", "meant"),
    [
        ("--mixed_precison", "--mixed_precision"),  # so printed in accelerate's own examples
        ("--num_proceses", "--num_processes"),
        ("--dryrun", "--dry-run"),
        ("--fsdp_min_num_parms", "--fsdp_min_num_params"),
        ("--use_fdsp", "--use_fsdp"),
        ("--fp8-backends", "--fp8-backend"),
        ("--tp_size", "--parallelism_config_tp_size"),  # so named in Python
        ("--num_proc", None),  # an abbreviation
        ("--offload_params", None),  # these only resemble an option of another engine
        ("--zero_grad", None),
        ("--offload_param", None),
    ],
)
def test_a_misspelt_option_names_the_nearest_one(option, meant):
    flags, options = own_options("launch")
    with pytest.raises(UsageError, match=f"no such option: {option}") as caught:
        expand([option, "x", "t.py"], own_flags=flags, own_options=options)
    assert meant is None or caught.value.hint == f"did you mean {meant}?"


def test_an_address_that_is_left_empty_says_nothing():
    """So written by Ray's documentation."""
    notes = answer_to_file("main_process_ip: ''\nmain_process_port: ''\n")
    assert notes == ["is ignored: it is empty"] * 2
    with pytest.raises(ConfigError, match="must be all, or GPU numbers"):
        loaded("gpu_ids: ''\n")  # accelerate hides every GPU then


MANY_NOTES = (
    "compute_environment: LOCAL_MACHINE\ndistributed_type: NO\nnum_processes: 8\nfp16: true\n"
    "dynamo_backend: 'NO'\ndeepspeed_config: {zero_stage: 2}\nmegatron_lm_config: {tp_degree: 2}\n"
    "tpu_env: []\nuse_cpu: true\nmain_process_ip: 10.0.0.1\n"
)


def test_a_launch_prints_five_notes_and_how_many_more_there_are(cli, tmp_path):
    (tmp_path / "t.py").write_text("print('it ran')\n")
    (tmp_path / "a.yaml").write_text(MANY_NOTES)
    done = cli("launch", "-c", "a.yaml", "t.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "it ran\n"
    notes = [line for line in done.stderr.splitlines() if line.startswith("note: ")]
    assert notes[0] == "note: a.yaml:3:1: num_processes: 8 is left out: distributed_type NO starts one worker"
    assert len(notes) == 6
    assert notes[-1] == "note: 2 more notes: fsdplaunch config validate a.yaml"
    strict = cli("config", "validate", "--strict", "a.yaml")
    assert (strict.returncode, strict.stdout.splitlines()[-1]) == (2, "7 problems")
