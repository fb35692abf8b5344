import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from fsdplaunch.config.load import load_config
from fsdplaunch.config.problems import ConfigError
from fsdplaunch.config.resolve import resolve
from fsdplaunch.config.schema.config import all_keys, value_at
from fsdplaunch.errors import UsageError
from fsdplaunch.probe.hardware import Hardware
from fsdplaunch.probe.scheduler import Cluster
from fsdplaunch.wizard.answers import closing_words
from fsdplaunch.wizard.questions import QUESTIONS
from fsdplaunch.wizard.run import run_wizard
from fsdplaunch.wizard.state import SuggestionFacts


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def write(facts, answers=None, **remarks):
    remarks = {"interactive": False, "yes": True} | remarks
    return run_wizard(facts=facts, say=pytest.fail, answers=answers or {}, **remarks)


def said(result):
    """What a file's reader gets that is not the default."""
    Path("read-back.yaml").write_text(result.text)
    config = load_config(Path("read-back.yaml"), environ={}).config
    plain = resolve(type(config)())
    return {
        key.name: value_at(config, key.path)
        for key in all_keys()
        if value_at(config, key.path) != value_at(plain, key.path)
    }


BF16 = {"mixed_precision": "bf16", "param": "bf16", "reduce": "fp32", "master": "fp32"}


@pytest.mark.parametrize(
    ("machine", "answers", "expected"),
    [
        ("laptop", {}, {"use_cpu": True, "num_processes": 2}),
        ("eight_h100", {}, {"num_processes": 8, **BF16}),
        ("slurm_2x8", {}, {"num_processes": 16, "num_machines": 2, **BF16}),
        ("laptop", {"workers-per-node": "4"}, {"use_cpu": True, "num_processes": 4}),
        ("laptop", {"where": "here"}, {"workers_per_node": "auto"}),
        ("eight_h100", {"where": "cpu"}, {"use_cpu": True, "num_processes": 2}),
        (
            "laptop",
            {"where": "machines", "nodes": "3", "rendezvous": "node1"},
            {
                "num_machines": 3,
                "main_process_ip": "node1",
                "main_process_port": 29500,
                "workers_per_node": "auto",
            },
        ),
        (
            "eight_h100",
            {"where": "machines", "nodes": "2", "rendezvous": "[fe80::1]:29400", "goal": "hybrid"},
            {
                "num_machines": 2,
                "num_processes": 16,
                "main_process_ip": "fe80::1",
                "main_process_port": 29400,
                "fsdp_sharding_strategy": "HYBRID_SHARD",
                "parallelism_config_dp_replicate_size": 2,
                "parallelism_config_dp_shard_size": 8,
                **BF16,
            },
        ),
        (
            "one_t4",
            {"goal": "fastest", "wrap": "GPT2Block, T5Block"},
            {
                "num_processes": 1,
                "fsdp_sharding_strategy": "SHARD_GRAD_OP",
                "fsdp_reshard_after_forward": False,
                "fsdp_transformer_layer_cls_to_wrap": ("GPT2Block", "T5Block"),
            },
        ),
        (
            "one_t4",
            {"goal": "biggest", "wrap": "size:20m"},
            {
                "num_processes": 1,
                "fsdp_offload_params": True,
                "fsdp_activation_checkpointing": True,
                "fsdp_auto_wrap_policy": "SIZE_BASED_WRAP",
                "fsdp_min_num_params": 20_000_000,
            },
        ),
        ("one_t4", {"wrap": "none"}, {"num_processes": 1, "fsdp_auto_wrap_policy": "NO_WRAP"}),
        ("slurm_2x8", {"precision": "no", "workers-per-node": "4"}, {"num_machines": 2, "num_processes": 8}),
        ("eight_h100", {"where": "tpu", "precision": "no"}, {"xla": True, "cpu_devices": 1}),
        (
            "laptop",
            {"where": "tpu", "precision": "no", "wrap": "Block"},
            {"xla": True, "fsdp_transformer_layer_cls_to_wrap": ("Block",), "cpu_devices": 1},
        ),
    ],
)
def test_run_wizard_answers_write_exactly_these_keys(machines, machine, answers, expected):
    result = write(machines[machine], answers)
    assert said(result) == expected
    assert any("one GPU" in note for note in result.notes) is (machine == "one_t4")


CASES = [
    ("one_t4", {"goal": "biggest", "wrap": "size:20m"}, ("max_restarts=3",)),
    (
        "eight_h100",
        {"where": "machines", "nodes": "4", "rendezvous": "a-b.c:1", "goal": "hybrid", "model": "8b"},
        (),
    ),
    (
        "slurm_2x8",
        {"goal": "fastest", "wrap": "A, B"},
        ("checkpoint.dir=my ckpt", "launch.env={A: 'x, y'}", "fsdp_version=1"),
    ),
    ("small_container", {"model": "70b"}, ("fsdp_ignored_modules=.*[.]head", "show_ranks=0,1")),
    ("eight_h100", {}, ("num_processes=4", "mixed_precision=fp16")),
    ("slurm_2x8", {"where": "tpu", "goal": "fastest"}, ("xla_fsdp_settings={sharding_groups: [[0], [1]]}",)),
    ("eight_h100", {"where": "tpu", "model": "8b"}, ("xla_fsdp_v2=true", "xla.cpu_devices=3")),
]


