"""What the answers start from: a file's values, and keys that were set by name."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any

from fsdplaunch.config.load.file_layer import file_layer
from fsdplaunch.config.load.flag_layer import flag_layer
from fsdplaunch.config.load.layers import Layer
from fsdplaunch.config.load.load import read_file
from fsdplaunch.config.load.problems import ConfigError
from fsdplaunch.config.schema.walk import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class StartingValues:
    """A file whose values the answers start from.

    Attributes:
        text: The file's text.
        values: What it says, canonical, by path.
    """

    text: str
    values: Mapping[Path, Any]


def read_source(path: FilePath) -> StartingValues:
    """Read a file whose values the answers start from.

    Args:
        path: The file.

    Raises:
        ConfigError: It says something that cannot be understood.
    """
    layer = file_layer(read_file(path, FilePath.cwd()))
    values = _values(layer)
    return StartingValues(text=path.read_text(encoding="utf-8"), values=values)


def read_overrides(overrides: Sequence[str]) -> dict[Path, Any]:
    """Return the values that `KEY=VALUE` texts set, by path; None takes a key back.

    Args:
        overrides: As `--set` takes them.

    Raises:
        ConfigError: One of them names no key or gives it none of its values.
    """
    return _values(flag_layer(overrides))


def _values(layer: Layer) -> dict[Path, Any]:
    if layer.problems:
        raise ConfigError(layer.problems)
    return {path: one.value for path, one in layer.values.items()}
