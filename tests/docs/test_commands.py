"""The options, configuration keys, YAML and Python that the documents print are right."""

import json
import re

import pytest
import typer.main

from fsdplaunch.cli.app import run
from fsdplaunch.cli.commands import app, expanded
from fsdplaunch.errors import LaunchError
from tests.docs.pages import ROOT, blocks, every, spans

_NOT_OF_THE_LINE = {"elastic-run", "wrong-version", "workers-per-machine", "two-addresses"}
"""Rules that need the rest of a configuration, which a line in a document does not show."""
SECTIONS = {
    name: set(section["properties"])
    for name, section in json.loads((ROOT / "configs/fsdp.schema.json").read_text())["properties"].items()
    if "properties" in section
}
"""The keys of each section of the file."""


@pytest.fixture
def problems(tmp_path, monkeypatch, capsys):
    """What is wrong with some keys and values, or with a file, by itself: the command line's own words."""
    monkeypatch.chdir(tmp_path)

    def find(*arguments: str) -> list[str]:
        capsys.readouterr()
        if run(["config", *arguments]) == 0:
            return []
        said = capsys.readouterr().err
        return [
            line
            for line in said.splitlines()
            if (rule := re.search(r"\[([a-z0-9-]+)\]$", line)) and rule[1] not in _NOT_OF_THE_LINE
        ]

    return find


def known_options() -> set[str]:
    """Options of all commands, and those that the repository's own scripts take."""
    found = set()

    def walk(command):
        for param in command.params:
            found.update(param.opts)
        for inner in getattr(command, "commands", {}).values():
            walk(inner)

    walk(typer.main.get_command(app))
    scripts = [path for path in (ROOT / "scripts").rglob("*") if path.is_file() and path.suffix != ".pyc"]
    return found | set(re.findall(r"--[a-z][\w-]+", " ".join(path.read_text() for path in scripts)))


def is_key_option(option: str) -> bool:
    for argv in ([option + "=1"], [option, "1"], [option]):
        try:
            given = expanded(["launch", *argv, "train.py"])
            if "--noted" in given or option not in " ".join(given):
                return True
        except LaunchError as error:  # an option that has no place here says so, with what serves instead
            if "no such option" not in error.message:
                return True
    return False


def test_options_exist():
    assert not is_key_option("--no-such-key")
    assert is_key_option("--zero_stage")
    known = known_options()
    options = {
        word.split("=")[0] for span in every(spans) if span.text.startswith("--") for word in span.text.split()
    }
    wrong = [
        option
        for option in options
        if option.startswith("--") and "*" not in option and option not in known and not is_key_option(option)
    ]
    assert wrong == []


def test_configuration_keys_exist():
    named = [
        match for span in every(spans) if (match := re.match(r"([a-z_0-9]+)\.([a-z_]+)\b(?![./(])", span.text))
    ]
    assert [one[0] for one in named if one[1] in SECTIONS and one[2] not in SECTIONS[one[1]]] == []
    assert len([one for one in named if one[1] in SECTIONS]) > 20


@pytest.mark.parametrize("block", [b for b in every(blocks) if b.language == "yaml"], ids=lambda b: b.where)
def test_yaml_is_a_valid_configuration(block, problems, tmp_path):
    (tmp_path / "document.yaml").write_text(block.text)
    assert problems("validate", "document.yaml") == []


@pytest.mark.parametrize("block", [b for b in every(blocks) if b.language == "python"], ids=lambda b: b.where)
def test_python_compiles(block):
    compile(block.text.replace("    return  #", "    pass  #"), block.where, "exec")
