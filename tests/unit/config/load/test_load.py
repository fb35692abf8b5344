"""From text to a Config: layers, aliases, notes, and every problem at once."""

import json
import time
from pathlib import Path

import pytest

from fsdplaunch.config.load import find_file, load_config
from fsdplaunch.config.problems import ConfigError
from fsdplaunch.config.schema.config import all_keys, keys_by_path
from tests.yaml_config import loaded as read


def write(folder: Path, text: str, name: str = "fsdp.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def ids(error: ConfigError) -> list[str]:
    return [problem.id for problem in error.problems]


def test_load_without_any_file_gives_the_defaults(tmp_path):
    loaded = load_config(environ={}, cwd=tmp_path)
    assert loaded.config == read("num_processes:\nfsdp_config:\n  fsdp_version: ~\nlaunch: null\n").config
    assert loaded.path is None
    assert loaded.config.fsdp_config.fsdp_version == 2
    assert loaded.config.fsdp_config.fsdp_reshard_after_forward is True
    assert {origin.layer for origin in loaded.origins.values()} == {"default"}


def test_later_layers_win_and_say_so(tmp_path):
    path = write(tmp_path, "mixed_precision: bf16\nnum_processes: 4\nlaunch: {max_restarts: 1}\n")
    variables = {"ACCELERATE_MIXED_PRECISION": "fp16", "FSDP_VERSION": "2", "FSDPLAUNCH_LAUNCH_MAX_RESTARTS": "2"}
    loaded = load_config(path, environ=variables, overrides=["num-processes=8"])
    assert (loaded.config.mixed_precision, loaded.config.num_processes) == ("bf16", 8)
    assert loaded.config.launch.max_restarts == 2
    assert loaded.origins["mixed_precision",].text == f"{path}:1"
    assert loaded.origins["fsdp_config", "fsdp_version"].text == "env FSDP_VERSION"
    assert loaded.origins["num_processes",].layer == "flag"
    assert [note.as_note() for note in loaded.notes] == [
        "env FSDP_VERSION: sets fsdp_config.fsdp_version: 2, because nothing else sets it"
    ]


SETTINGS = {
    "fsdp_config.fsdp_sharding_strategy": "SHARD_GRAD_OP",
    "fsdp_config.fsdp_reshard_after_forward": "true",
    "num_processes": "4",
    "launch.workers_per_node": "2",
    "main_process_ip": "n1",
    "main_process_port": "1",
    "launch.rendezvous_endpoint": "n2:2",
    "num_machines": "2",
    "launch.nodes": "1:3",
    "enable_cpu_affinity": "true",
    "launch.numa_binding": "exclusive",
    "launch.show_ranks": "1",
    "launch.show_local_ranks": "0",
    "launch.redirects": "3",
    "launch.tee": "3",
    "mixed_precision": "bf16",
    "precision.param": "fp16",
    "precision.buffer": "fp16",
    "fsdp_config.fsdp_cpu_ram_efficient_loading": "true",
    "fsdp_config.fsdp_sync_module_states": "false",
    "fsdp_config.fsdp_activation_checkpointing": "false",
    "fsdp_config.xla_fsdp_grad_ckpt": "true",
    "parallelism_config.parallelism_config_dp_shard_size": "3",
    "parallelism_config.parallelism_config_dp_replicate_size": "2",
}
"""A value for each key that follows another, or that others follow."""


@pytest.mark.parametrize(
    ("key", "leader"), [(spec.dotted, leader) for spec in all_keys() for leader in spec.key.follows]
)
def test_a_key_follows_what_a_higher_layer_sets_and_contradicts_only_its_own(tmp_path, key, leader):
    def text(*names):
        sections: dict[str, str] = {}
        for name in names:
            home, _, last = name.rpartition(".")
            sections[home] = sections.get(home, "") + f"{'  ' if home else ''}{last}: {SETTINGS[name]}\n"
        return "".join((f"{home}:\n" if home else "") + lines for home, lines in sorted(sections.items()))

    path = write(tmp_path, text(key))
    loaded = load_config(path, environ={}, overrides=[f"{leader}={SETTINGS[leader]}"])
    spec = keys_by_path()[tuple(key.split("."))]
    assert loaded.origins[spec.path].layer == "default"
    alone = load_config(write(tmp_path, text(leader), "alone.yaml"), environ={})
    assert loaded.config == alone.config
    both = load_config(path, environ={}, overrides=[f"{leader}={SETTINGS[leader]}", f"{leader}="])
    assert both.origins[spec.path].layer == "file"  # a leader that is taken back leads nobody


def test_a_value_that_follows_is_named_where_it_would_have_been_another(tmp_path):
    path = write(tmp_path, "fsdp_config:\n  fsdp_version: 2\n  fsdp_reshard_after_forward: true\n")
    changed = load_config(path, environ={}, overrides=["fsdp_sharding_strategy=SHARD_GRAD_OP"])
    assert changed.config.fsdp_config.fsdp_reshard_after_forward is False
    (note,) = changed.notes
    assert note.as_note() == (
        f"{path}:3:3: fsdp_config.fsdp_reshard_after_forward: true is overridden: "
        "it follows fsdp_config.fsdp_sharding_strategy, which is set by command line"
    )
    assert load_config(path, environ={}, overrides=["fsdp_sharding_strategy=FULL_SHARD"]).notes == ()


def test_variables_of_a_run_around_this_one_do_not_count_unless_changed_since(tmp_path):
    plan = {"FSDP_VERSION": "1", "FSDPLAUNCH_LAUNCH_MAX_RESTARTS": "3", "FSDPLAUNCH_LAUNCH_ROLE": "outer"}
    write(tmp_path, json.dumps({"env": plan}), "plan.json")
    inside = plan | {"FSDPLAUNCH_RUN_DIR": str(tmp_path), "ACCELERATE_USE_FSDP": "true"}
    path = write(tmp_path, "num_processes: 4\n")
    assert load_config(path, environ=inside).config == load_config(path, environ={}).config
    changed = load_config(path, environ=inside | {"FSDPLAUNCH_LAUNCH_ROLE": "inner"}).config
    assert (changed.launch.role, changed.launch.max_restarts) == ("inner", 0)


def test_problems_of_all_layers_are_reported_together(tmp_path):
    path = write(tmp_path, "num_process: 2\nfsdp_config:\n  fsdp_version: 3\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path, environ={"FSDP_OFFLOAD_PARAMS": "perhaps"}, overrides=["nosuch=1"])
    assert caught.value.exit_code == 2
    assert ids(caught.value) == ["unknown-key", "wrong-value", "unknown-key", "wrong-value"]
    assert [str(problem.place) for problem in caught.value.problems] == [
        f"{path}:1:1",
        f"{path}:3:3",
        "command line",
        "env FSDP_OFFLOAD_PARAMS",
    ]


def test_the_file_is_the_given_one_then_the_variable_then_the_folder(tmp_path):
    assert find_file(None, {}, tmp_path) is None
    write(tmp_path, "")
    assert find_file(None, {}, tmp_path) == Path("fsdp.yaml")
    assert find_file(None, {"FSDPLAUNCH_CONFIG": "b.yaml"}, tmp_path) == Path("b.yaml")
    assert find_file(Path("a.yaml"), {"FSDPLAUNCH_CONFIG": "b.yaml"}, tmp_path) == Path("a.yaml")


def notes(loaded):
    """The notes of a configuration as they are printed."""
    return [note.as_note() for note in loaded.notes]


CASES = Path(__file__).parents[3] / "cases"


def test_of_the_guides_example_two_keys_are_named():
    file = CASES / "transformers_guide.yaml"
    loaded = load_config(file, environ={})
    lines = {line.partition(":")[0].strip(): n for n, line in enumerate(file.read_text().splitlines(), start=1)}
    others = "downcast_bf16, main_training_function, tpu_use_cluster, tpu_use_sudo, tpu_env"
    alias = "fsdp_backward_prefetch_policy"
    assert notes(loaded) == [
        f"{file}:{lines[alias]}:3: fsdp_config.{alias}: is read as fsdp_backward_prefetch",
        f"{file}:{lines['same_network']}:1: same_network: has no effect here, nor have {others}",
    ]


@pytest.mark.parametrize(
    ("written", "name", "value"),
    [
        ("fsdp_backward_prefetch_policy: BACKWARD_POST", "fsdp_backward_prefetch", "BACKWARD_POST"),
        ("fsdp_wrap_policy: SIZED_BASED_WRAP", "fsdp_auto_wrap_policy", "SIZE_BASED_WRAP"),
        ("min_num_param: 1e6", "fsdp_min_num_params", 1_000_000),
        ("transformer_cls_names_to_wrap: [A, B]", "fsdp_transformer_layer_cls_to_wrap", ("A", "B")),
        ("transformer_layer_cls_to_wrap: ' A , B,'", "fsdp_transformer_layer_cls_to_wrap", ("A", "B")),
        ("offload_params: yes", "fsdp_offload_params", True),
        ("sharding_strategy: full shard", "fsdp_sharding_strategy", "FULL_SHARD"),
    ],
)
def test_spellings_of_published_guides_work_and_name_the_key_once(written, name, value):
    loaded = read(f"fsdp_config:\n  {written}\n")
    assert getattr(loaded.config.fsdp_config, name) == value
    alias = written.partition(":")[0]
    (told, *_) = notes(loaded)
    assert told == f"x.yaml:2:3: fsdp_config.{alias}: is read as {name}"


def test_single_variables_are_added_to_those_of_the_file():
    said = read("main_process_ip: 10.10\nlaunch:\n  env: {A: 1e-5, B: 010, C: true, D: ''}\n").config
    assert said.main_process_ip == "10.10"  # texts stay as they are spelled
    assert said.launch.env == {"A": "1e-5", "B": "010", "C": "true", "D": ""}
    loaded = read("launch: {env: {A: 1}}\n", overrides=["launch.env.B=x=y", "launch.env.A=2"])
    assert loaded.config.launch.env == {"A": "2", "B": "x=y"}
    assert loaded.origins["launch", "env"].text == "command line"


@pytest.mark.parametrize(
    "override",
    ["fsdp_version=2", "fsdp-version=2", "version=2", "fsdp_config.fsdp_version=2", "fsdp_config.version= 2 "],
)
def test_an_override_names_its_key_in_any_way(override):
    assert read("compute_environment: LOCAL_MACHINE\n", overrides=[override]).config.fsdp_config.fsdp_version == 2


def test_a_file_that_cannot_be_read_is_one_problem(tmp_path):
    locked = write(tmp_path, "num_processes: 2\n", "locked.yaml")
    broken = write(tmp_path, "a: [\n", "broken.yaml")
    for path, rule in ((tmp_path, "no-file"), (tmp_path / "none.yaml", "no-file"), (broken, "syntax")):
        with pytest.raises(ConfigError) as caught:
            load_config(path, environ={}, overrides=["machine_rank=0"])
        assert ids(caught.value) == [rule]
    assert load_config(locked, environ={}).config.num_processes == 2


def test_two_thousand_lines_with_fifty_mistakes_report_all_fifty_at_once():
    good = [f"    VARIABLE_{number}: value {number}  # a comment" for number in range(1950)]
    wrong = [f"  typo_{number}: true" for number in range(49)]
    text = "\n".join(["launch:", *wrong, "  max_restarts: -1", "  env:", *good])
    started = time.process_time()
    with pytest.raises(ConfigError) as caught:
        read(text + "\n")
    assert time.process_time() - started < 1.5
    assert len(caught.value.problems) == 50
    assert text.count("\n") == 2001
    assert sorted(ids(caught.value)) == ["unknown-key"] * 49 + ["wrong-value"]


def test_a_variable_that_nearly_names_a_key_is_pointed_out():
    environ = {
        "FSDP_STATE_DICT_TYPES": "FULL_STATE_DICT",
        "FSDP_TRANSFORMER_LAYER_CLS_TO_WRAP": "A",
        "FSDPLAUNCH_CONFIG": "x",
        "FSDPLAUNCH_RUN_DIR": "/x",
        "HOME": "/root",
    }
    assert notes(read("", environ=environ)) == [
        "env FSDP_STATE_DICT_TYPES: is not read; did you mean FSDP_STATE_DICT_TYPE?",
        "env FSDP_TRANSFORMER_LAYER_CLS_TO_WRAP: is not read; did you mean FSDP_TRANSFORMER_CLS_TO_WRAP?",
    ]