def test_run_wizard_on_tpus_prints_its_flags_and_leaves_no_note(machines):
    result = write(machines["eight_h100"], {"where": "tpu"}, overrides=["xla_fsdp_v2=true"])
    assert "--where tpu --goal balanced " in result.command
    assert "--workers-per-node" not in result.command
    Path("f.yaml").write_text(result.text)
    assert load_config(Path("f.yaml"), environ={}).notes == ()  # config validate --strict passes it
    assert "tune" not in closing_words(result)
    assert "fsdplaunch tune train.py" in closing_words(write(machines["eight_h100"], {}))
    assert write(replace(machines["laptop"], on_tpus=True), {}, yes=False).answers["where"] == "tpu"


@pytest.mark.parametrize(("machine", "answers", "overrides"), CASES)
def test_run_wizard_command_writes_the_same_text_again(machines, machine, answers, overrides):
    first = write(machines[machine], answers, overrides=overrides)
    again, settings = parse(first.command)
    assert write(machines[machine], again, overrides=settings).text == first.text


def parse(command):
    """Answers and `--set` texts of a command, by the exported table of options."""
    words = shlex.split(command)
    assert words[:2] == ["fsdplaunch", "config"]
    assert words[-1] == "--yes"
    names = {question.flag: question.name for question in QUESTIONS}
    answers, settings, rest = {}, [], iter(words[2:-1])
    for word in rest:
        if word.startswith("--set="):
            settings.append(word.removeprefix("--set="))
        elif word != "--overwrite":
            answers[names[word]] = next(rest)
    return answers, settings


@pytest.mark.parametrize(
    ("machine", "answers", "message"),
    [
        ("laptop", {"where": "moon"}, "--where must be one of here, machines, slurm, cpu, tpu, got 'moon'"),
        ("laptop", {"nodes": "2"}, "--nodes has no meaning with --where cpu"),
        (
            "laptop",
            {"where": "tpu", "workers-per-node": "4"},
            "--workers-per-node has no meaning with --where tpu",
        ),
        ("eight_h100", {"where": "machines", "nodes": "1"}, "--nodes must be a whole number from 2, got '1'"),
        ("eight_h100", {"workers-per-node": "9"}, "--workers-per-node this machine has 8 visible GPUs, got 9"),
        (
            "eight_h100",
            {"workers-per-node": "0"},
            "--workers-per-node must be a whole number from 1, or auto, got '0'",
        ),
        ("eight_h100", {"model": "4"}, "--model 4 needs a unit, as in 4b or 4m"),
        ("eight_h100", {"model": "nowhere"}, "--model nowhere: no such file, and not the size of a model"),
        ("one_t4", {"precision": "bf16"}, "--precision bf16 is not possible: a GPU here does not support it"),
        (
            "one_t4",
            {"wrap": "Llama Decoder"},
            "--wrap must be auto, none, size:N or class names separated by commas, got 'Llama Decoder'",
        ),
        (
            "one_t4",
            {"wrap": "size:big"},
            "--wrap must be size:N with a number of parameters such as size:100m, got 'size:big'",
        ),
    ],
)
def test_run_wizard_answer_that_is_none_names_the_option(machines, machine, answers, message):
    with pytest.raises(UsageError) as caught:
        write(machines[machine], answers)
    assert caught.value.message == message
    assert caught.value.hint


def test_run_wizard_rendezvous_is_read_as_host_and_port(machines):
    for text, host, port in (("n1", "n1", 29500), ("n1:1", "n1", 1), ("[::1]:5", "::1", 5)):
        config = write(machines["eight_h100"], {"where": "machines", "rendezvous": text}).config
        assert (config.main_process_ip, config.main_process_port) == (host, port)
    for text in ("", ":29500", "a:0", "a b:1", "::1", "http://a"):
        with pytest.raises(UsageError, match="--rendezvous"):
            write(machines["eight_h100"], {"where": "machines", "rendezvous": text})


def test_run_wizard_model_that_does_not_fit_disables_the_goal_with_its_numbers(machines):
    with pytest.raises(UsageError) as caught:
        write(machines["one_t4"], {"model": "8b", "goal": "balanced"})
    assert caught.value.message.startswith("--goal balanced is not possible: needs ")
    assert "of 15 GiB per GPU" in caught.value.message


def test_run_wizard_fewer_workers_make_the_suggestion_smaller(machines):
    """Eight GPUs hold 16 billion parameters, one does not."""
    facts = machines["eight_h100"]
    assert write(facts, {"model": "16b"}).answers["goal"] == "balanced"
    assert write(facts, {"model": "16b", "workers-per-node": "1"}).answers["goal"] == "biggest"


