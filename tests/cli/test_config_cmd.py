"""What `config show, set, validate, explain, schema, presets, convert` print, write and return."""

import json
from pathlib import Path

import pytest

from fsdplaunch.cli import config
from fsdplaunch.config.load import load_config
from fsdplaunch.config.problems import ConfigError
from fsdplaunch.errors import UsageError

GOOD = "# mine\nnum_processes: 2   # here\nfsdp_config:\n  fsdp_version: 2\n"


class Recorder:
    """An Output that keeps what it is given."""

    def __init__(self):
        self.stdout, self.stderr, self.notes = [], [], []

    def data(self, text):
        self.stdout.append(text)

    def json(self, value):
        self.stdout.append(json.dumps(value))

    def say(self, text):
        self.stderr.append(text)

    def note(self, text):
        self.notes.append(text)

    @property
    def text(self):
        return "\n".join(self.stdout)


@pytest.fixture
def out():
    return Recorder()


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """An empty folder, and no configuration in the environment."""
    import os

    for name in [name for name in os.environ if name.startswith(("FSDP", "ACCELERATE", "PARALLELISM"))]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_show_prints_a_file_that_means_the_same(folder, out):
    (folder / "fsdp.yaml").write_text(GOOD)
    assert config.show(file=None, overrides=["use_cpu=true"], origin=False, as_json=False, out=out) == 0
    shown = folder / "shown.yaml"
    shown.write_text(out.text + "\n")
    assert load_config(shown).config == load_config(overrides=["use_cpu=true"]).config
    assert out.notes == []


def test_show_tells_where_each_value_comes_from(folder, out, monkeypatch):
    (folder / "fsdp.yaml").write_text(GOOD)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    config.show(file=None, overrides=["num_machines=2"], origin=True, as_json=False, out=out)
    lines = {line.split("#")[0].strip(): line.split("#")[1].strip() for line in out.text.splitlines()}
    assert lines["num_processes: 2"] == "fsdp.yaml:2"
    assert lines["mixed_precision: bf16"] == "env ACCELERATE_MIXED_PRECISION"
    assert lines["num_machines: 2"] == "command line"
    assert lines["use_cpu: false"] == "default"


def test_show_as_json_holds_every_key_and_data_is_alone_on_stdout(cli, folder):
    (folder / "fsdp.yaml").write_text(
        "compute_environment: LOCAL_MACHINE\ndowncast_bf16: 'no'\nnum_processes: 2\n"
    )
    done = cli("config", "show", "--json", "--origin", FSDP_OFFLOAD_PARAMS="true")
    assert done.returncode == 0
    shown = json.loads(done.stdout)
    assert shown["file"] == "fsdp.yaml"
    assert shown["config"]["num_processes"] == {"value": 2, "layer": "file", "from": "fsdp.yaml:3"}
    offload = shown["config"]["fsdp_config"]["fsdp_offload_params"]
    assert offload == {"value": True, "layer": "env", "from": "env FSDP_OFFLOAD_PARAMS"}
    assert "fsdp.yaml:2:1: downcast_bf16: has no effect here" in done.stderr
    (folder / "fsdp.yaml").unlink()
    assert "no fsdp.yaml here; these are the defaults" in cli("config", "show").stderr


def test_set_changes_one_line(folder, out):
    (folder / "fsdp.yaml").write_text(GOOD)
    assert config.set_values(["num-processes=8", "offload_params=yes"], file=None, out=out) == 0
    expected = GOOD.replace("2   # here", "8   # here") + "  fsdp_offload_params: true\n"
    assert (folder / "fsdp.yaml").read_text() == expected
    assert out.stderr == ["fsdp.yaml: num_processes, fsdp_config.fsdp_offload_params"]
    (folder / "fsdp.yaml").unlink()
    assert config.set_values(["fsdp_version=2"], file=None, out=out) == 0
    assert (folder / "fsdp.yaml").read_text() == "fsdp_config:\n  fsdp_version: 2\n"


@pytest.mark.parametrize("assignment", ["num_processes=many", "nosuch=1", "num_processes", "machine_rank=7"])
def test_set_writes_nothing_that_would_be_wrong(folder, out, assignment):
    (folder / "fsdp.yaml").write_text(GOOD)
    with pytest.raises(ConfigError):
        config.set_values([assignment], file=None, out=out)
    assert (folder / "fsdp.yaml").read_text() == GOOD
    assert [path.name for path in folder.iterdir()] == ["fsdp.yaml"]


def test_set_keeps_permissions_and_follows_links(folder, out):
    real = folder / "real.yaml"
    real.write_text(GOOD)
    real.chmod(0o640)
    (folder / "fsdp.yaml").symlink_to(real)
    config.set_values(["num_processes=4"], file=None, out=out)
    assert (folder / "fsdp.yaml").is_symlink()
    assert "num_processes: 4" in real.read_text()
    assert real.stat().st_mode & 0o777 == 0o640


def test_validate_reports_every_file_and_looks_at_files_alone(folder, out, monkeypatch):
    monkeypatch.setenv("FSDP_OFFLOAD_PARAMS", "perhaps")
    (folder / "good.yaml").write_text(GOOD)
    (folder / "bad.yaml").write_text("num_process: 2\n")
    (folder / "worse.yaml").write_text("num_machines: 0\nuse_cpu: perhaps\n")
    names = [folder.joinpath(name).relative_to(folder) for name in ("good.yaml", "bad.yaml", "worse.yaml")]
    assert config.validate(names, as_json=False, out=out) == 2
    lines = out.text.splitlines()
    assert lines[0] == "good.yaml: no problems"
    assert [line.split(": ")[0] for line in lines[1:] if line[0] != " "] == [
        "bad.yaml:1:1",
        "worse.yaml:1:1",
        "worse.yaml:2:1",
        "3 problems",
    ]


