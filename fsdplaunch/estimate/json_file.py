"""Read a JSON mapping that somebody named, with one clear error for each way it can be wrong."""

from pathlib import Path
from typing import Any

from fsdplaunch.checkpoint.invalid_file import InvalidFileError
from fsdplaunch.checkpoint.regular_file import read_regular
from fsdplaunch.errors import UsageError
from fsdplaunch.json_text import JsonError, parse_json

LIMIT = 64 * 1024 * 1024


def read_json_file(path: Path) -> dict[str, Any]:
    """Return the mapping a file holds.

    Args:
        path: The file.

    Raises:
        UsageError: There is no such file, or it holds something else.
    """
    try:
        found = parse_json(read_regular(path, LIMIT))
    except InvalidFileError as error:
        reason = str(error).removeprefix("it cannot be opened: ")
        msg = f"{path} cannot be read: {reason[:1].lower()}{reason[1:]}"
        raise UsageError(msg) from None
    except JsonError as error:
        msg = f"{path} is no JSON: {error}"
        raise UsageError(msg) from None
    if not isinstance(found, dict):
        msg = f"{path} holds no JSON mapping"
        raise UsageError(msg)
    return found
