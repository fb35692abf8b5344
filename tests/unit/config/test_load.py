"""From text to a Config: layers, aliases, notes, and every problem at once."""

from pathlib import Path

import pytest

from fsdplaunch.config.load import find_file, load_config
from fsdplaunch.config.problems import ConfigError


def write(folder: Path, text: str, name: str = "fsdp.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def ids(error: ConfigError) -> list[str]:
    return [problem.id for problem in error.problems]


def test_load_without_any_file_gives_the_defaults(tmp_path):
    loaded = load_config(environ={}, cwd=tmp_path)
    assert loaded.path is None
    assert loaded.config.fsdp_config.fsdp_version == 2
    assert loaded.config.fsdp_config.fsdp_reshard_after_forward is True
    assert {origin.layer for origin in loaded.origins.values()} == {"default"}


def test_later_layers_win_and_say_so(tmp_path):
    path = write(tmp_path, "mixed_precision: bf16\nnum_processes: 4\nfsdp_config:\n  fsdp_version: 2\n")
    loaded = load_config(path, environ={"ACCELERATE_MIXED_PRECISION": "fp16"}, overrides=["num-processes=8"])
    assert loaded.config.mixed_precision == "fp16"
    assert loaded.config.num_processes == 8
    assert loaded.origins["fsdp_config", "fsdp_version"].text == f"{path}:4"
    assert loaded.origins["mixed_precision",].text == "env ACCELERATE_MIXED_PRECISION"
    assert loaded.origins["num_processes",].layer == "flag"


def test_an_empty_override_takes_back_what_the_file_says(tmp_path):
    path = write(tmp_path, "num_processes: 4\n")
    loaded = load_config(path, environ={}, overrides=["num_processes="])
    assert loaded.config.num_processes == "auto"
    assert loaded.origins["num_processes",].layer == "default"


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