def test_validate_as_json_for_editors(folder, out):
    (folder / "fsdp.yaml").write_text("num_process: 2\n")
    assert config.validate([], as_json=True, out=out) == 2
    problem = {"id": "unknown-key", "key": "num_process", "message": "is not a key at the top level"}
    problem |= {"hint": "did you mean num_processes?", "file": "fsdp.yaml", "line": 1, "col": 1}
    assert json.loads(out.text) == {"ok": False, "problems": [problem], "notes": []}


def test_notes_are_no_problems_unless_strict(folder, out):
    (folder / "fsdp.yaml").write_text("fp16: true\nsame_network: true\n")
    assert config.validate([], as_json=False, out=out) == 0
    assert out.stdout == ["fsdp.yaml: no problems"]
    assert out.notes == [
        "fsdp.yaml:1:1: fp16: is read as mixed_precision: fp16",
        "fsdp.yaml:2:1: same_network: has no effect here",
    ]
    assert config.validate([], strict=True, as_json=False, out=out) == 2
    assert out.stdout[1].splitlines() == [
        "fsdp.yaml:1:1: fp16: is read as mixed_precision: fp16 [former-place]",
        "fsdp.yaml:2:1: same_network: has no effect here [written-by-accelerate]",
        "2 problems",
    ]
    assert config.validate([], as_json=True, out=out) == 0
    assert [note["line"] for note in json.loads(out.stdout[2])["notes"]] == [1, 2]


def test_explain_shows_the_value_of_the_file_if_there_is_one(folder, out):
    config.explain("num_processes", file=None, as_json=False, out=out)
    (folder / "fsdp.yaml").write_text(GOOD)
    config.explain("num_processes", file=None, as_json=False, out=out)
    (folder / "fsdp.yaml").write_text("num_processes: [\n")
    config.explain("num_processes", file=None, as_json=True, out=out)
    config.explain("checkpoint", file=None, as_json=False, out=out)
    assert ("keep_last" in out.stdout[3], "fsdp_version" in out.stdout[3]) == (True, False)
    assert "yours" not in out.stdout[0]
    assert "yours: 2 (fsdp.yaml:2)" in out.stdout[1]
    assert json.loads(out.stdout[2])[0]["key"] == "num_processes"


def test_the_schema_is_what_configs_holds(out):
    assert config.schema(out=out) == 0
    written = Path(__file__).parents[2] / "configs" / "fsdp.schema.json"
    assert json.loads(out.text) == json.loads(written.read_text())


def test_presets_are_listed_and_printed(folder, out):
    config.presets(None, as_json=False, out=out)
    config.presets("laptop_cpu", as_json=False, out=out)
    config.presets(None, as_json=True, out=out)
    assert "laptop_cpu" in out.stdout[0]
    (folder / "fsdp.yaml").write_text(out.stdout[1])
    assert load_config().config.use_cpu is True
    assert {"name", "summary"} == set(json.loads(out.stdout[2])[0])


def test_convert_writes_a_new_file_and_names_what_changes(folder, out):
    (folder / "old.yaml").write_text("fsdp_config:\n  fsdp_version: 1\n  fsdp_use_orig_params: true  # x\n")
    new = folder / "new.yaml"
    arguments = {"to": "fsdp2", "as_json": False, "out": out}
    assert config.convert(folder / "old.yaml", new, overwrite=False, **arguments) == 0
    assert load_config(new).config.fsdp_config.fsdp_version == 2
    assert any(line.startswith("dropped  fsdp_config.fsdp_use_orig_params") for line in out.stderr)
    with pytest.raises(UsageError, match="exists"):
        config.convert(folder / "old.yaml", new, overwrite=False, **arguments)
    assert config.convert(folder / "old.yaml", new, overwrite=True, **arguments) == 0
    assert config.validate([new], as_json=False, out=out) == 0


def test_convert_for_accelerate(folder, out):
    (folder / "ours.yaml").write_text("num_processes: 2\nlaunch: {max_restarts: 1}\n")
    new = folder / "theirs.yaml"
    config.convert(folder / "ours.yaml", new, to="accelerate", overwrite=False, as_json=True, out=out)
    assert [change["key"] for change in json.loads(out.text)["changes"]] == ["launch.max_restarts"]
    assert "launch:" not in new.read_text()
    with pytest.raises(UsageError, match="nothing to convert to"):
        config.convert(
            folder / "ours.yaml", folder / "x.yaml", to="fsdp3", overwrite=False, as_json=False, out=out
        )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("convert", "none.yaml", "x.yaml", "--to", "fsdp2"), "none.yaml: does not exist"),
        (("explain", "fsdp_shading_strategy"), "did you mean fsdp_sharding_strategy"),
    ],
)
def test_what_is_not_there_ends_with_2_and_its_name(cli, words, said):
    done = cli("config", *words)
    assert (done.returncode, done.stdout, said in done.stderr) == (2, "", True)


def test_set_changes_what_follows_a_key_too(cli, tmp_path):
    assert cli("config", "--yes").returncode == 0
    for words in (["config", "set"], ["launch", "--dry-run", "--set"]):
        script = [] if words[0] == "config" else ["t.py"]
        (tmp_path / "t.py").write_text("")
        for strategy, reshard in (("SHARD_GRAD_OP", "false"), ("FULL_SHARD", "true")):
            done = cli(*words, f"fsdp_sharding_strategy={strategy}", *script)
            assert done.returncode == 0, done.stderr
            shown = (tmp_path / "fsdp.yaml").read_text() if not script else done.stdout.lower()
            assert f"reshard_after_forward{'=' if script else ': '}{reshard}" in shown
    assert cli("config", "validate", "--strict").returncode == 0
