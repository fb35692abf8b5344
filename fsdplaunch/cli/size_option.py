"""Sizes as people write them on the command line."""

from fsdplaunch.errors import UsageError
from fsdplaunch.terminal_text import quoted

_MOST = 2**60

UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
}


def parse_size(text: str, *, option: str = "--max-shard-size") -> int:
    """Read a size such as `5GB`, `500 MB` or `2GiB`, in bytes.

    Raises:
        UsageError: When it is no size.
    """
    from fsdplaunch.config.schema.parsers import check_digits  # --help reads no size

    word = text.strip().upper().replace(" ", "")
    digits = word.rstrip("KMGTIB")
    try:
        check_digits(digits)
        size = int(float(digits) * UNITS[word[len(digits) :]])
    except (ValueError, KeyError, OverflowError):
        size = 0
    if not 0 < size <= _MOST:
        msg = f"{option} {quoted(text)} is not a size"
        raise UsageError(msg, hint="write it as 5GB, 500MB or 2GiB")
    return size
