"""What `config show, set, validate, explain, schema, presets, convert` print, write and return."""

import json
import os
import shlex
import sys
from pathlib import Path

import pexpect
import pytest

from fsdplaunch.cli.app import run
from fsdplaunch.config.load import load_config

GOOD = "# mine\nnum_processes: 2   # here\nfsdp_config:\n  fsdp_version: 2\n"


@pytest.fixture
def config(capsys):
    """Run `fsdplaunch config WORDS` in an empty folder; return its status, and what it printed on each stream."""

    def call(words: str) -> tuple[int, str, str]:
        return (run(["config", *shlex.split(words)]), *capsys.readouterr())

    return call


def put(**files: str) -> None:
    for name, text in files.items():
        Path(f"{name}.yaml").write_text(text)


def test_show_prints_a_file_that_means_the_same(config):
    assert config("show")[2] == "note: no fsdp.yaml here; these are the defaults\n"
    put(fsdp=GOOD)
    status, out, err = config("show --set use_cpu=true")
    assert (status, err) == (0, "")
    put(shown=out)
    assert load_config(Path("shown.yaml")).config == load_config(overrides=["use_cpu=true"]).config


def test_show_tells_where_each_value_comes_from(config, monkeypatch):
    put(fsdp=GOOD + "downcast_bf16: 'no'\n")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    _, out, err = config("show --set num_machines=2 --origin")
    lines = {line.split("#")[0].strip(): line.split("#")[1].strip() for line in out.splitlines()}
    assert lines["num_processes: 2"] == "fsdp.yaml:2"
    assert lines["mixed_precision: bf16"] == "env ACCELERATE_MIXED_PRECISION"
    assert lines["num_machines: 2"] == "command line"
    assert lines["use_cpu: false"] == "default"
    assert "fsdp.yaml:5:1: downcast_bf16: has no effect here" in err
    shown = json.loads(config("show --json --origin")[1])
    assert shown["file"] == "fsdp.yaml"
    assert shown["config"]["num_processes"] == {"value": 2, "layer": "file", "from": "fsdp.yaml:2"}
    assert shown["config"]["fsdp_config"]["fsdp_reshard_after_forward"]["value"] is True


def test_set_changes_one_line(config):
    put(fsdp=GOOD)
    _, _, err = config("set num-processes=8 offload_params=yes")
    assert err == "fsdp.yaml: num_processes, fsdp_config.fsdp_offload_params\n"
    expected = GOOD.replace("2   # here", "8   # here") + "  fsdp_offload_params: true\n"
    assert Path("fsdp.yaml").read_text() == expected
    Path("fsdp.yaml").unlink()
    assert config("set fsdp_version=2")[0] == 0
    assert Path("fsdp.yaml").read_text() == "fsdp_config:\n  fsdp_version: 2\n"


@pytest.mark.parametrize("assignment", ["num_processes=many", "nosuch=1", "num_processes", "machine_rank=7"])
def test_set_writes_nothing_that_would_be_wrong(config, assignment):
    put(fsdp=GOOD)
    assert config(f"set {assignment}")[0] == 2
    assert Path("fsdp.yaml").read_text() == GOOD
    assert [path.name for path in Path().iterdir()] == ["fsdp.yaml"]


def test_set_keeps_permissions_and_follows_links(config):
    put(real=GOOD)
    real = Path("real.yaml")
    real.chmod(0o640)
    Path("fsdp.yaml").symlink_to(real)
    config("set num_processes=4")
    assert Path("fsdp.yaml").is_symlink()
    assert "num_processes: 4" in real.read_text()
    assert real.stat().st_mode & 0o777 == 0o640


def test_validate_reports_every_file_and_looks_at_files_alone(config, monkeypatch):
    monkeypatch.setenv("FSDP_OFFLOAD_PARAMS", "perhaps")
    put(good=GOOD, bad="num_process: 2\n", worse="num_machines: 0\nuse_cpu: perhaps\n")
    status, out, _ = config("validate good.yaml bad.yaml worse.yaml")
    lines = [line.split(": ")[0] for line in out.splitlines()[1:] if line[0] != " "]
    assert (status, out.splitlines()[0]) == (2, "good.yaml: no problems")
    assert lines == ["bad.yaml:1:1", "worse.yaml:1:1", "worse.yaml:2:1", "3 problems"]
    problem = {"id": "unknown-key", "key": "num_process", "message": "is not a key at the top level"}
    problem |= {"hint": "did you mean num_processes?", "file": "bad.yaml", "line": 1, "col": 1}
    status, out, _ = config("validate bad.yaml --json")
    assert (status, json.loads(out)) == (2, {"ok": False, "problems": [problem], "notes": []})


def test_named_pipe_is_said_and_the_pipe_of_a_shell_is_read(config):
    os.mkfifo("waits")
    assert config("validate waits")[1].splitlines()[0] == "waits: is a named pipe [no-file]"
    reads, writes = os.pipe()
    os.write(writes, GOOD.encode())
    os.close(writes)
    assert config(f"validate /dev/fd/{reads}")[:2] == (0, f"/dev/fd/{reads}: no problems\n")
    os.close(reads)


