"""What people read: sizes, lists of names, and text made safe for a terminal.

Names in files, keys, messages of workers and of other nodes may move the cursor, rewrite a line, or set the title
of a terminal. Everything that this package prints passes `printable` or `TerminalFilter` where it is printed.
"""

import codecs
import re
from collections.abc import Callable, Sequence

MOST = 4096
"""Characters of an exception's text that are shown or sent on; what wrote it has the rest in its log."""
# C0 but tab and line feed, DEL, C1; line separators; marks of direction, embeddings, isolates; invisible ones;
# tags; halves of surrogate pairs, which no encoding can print.
_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\U000e0000-\U000e007f\ud800-\udfff]"
)
# In the output of programs the first group is kept: colours, erasing the rest of a line, a bar's return, and bytes
# that are neither UTF-8 nor, as those of C1 are, obeyed by terminals that know none.
_STEERS = re.compile(f"(\x1b\\[[0-9;:]*[mK]|\r|[\udca0-\udcff])|{_UNSAFE.pattern}")
_MAY_GO_ON = re.compile("\x1b(\\[[0-9;:]{0,64})?\\Z")
MIB = 1024**2
GIB = 1024**3


def printable(text: str) -> str:
    r"""Return `text` with everything that could steer a terminal as its escape; line ends `\r\n` as `\n`."""
    return _UNSAFE.sub(_escape, text.replace("\r\n", "\n"))


def one_line(text: str) -> str:
    """Return `text` safe to show in a line of its own, as in a table or behind a comment's mark."""
    return printable(text).replace("\n", "\\n").replace("\t", " ")


def _escape(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"  # noqa: PLR2004


class TerminalFilter:
    r"""A program's output for a terminal: colours and `\r` stay, whatever else steers it is escaped.

    It comes in any pieces: the end of one that may go on as an escape or a character is held back.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
        self._rest = ""

    def part(self, data: bytes, *, is_last: bool = False) -> bytes:
        """Return what of the next piece, and of what was held back, can be shown; of the last piece all."""
        text = self._rest + self._decoder.decode(data, is_last)
        found = None if is_last else _MAY_GO_ON.search(text)
        end = found.start() if found else len(text)
        self._rest = text[end:]
        return _STEERS.sub(_harmless, text[:end]).encode(errors="surrogateescape")


def _harmless(found: re.Match[str]) -> str:
    bytes_of_it = found[0].encode(errors="surrogateescape")
    return found[1] or "".join(f"\\x{byte:02x}" for byte in bytes_of_it)


def quoted(text: str, most: int = 80) -> str:
    """Return the beginning of `text` in quotes, on one line and safe to show."""
    return repr(printable(text if len(text) <= most else f"{text[:most]}..."))


def shortened(text: str, most: int = MOST) -> str:
    """Return `text`, or its beginning, how much there was, and its end."""
    if len(text) <= most:
        return text
    return f"{text[: most // 2]}... ({len(text)} characters in all) ...{text[-most // 2 :]}"


def text_of(error: BaseException) -> str:
    """Return `str(error)`; of an exception whose own code for that raises, what it raised."""
    try:
        return str(error)
    except Exception as problem:
        return f"<its text cannot be made: {type(problem).__name__}>"


def size_words(count: float) -> str:
    """Return a number of bytes as people write it: `13.2 GiB`."""
    for unit in ("bytes", "KiB", "MiB", "GiB", "TiB"):
        if count < 1024 or unit == "TiB":  # noqa: PLR2004
            return f"{count:.0f} bytes" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError(count)


def step_time(seconds: float) -> str:
    """Return how long a step takes: `1.25 s`, `87.3 ms`."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.1f} ms"


def table(rows: Sequence[Sequence[str]], align: Callable[[str, int], str] = str.ljust) -> list[str]:
    """Return rows as lines whose columns stand below each other."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(align, row, widths)).rstrip() for row in rows]


def rough_time(seconds: float) -> str:
    """Return a time in its largest unit, for columns: `12 s`, `4 m`, `3 h`, `9 d`."""
    units = ((86400, "d"), (3600, "h"), (60, "m"))
    size, unit = next((one for one in units if seconds >= 2 * one[0]), (1, "s"))
    return f"{max(0.0, seconds) // size:.0f} {unit}"


def short_count(number: int) -> str:
    """Return a number of parameters as people write it: `8.03 B`, `124.4 M`, `918.7 k`."""
    for size, unit in ((10**9, " B"), (10**6, " M"), (10**3, " k")):
        if number >= size:
            return f"{number / size:.4g}{unit}"
    return str(number)


def counted(number: int, word: str) -> str:
    """Return a number with its word: `1 worker`, `2 workers`."""
    return f"{number} {word}" + ("" if number == 1 else "s")


def listed(names: Sequence[str], most: int) -> str:
    """Return the first names, with how many there are beside them."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