def test_run_wizard_not_interactive_without_a_gpu_asks_for_the_place(machines):
    with pytest.raises(UsageError) as caught:
        write(machines["laptop"], yes=False)
    assert caught.value.message == "cannot answer without asking: Where will this run?"
    assert caught.value.hint == "pass --where here|machines|slurm|cpu|tpu, or --yes, which takes --where cpu"
    assert write(machines["laptop"], {"where": "cpu"}, yes=False).config.use_cpu


def test_run_wizard_not_interactive_names_every_option_that_is_missing(machines):
    facts = machines["eight_h100"]
    assert write(facts, yes=False).text == write(facts).text
    with pytest.raises(UsageError) as caught:
        write(machines["eight_h100"], {"where": "machines"}, yes=False)
    assert "pass --nodes N --rendezvous HOST:PORT, or --yes" in caught.value.hint


def test_run_wizard_existing_file_needs_overwrite(machines):
    Path("fsdp.yaml").write_text("num_processes: 3\n")
    with pytest.raises(UsageError) as caught:
        write(machines["laptop"])
    assert caught.value.message == "fsdp.yaml exists"
    assert "--overwrite" in caught.value.hint
    assert write(machines["laptop"], overwrite=True).command.endswith(" --overwrite --yes")
    assert Path("fsdp.yaml").read_text() == "num_processes: 3\n"


def test_run_wizard_override_wins_and_stands_in_the_file(machines):
    overrides = ["mixed_precision=fp16", "launch.max_restarts=2", "num_processes=4"]
    result = write(machines["eight_h100"], overrides=overrides)
    assert (result.config.mixed_precision, result.config.launch.max_restarts) == ("fp16", 2)
    assert result.answers["workers-per-node"] == "4"
    assert "max_restarts: 2" in result.text


def test_run_wizard_override_takes_back_what_follows_it_in_the_file():
    start = "num_processes: 4\nfsdp_config: {fsdp_version: 2, fsdp_reshard_after_forward: true}\n"
    Path("start.yaml").write_text(start)
    overrides = ["fsdp_sharding_strategy=SHARD_GRAD_OP", "launch.workers_per_node=2"]
    facts = SuggestionFacts(hardware=Hardware(cpu_count=4), cluster=Cluster())
    config = resolve(write(facts, overrides=overrides, start_from=Path("start.yaml")).config)
    assert (config.fsdp_config.fsdp_reshard_after_forward, config.num_processes) == (False, "auto")


def test_run_wizard_override_and_option_for_the_same_key_are_refused(machines):
    with pytest.raises(UsageError, match="--precision and --set mixed_precision set the same thing"):
        write(machines["eight_h100"], {"precision": "no"}, overrides=["mixed_precision=fp16"])


def test_run_wizard_overrides_against_a_rule_are_refused(machines):
    for text, what in (("no_such_key=1", "no_such_key"), ("launch.env.A=1", "must be set as a whole")):
        with pytest.raises(ConfigError, match=what):
            write(machines["laptop"], overrides=[text])
    with pytest.raises(ConfigError) as caught:
        write(machines["eight_h100"], overrides=["fsdp_config.fsdp_state_dict_type=LOCAL_STATE_DICT"])
    assert [problem.id for problem in caught.value.problems] == ["local-state-dict"]


def test_run_wizard_starting_from_a_file_keeps_what_no_answer_changes(machines):
    Path("start.yaml").write_text(
        "distributed_type: FSDP\nnum_processes: 4\nmixed_precision: fp16\n"
        "fsdp_config:\n  fsdp_version: 2\n  fsdp_reshard_after_forward: 2\n  fsdp_forward_prefetch: true\n"
    )
    result = write(machines["eight_h100"], {"precision": "bf16"}, start_from=Path("start.yaml"))
    fsdp = result.config.fsdp_config
    assert (result.config.num_processes, result.config.mixed_precision) == (4, "bf16")
    assert (fsdp.fsdp_reshard_after_forward, fsdp.fsdp_forward_prefetch) == (2, True)
    assert result.answers["goal"] == "keep"


def test_run_wizard_starting_from_an_accelerate_file_stays_version_1(machines):
    Path("start.yaml").write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nnum_processes: 8\nmixed_precision: bf16\n"
        "fsdp_config:\n  fsdp_sharding_strategy: 2\n  fsdp_auto_wrap_policy: SIZE_BASED_WRAP\n"
        "  fsdp_min_num_params: 1000\n"
    )
    result = write(machines["eight_h100"], start_from=Path("start.yaml"))
    assert result.config.fsdp_config.fsdp_version == 1
    assert (result.answers["goal"], result.answers["wrap"]) == ("fastest", "size:1000")


def test_questions_no_key_is_decided_by_two():
    keys = [path for question in QUESTIONS for path in question.keys]
    assert len(keys) == len(set(keys))
