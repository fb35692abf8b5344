"""The schema is complete and consistent: walked, so that a new key cannot escape."""

import pytest

from fsdplaunch.config.names import find_key, key_named, key_prefix, spellings
from fsdplaunch.config.schema.config import all_keys, keys_by_path, section_classes
from fsdplaunch.config.schema.kinds import PATTERN, alternatives


def test_every_key_has_its_own_variable_and_a_text_of_sentences():
    variables = [spec.env for spec in all_keys()]
    assert len(set(variables)) == len(variables)
    for spec in all_keys():
        assert spec.key.text.endswith(".")
        assert "  " not in spec.key.text
        assert spec.key.text.isascii()
        assert 0 < len(spec.key.summary) < 200


def test_every_default_is_a_value_of_its_key():
    for spec in all_keys():
        if spec.default is not None:
            assert spec.key.kind.parse(spec.default) == spec.default
            assert type(spec.key.kind.parse(spec.default)) is type(spec.default)


def test_every_spelling_of_a_key_means_it():
    for spec in all_keys():
        section = ".".join(spec.path[:-1])
        for name in (spec.name, *spec.key.aliases):
            assert find_key(section, name) is spec
        bare = spec.name.removeprefix(key_prefix(section))
        assert find_key(section, bare) is spec


def test_no_spelling_hides_another_key():
    for section in ("", *section_classes()):
        for name, spec in spellings(section).items():
            canonical = keys_by_path().get((section, name) if section else (name,))
            assert canonical is None or canonical is spec


def test_a_name_without_its_section_means_one_key():
    """On the command line the section may be left out; a new key that makes a name ambiguous must be renamed."""
    spelled = {}
    for section in ("", *section_classes()):
        for name, spec in spellings(section).items():
            spelled.setdefault(name, []).append(spec)
    for name, specs in spelled.items():
        assert len(specs) == 1 or len([spec for spec in specs if spec.name == name]) == 1, (name, specs)
        assert key_named(name) in specs


def test_names_are_read_in_any_case_and_by_code():
    for spec in all_keys():
        for code, choice in enumerate(spec.key.kind.choices, start=1):
            value = spec.key.kind.parse(choice)
            assert spec.key.kind.parse(choice.lower()) == value
            assert spec.key.kind.parse(choice.upper().replace("_", " ")) == value
            if isinstance(value, str):
                assert spec.key.kind.parse(code) == spec.key.kind.parse(str(code)) == value


def test_every_key_refuses_what_is_no_value_of_it():
    for spec in all_keys():
        for nonsense in (object(), b"x", {(1,): object()}):
            with pytest.raises(ValueError):
                spec.key.kind.parse(nonsense)


@pytest.mark.parametrize(
    "patterns", [["a"], ["a", "b"], [r"layers\.\d+\.(a|b)", "head"], ["(a|(b))", "c", "d|e"], ["[)]x", "y"]]
)
def test_expressions_of_a_list_are_found_again(patterns: list[str]) -> None:
    assert alternatives(PATTERN.parse(patterns)) == patterns


@pytest.mark.parametrize("pattern", ["a|b", "(?:a)b(?:c)", "(?:a|b)(?:c)", "(?:(?:a)|(?:b))|(?:c)"])
def test_expression_that_was_written_as_one_stays_one(pattern: str) -> None:
    assert alternatives(PATTERN.parse(pattern)) == [pattern]


@pytest.mark.parametrize("value", [[], ["a", "("], [1.5, None]])
def test_list_with_what_is_no_expression_is_refused(value: list[object]) -> None:
    with pytest.raises(ValueError):
        PATTERN.parse(value)
