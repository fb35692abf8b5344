"""YAML text becomes keys, values and places; a fault of the text is a problem with its place."""

import time

import pytest

from fsdplaunch.config.yaml_text import MAX_BYTES, MAX_DEPTH, UnreadableValueError, read_scalar, read_text


def values(text):
    read = read_text(text, "x")
    assert not read.problems, [str(problem) for problem in read.problems]
    return {entry.name: read.value(entry.node) for entry in read.entries(read.root)}


def only_problem(text):
    read = read_text(text, "x")
    for entry in read.entries(read.root):
        read.entries(entry.node, entry.name)
    assert len(read.problems) == 1, [str(problem) for problem in read.problems]
    return read.problems[0]


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("no", "no"),
        ("true", True),
        ("1e-5", 1e-5),
        ("017", 17),
        ("0o17", 15),
        ("0x1F", 31),
        ("1_000", "1_000"),
        ("12:30:45", "12:30:45"),
        (".5", 0.5),
        ("-.INF", float("-inf")),
        ('{"c": "no"}', {"c": "no"}),
        ("~", None),
        ("", None),
        ("'no'", "no"),
        ("!!str 5", "5"),
        ("[1, no, {a: 2}]", [1, "no", {"a": 2}]),
        ("<<", "<<"),
    ],
)
def test_plain_scalars_mean_what_yaml_1_2_says(written, meant):
    got = values(f"key: {written}\n")["key"]
    assert got == meant
    assert type(got) is type(meant)


@pytest.mark.parametrize("text", ["", "\n\n", "# only a comment\n", "---\n", "---\n...\n", "~\n", "\ufeff"])
def test_an_empty_text_says_nothing(text):
    assert values(text) == {}


def test_a_byte_order_mark_is_skipped():
    assert values("\ufeffa: 1\n".encode()) == {"a": 1}
    read = read_text("\ufeffa: [1\n".encode(), "x")
    assert read.problems[0].place.line == 2


@pytest.mark.parametrize(
    ("text", "rule", "line", "col", "words"),
    [
        ("a: 1\n\tb: 2\n", "syntax", 2, 1, "tab"),
        ("a: 1\na: 2\n", "duplicate-key", 2, 1, "set twice (first on line 1)"),
        ("s:\n  a: 1\n  a: 2\n", "duplicate-key", 3, 3, "set twice"),
        ("a: [1\nb: 2\n", "syntax", 2, 2, "not YAML"),
        ("a: 1\n---\nb: 2\n", "syntax", 2, 1, "second document"),
        ("- a\n- b\n", "not-a-mapping", 1, 1, "a list"),
        ("just words\n", "not-a-mapping", 1, 1, "a single value"),
        ("a: *nowhere\n", "syntax", 1, 4, "undefined alias"),
        ("? [a, b]\n: 1\n", "not-a-key", 1, 3, "a key must be a word"),
        ("a: b: c\n", "syntax", 1, 5, "not YAML"),
        ("a: \x07\n", "syntax", 1, 4, "U+0007"),
        ("a: 1\n<<: 3\n", "not-a-key", 2, 1, "merge keys (<<) are not supported"),
        ("a: " + "[" * 100, "too-deep", 1, None, f"{MAX_DEPTH} deep"),
    ],
)
def test_a_fault_of_the_text_is_named_with_its_place(text, rule, line, col, words):
    problem = only_problem(text)
    assert (problem.id, problem.place.line) == (rule, line)
    assert words in problem.message
    if col is not None:
        assert problem.place.col == col


def test_bytes_that_are_not_utf_8_are_a_problem():
    assert only_problem(b"a: \xff\n").id == "not-utf-8"
    assert only_problem("a: 1".encode("utf-16")).id == "not-utf-8"


def test_a_text_that_is_too_large_is_refused_unread():
    started = time.process_time()
    assert only_problem("a: 1\n" * (MAX_BYTES // 4)).id == "too-large"
    assert time.process_time() - started < 0.1


@pytest.mark.parametrize(
    "text",
    [
        "[" * (MAX_BYTES - 1),
        "- " * (MAX_BYTES // 4),
        "a:\n" + "".join(" " * depth + "a:\n" for depth in range(1, 600)),
        "'" + "x" * (MAX_BYTES - 10),
    ],
)
def test_hostile_nesting_is_refused_in_bounded_time(text):
    started = time.process_time()
    assert only_problem(text).id in ("too-deep", "syntax")
    assert time.process_time() - started < 3


def test_aliases_that_multiply_are_refused_in_bounded_time():
    laughs = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
        f"{chr(98 + i)}: &{chr(98 + i)} [{', '.join(['*' + chr(97 + i)] * 10)}]\n" for i in range(8)
    )
    read = read_text(laughs, "x")
    started = time.process_time()
    with pytest.raises(UnreadableValueError, match="too many values"):
        for entry in read.entries(read.root):
            read.value(entry.node)
    assert time.process_time() - started < 2


def test_an_alias_stands_for_its_value():
    assert values("base: &b {x: 1, y: 2}\nsame: *b\n")["same"] == {"x": 1, "y": 2}


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("!!python/object/apply:os.system [x]", "tag"),
        ("!mine [x]", "tag"),
        ("!!set {x}", "tag"),
        ("9" * 5000, "not a number"),
        ("&a [*a]", "too many values"),
    ],
)
def test_a_value_that_no_key_takes_is_refused(value, why):
    read = read_text(f"a: {value}\n", "x")
    with pytest.raises(UnreadableValueError, match=why):
        read.value(read.entries(read.root)[0].node)


@pytest.mark.parametrize(
    ("text", "verbatim", "meant"),
    [
        ("3", False, 3),
        ("", False, None),
        ("[a, b]", True, ["a", "b"]),
        ("1.10", True, "1.10"),
        ("*.norm", True, "*.norm"),
        ("runs #1", True, "runs #1"),
        ("'1'", True, "1"),
        ("null", True, None),
        ("no", False, "no"),
    ],
)
def test_a_value_on_the_command_line_is_read_as_in_a_file(text, verbatim, meant):
    assert read_scalar(text, verbatim=verbatim) == meant


@pytest.mark.parametrize("text", ["[a", "a\nb: 2", "'x"])
def test_a_value_that_is_not_yaml_is_refused(text):
    with pytest.raises(UnreadableValueError):
        read_scalar(text)
