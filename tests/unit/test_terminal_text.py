"""What came from outside cannot steer the terminal, and stays readable."""

import json
import unicodedata

import pytest

from fsdplaunch.cli.output import Output
from fsdplaunch.display_text import MOST, TerminalFilter, printable, short_count, shortened, size_words, text_of
from fsdplaunch.errors import LaunchError


def test_every_control_and_direction_mark_is_escaped_and_everything_else_stays():
    for code in (*range(0x3100), *range(0xD800, 0x11000), *range(0xE0000, 0xE0100)):
        char = chr(code)
        if char in "\n\t":
            assert printable(char) == char
        elif unicodedata.category(char) in ("Cc", "Cs", "Zl", "Zp") or unicodedata.bidirectional(char) in (
            *("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"),
        ):
            assert printable(char).isascii(), hex(code)
    assert printable("Größe 模型 👩\u200d💻\tx\r\ny") == "Größe 模型 👩\u200d💻\tx\ny"
    assert printable("a\x1b[31mb\u202e\ud800") == r"a\x1b[31mb\u202e\ud800"


@pytest.mark.parametrize("colour", [True, False])
def test_output_escapes_what_it_is_given_and_keeps_its_own_colours(capsys, colour):
    out = Output()
    out.colour = colour
    out.error(LaunchError("bad \x1b]0;title\x07", hint="not \u202eso"))
    out.note("x\x9by")
    out.data("a\x1b[2Jb")
    out.say(out.dim("\x1b[5m"))
    out.failure(["rank 0\r", "\ud800"])
    out.live("\x1b[9A")
    shown = capsys.readouterr()
    assert shown.out == "a\\x1b[2Jb\n"
    without = shown.err.removesuffix("\r\x1b[K\\x1b[9A")
    for own in ("\x1b[31m", "\x1b[33m", "\x1b[2m", "\x1b[0m"):
        assert (own in without) is colour
        without = without.replace(own, "")
    assert without.splitlines() == [
        "error: bad \\x1b]0;title\\x07",
        "hint:  not \\u202eso",
        *("note: x\\x9by", "\\x1b[5m", "error: rank 0\\x0d", "\\ud800"),
    ]


@pytest.mark.parametrize("value", ["\x1b[31m", "\u202e", "\ud800", "Größe", "\x9b"])
def test_json_is_exact_and_holds_nothing_that_steers_a_terminal(capsys, value):
    Output().json({"key": value})
    text = capsys.readouterr().out
    assert json.loads(text) == {"key": value}
    assert printable(text) == text


class UnprintableError(Exception):
    def __str__(self) -> str:
        raise KeyError(1)


def test_exceptions_without_a_text_and_with_too_much_of_it():
    assert text_of(UnprintableError()) == "<its text cannot be made: KeyError>"
    assert text_of(ValueError("x")) == "x"
    half = "x" * (MOST // 2)
    assert shortened("x" * MOST) == "x" * MOST
    assert shortened("x" * 5_000_000) == f"{half}... (5000000 characters in all) ...{half}"


def tame(*pieces: bytes) -> bytes:
    shown = TerminalFilter()
    return b"".join([*map(shown.part, pieces), shown.part(b"", is_last=True)])


def test_output_of_programs_keeps_its_colours_and_loses_what_steers_the_terminal():
    plain = "loss 1.0 \u20ac\r\x1b[32mgreen\x1b[0m\x1b[K\t\n".encode()
    assert tame(plain) == plain
    for hostile in (
        "\x1b]0;title\x07",
        "\x1b[2J",
        "\x1b[5A",
        "\x9b2J",
        "\u202eabc",
        "\x08",
        "\x7f",
        "\U000e0041",
        "\x1bc",
    ):
        shown = tame(hostile.encode())
        assert shown.isascii()
        assert shown.decode().isprintable()
        assert "\\x" in shown.decode()
        for cut in range(1, len(hostile.encode())):  # in whatever pieces it comes
            assert tame(hostile.encode()[:cut], hostile.encode()[cut:]) == shown
    assert tame(b"caf\xe9 \x9b2J\x85") == b"caf\xe9 \\x9b2J\\x85"  # no UTF-8
    for cut in range(len(plain)):
        assert tame(plain[:cut], plain[cut:]) == plain


def test_sizes_are_written_in_powers_of_1024():
    sizes = [size_words(n) for n in (0, 1023, 1024, 1536 * 2**20, 3000 * 2**40)]
    assert sizes == ["0 bytes", "1023 bytes", "1.0 KiB", "1.5 GiB", "3000.0 TiB"]


@pytest.mark.parametrize(
    ("number", "text"), [(8_030_261_248, "8.03 B"), (124_439_808, "124.4 M"), (1500, "1.5 k"), (984, "984")]
)
def test_short_count_as_people_write_it(number, text):
    assert short_count(number) == text