def test_notes_are_no_problems_unless_strict(config):
    put(fsdp="fp16: true\nsame_network: true\n")
    texts = ["1:1: fp16: is read as mixed_precision: fp16", "2:1: same_network: has no effect here"]
    said = "".join(f"note: fsdp.yaml:{text}\n" for text in texts)
    assert config("validate") == (0, "fsdp.yaml: no problems\n", said)
    status, out, _ = config("validate --strict")
    rules = ("former-place", "written-by-accelerate")
    lines = [f"fsdp.yaml:{text} [{rule}]" for text, rule in zip(texts, rules, strict=True)]
    assert (status, out.splitlines()) == (2, [*lines, "2 problems"])
    status, out, _ = config("validate --json")
    assert (status, [note["line"] for note in json.loads(out)["notes"]]) == (0, [1, 2])


def test_explain_shows_the_value_of_the_file_if_there_is_one(config):
    assert "yours" not in config("explain num_processes")[1]
    put(fsdp=GOOD)
    assert "yours: 2 (fsdp.yaml:2)" in config("explain num_processes")[1]
    put(fsdp="num_processes: [\n")
    assert json.loads(config("explain num_processes --json")[1])[0]["key"] == "num_processes"
    section = config("explain checkpoint")[1]
    assert ("keep_last" in section, "fsdp_version" in section) == (True, False)


def test_the_schema_is_what_configs_holds(config):
    written = Path(__file__).parents[2] / "configs" / "fsdp.schema.json"
    assert json.loads(config("schema")[1]) == json.loads(written.read_text())


def test_presets_are_listed_and_printed(config):
    assert "laptop_cpu" in config("presets")[1]
    put(fsdp=config("presets laptop_cpu")[1])
    assert load_config().config.use_cpu is True
    assert {"name", "summary"} == set(json.loads(config("presets --json")[1])[0])


def test_convert_writes_a_new_file_and_names_what_changes(config):
    put(old="fsdp_config:\n  fsdp_version: 1\n  fsdp_use_orig_params: true  # x\n")
    status, _, err = config("convert old.yaml new.yaml --to fsdp2")
    assert (status, "dropped  fsdp_config.fsdp_use_orig_params" in err) == (0, True)
    assert load_config(Path("new.yaml")).config.fsdp_config.fsdp_version == 2
    assert config("convert old.yaml new.yaml --to fsdp2")[0] == 2
    assert config("convert old.yaml new.yaml --to fsdp2 --overwrite")[0] == 0
    assert config("validate new.yaml")[0] == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("convert none.yaml x.yaml --to fsdp2", "none.yaml: does not exist"),
        ("convert none.yaml x.yaml --to accelerate", "a file cannot be converted to accelerate"),
        ("explain fsdp_shading_strategy", "did you mean fsdp_sharding_strategy"),
    ],
)
def test_what_is_not_there_ends_with_2_and_its_name(config, words, said):
    status, out, err = config(words)
    assert (status, out, said in err) == (2, "", True)


def test_set_changes_what_follows_a_key_too(config, capsys):
    assert config("--yes")[0] == 0
    put(t="")
    for strategy, reshard in (("SHARD_GRAD_OP", "false"), ("FULL_SHARD", "true")):
        assert config(f"set fsdp_sharding_strategy={strategy}")[0] == 0
        assert f"reshard_after_forward: {reshard}" in Path("fsdp.yaml").read_text()
        assert run(["launch", "--dry-run", "--set", f"fsdp_sharding_strategy={strategy}", "t.yaml"]) == 0
        assert f"reshard_after_forward={reshard}" in capsys.readouterr().out.lower()
    assert config("validate --strict")[0] == 0


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("fsdplaunch config presets single", "single_node"),
        ("fsdplaunch config set mixed_precision=b", "mixed_precision=bf16"),
        ("fsdplaunch config explain keep_gl", "keep_global_batch"),
        ("fsdplaunch runs logs 2026", "2026-run"),
    ],
)
def test_presets_keys_values_and_runs_are_completed(cli, tmp_path, words, found):
    (tmp_path / "runs" / "2026-run").mkdir(parents=True)
    words = words.replace(" ", "\n")  # as bash hands them over
    done = cli(_FSDPLAUNCH_COMPLETE="complete_bash", COMP_WORDS=words, COMP_CWORD=str(words.count("\n")))
    assert done.stdout.split() == [found]


@pytest.mark.parametrize(
    ("typed", "line"),
    [
        ("config set mixed_precision=b", "config set mixed_precision=bf16 "),
        ("config set mixed_prec", "config set mixed_precision="),
        ("launch --set fsdp_sharding_strategy=SHARD_", "launch --set fsdp_sharding_strategy=SHARD_GRAD_OP "),
        ("launch --set launch.shard=alw", "launch --set launch.shard=always "),
        ("config explain mixed_pr", "config explain mixed_precision "),
        ("config set mixed_precision=no fsdp_state_dict_type=SHA", "fsdp_state_dict_type=SHARDED_STATE_DICT "),
    ],
)
def test_what_is_typed_is_completed_in_bash(typed, line):
    environ = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "TERM": "dumb"}
    shell = pexpect.spawn("bash", ["--norc", "--noprofile"], env=environ, encoding="utf-8", timeout=20)
    shell.sendline("PS1='$ '; bind 'set bell-style none'; eval \"$(fsdplaunch --show-completion)\"; echo R''EADY")
    shell.expect_exact("READY\r\n$ ")
    shell.send(f"fsdplaunch {typed}\t")
    shell.expect_exact(line)
    shell.close(force=True)
