"""Every note has a file in tests/cases, the words the user gets for it, and the run it does not change."""

from pathlib import Path

import pytest

from fsdplaunch.config.load import load_config, stack
from fsdplaunch.config.problems import TEXT_NOTES, ConfigError
from fsdplaunch.config.rules.base import NOTES
from fsdplaunch.config.yaml_text import read_text

CASES = Path(__file__).parents[3] / "cases"
NAMES = sorted(path.name.removesuffix(".expected.txt") for path in CASES.glob("note_*.expected.txt"))
NOT_IN_FILES = {"unread-variable", "option-without-effect", "follows", "variable-of-accelerate"}


def load(name, monkeypatch):
    monkeypatch.chdir(CASES)
    return load_config(Path(f"{name}.yaml"), environ={})


def read(text):
    return stack(read_text(text, "x.yaml"))


@pytest.mark.parametrize("name", NAMES)
def test_a_leftover_is_noted_with_the_expected_words(name, monkeypatch):
    loaded = load(name, monkeypatch)
    lines = [note.as_note() for note in loaded.notes]
    assert lines == (CASES / f"{name}.expected.txt").read_text().splitlines()
    assert name.removeprefix("note_") in {note.id for note in loaded.notes}


def test_every_note_of_a_file_has_a_case():
    ids = {name.removeprefix("note_") for name in NAMES}
    assert ids == {*TEXT_NOTES, *NOTES} - NOT_IN_FILES
    assert {path.stem for path in CASES.glob("note_*.yaml")} == set(NAMES)


FSDP2 = "fsdp_config:\n  fsdp_version: 2\n"
FSDP1 = "fsdp_config:\n  fsdp_version: 1\n"


@pytest.mark.parametrize(
    ("noted", "plain"),
    [
        (FSDP2 + "  fsdp_use_orig_params: false\n  fsdp_backward_prefetch: NO_PREFETCH\n", FSDP2),
        (FSDP2 + "  limit_all_gathers: false\n", FSDP2),
        (FSDP1 + "  fsdp_reshard_after_forward: true\n", FSDP1),
        (FSDP1 + "  fsdp_reshard_after_forward: false\n", FSDP1),
        ("distributed_type: NO\nnum_processes: 8\n", "distributed_type: NO\nnum_processes: 1\n"),
        ("distributed_type: NO\n", "distributed_type: NO\nnum_processes: 1\n"),
        ("downcast_bf16: fp16\n", ""),
        ("fp16: true\n", "mixed_precision: fp16\n"),
        ("bf16: true\n", "mixed_precision: bf16\n"),
        ("fp16: false\n", ""),
        ("fp16:\n", ""),
        ("fp16: true\nmixed_precision: fp16\n", "mixed_precision: fp16\n"),
        (FSDP2 + "  mixed_precision: bf16\n", FSDP2 + "mixed_precision: bf16\n"),
        (FSDP2 + "  fsdp_mixed_precision: no\n", FSDP2),
        ("dynamo_backend: 'NO'\n", ""),
        ("dynamo_backend: no\n", ""),
        ("dynamo_backend: No\n", ""),
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


def test_a_launch_prints_five_notes_and_counts_the_rest():
    names = [f"fsdp_{name}" for name in ("offload_params", "forward_prefetch", "use_orig_params")]
    text = FSDP1 + "".join(f"  {name.removeprefix('fsdp_')}: true\n" for name in names)
    more = "  wrap_policy: 1\n  cpu_offload: true\n"
    assert len(read(text).note_lines()) == len(read(text).notes) == 3
    text = text.replace("  offload_params: true\n", "") + more + "tpu_env: []\nfp16: true\n"
    loaded = stack(read_text(text, "a.yaml"), path=Path("a.yaml"))
    assert len(loaded.notes) == 6
    assert loaded.notes[-1].id == "written-by-accelerate"
    assert loaded.note_lines()[5:] == ["1 more note: fsdplaunch config validate a.yaml"]


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
