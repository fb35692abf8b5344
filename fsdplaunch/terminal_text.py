r"""What came from outside, made safe to show: what steers a terminal, reorders text or hides it is escaped.

Names in files, keys, messages of workers and of other nodes may move the cursor, rewrite a line, or set the title
of a terminal. Everything that this package prints passes here, at the places where it is printed.
"""

import re

MOST = 4096
"""Characters of an exception's text that are shown or sent on; what wrote it has the rest in its log."""
# C0 but tab and line feed, DEL, C1; line separators; marks of direction, embeddings, isolates; invisible ones;
# tags; halves of surrogate pairs, which no encoding can print.
_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\U000e0000-\U000e007f\ud800-\udfff]"
)


def printable(text: str) -> str:
    r"""Return `text` with everything that could steer a terminal as its escape; line ends `\r\n` as `\n`."""
    return _UNSAFE.sub(_escape, text.replace("\r\n", "\n"))


def _escape(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"  # noqa: PLR2004


def quoted(text: str, most: int = 80) -> str:
    """Return the beginning of `text` in quotes, on one line and safe to show."""
    return repr(printable(text if len(text) <= most else f"{text[:most]}..."))


def shortened(text: str, most: int = MOST) -> str:
    """Return `text`, or its beginning and how much more there was."""
    return text if len(text) <= most else f"{text[:most]}... ({len(text)} characters in all)"


def text_of(error: BaseException) -> str:
    """Return `str(error)`; of an exception whose own code for that raises, what it raised."""
    try:
        return str(error)
    except Exception as problem:
        return f"<its text cannot be made: {type(problem).__name__}>"
