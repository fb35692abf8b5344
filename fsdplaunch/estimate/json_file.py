"""Read a JSON mapping that somebody named, with one clear error for each way it can be wrong."""

import json
from pathlib import Path
from typing import Any

from fsdplaunch.errors import UsageError

LIMIT = 64 * 1024 * 1024


def read_json_file(path: Path) -> dict[str, Any]:
    """Return the mapping a file holds.

    Args:
        path: The file.

    Raises:
        UsageError: There is no such file, or it holds something else.
    """
    try:
        if path.stat().st_size > LIMIT:
            msg = f"{path} is larger than {LIMIT} bytes"
            raise UsageError(msg)
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        msg = f"{path} cannot be read: {(error.strerror or '').lower()}"
        raise UsageError(msg) from None
    except (ValueError, RecursionError) as error:
        msg = f"{path} is no JSON: {error}"
        raise UsageError(msg) from None
    if not isinstance(found, dict):
        msg = f"{path} holds no JSON mapping"
        raise UsageError(msg)
    return found
