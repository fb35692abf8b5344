"""Write a file so that its name leads to all of the old content or to all of the new."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Give a hidden path beside `path` that becomes `path` when the block ends well.

    On any exception what stands there is removed, and `path` is left as it was. Other processes, also on other
    nodes that share the file system, may write the same file meanwhile.

    Args:
        path: The file, or link, to make.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}-{os.urandom(4).hex()}")
    try:
        yield part
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
