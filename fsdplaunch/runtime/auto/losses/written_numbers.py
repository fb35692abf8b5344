"""Whether a script has a number written down, and does not compute it from its batch.

Needed because 0.5 is what half a sum is, as in the divergence of a VAE, and one divided by two rows of a batch.
"""

import ast
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from fsdplaunch.runtime.auto.detect.import_scan import user_files

_DIGITS = 9


@cache
def is_written(number: float) -> bool:
    """Return whether a number, or it with another sign, is in the user's own source or on the command line."""
    files = user_files(getattr(sys.modules["__main__"], "__file__", None))
    return round(abs(number), _DIGITS) in _written(tuple(files), tuple(sys.argv[1:]))


@cache
def _written(files: tuple[str, ...], arguments: tuple[str, ...]) -> frozenset[float]:
    return frozenset(round(number, _DIGITS) for number in (*_given(arguments), *_in_source(files)))


def _in_source(files: tuple[str, ...]) -> Iterator[float]:
    for file in files:
        try:
            tree = ast.parse(Path(file).read_bytes())
        except (OSError, SyntaxError, ValueError):
            continue
        nodes = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
        yield from (value for value in nodes if isinstance(value, float))


def _given(arguments: tuple[str, ...]) -> Iterator[float]:
    for argument in arguments:
        try:
            yield abs(float(argument.rpartition("=")[2]))
        except ValueError:
            continue
