"""Read JSON that somebody else may have written: too deep a nesting, and few bytes for much memory, are errors.

Standard library only.
"""

import json
from typing import Any

TIMES, SPARE = 20, 64 * 2**20
"""What a text may come to in memory: so many times its size, and so many bytes for any."""
# Bytes that Python takes, as seen in 3.11, for the smallest value of a kind, its place in what holds it included.
_LIST, _TABLE, _EMPTY_TABLE, _TEXT, _ITEM = 96, 200, 64, 56, 40


class JsonError(ValueError):
    """The text is no JSON, or none that this program reads."""


def parse_json(text: bytes | str) -> Any:
    """Return what a JSON text holds.

    Raises:
        JsonError: It is none, nested too deeply, or asks for much more memory than its size.
    """
    data = text.encode(errors="surrogatepass") if isinstance(text, str) else text
    if _most_bytes(data) > TIMES * len(data) + SPARE:
        msg = f"its values would take more than {TIMES} times its size and {SPARE >> 20} MiB of memory"
        raise JsonError(msg)
    try:
        return json.loads(text)
    except RecursionError:
        msg = "it is nested too deeply"
        raise JsonError(msg) from None
    except ValueError as error:  # also numbers of thousands of digits, and bytes that are no text
        raise JsonError(str(error)) from None


def _most_bytes(data: bytes) -> int:
    """Return an upper limit of the memory that a text's values take; marks inside of texts are counted, too."""
    if len(data) * _LIST < SPARE:
        return 0
    return (
        data.count(b"[") * _LIST
        + data.count(b"{") * _TABLE
        - data.count(b"{}") * (_TABLE - _EMPTY_TABLE)
        + data.count(b'"') // 2 * _TEXT
        + data.count(b",") * _ITEM
        + len(data)
    )
