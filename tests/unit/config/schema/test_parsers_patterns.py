"""Several regular expressions in the place of one."""

import pytest

from fsdplaunch.config.schema.kinds import PATTERN, alternatives


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
