"""Every way a file can be wrong has a file in tests/cases and the words the user gets for it."""

from pathlib import Path

import pytest

from fsdplaunch.config.load import load_config
from fsdplaunch.config.problems import TEXT_PROBLEMS, ConfigError
from fsdplaunch.config.rules.base import RULES

CASES = Path(__file__).parents[3] / "cases"
NAMES = sorted(path.name.removesuffix(".expected.txt") for path in CASES.glob("bad_*.expected.txt"))


def report(name, monkeypatch):
    """What a wrong file is answered with.

    Comments `# override: KEY=VALUE` stand for the command line.
    """
    monkeypatch.chdir(CASES)
    path = Path(f"{name}.yaml")
    lines = path.read_bytes().decode(errors="replace").splitlines() if path.exists() else []
    overrides = [line.removeprefix("# override: ") for line in lines if line.startswith("# override: ")]
    with pytest.raises(ConfigError) as caught:
        load_config(path, environ={}, overrides=overrides)
    return caught.value


@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_file_is_answered_with_the_expected_words(name, monkeypatch):
    error = report(name, monkeypatch)
    assert str(error) + "\n" == (CASES / f"{name}.expected.txt").read_text()
    assert name.removeprefix("bad_") in {problem.id for problem in error.problems}


def test_every_problem_id_has_a_case():
    ids = {name.removeprefix("bad_") for name in NAMES}
    assert ids == {*TEXT_PROBLEMS, *RULES} - {"too-large"}  # see load/test_yaml_reader.py


def test_every_case_file_is_used():
    assert {path.stem for path in CASES.glob("bad_*.yaml")} | {"bad_no-file"} == set(NAMES)


def test_expected_words_are_ascii_and_lower_case():
    for name in NAMES:
        for line in (CASES / f"{name}.expected.txt").read_text().splitlines():
            assert line.isascii()
            assert not line.endswith(".")
