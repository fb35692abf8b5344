"""What a YAML text says, without a file, an environment or a command line."""

from typing import Any

from fsdplaunch.config.load import LoadedConfig, stack
from fsdplaunch.config.schema.config import Config
from fsdplaunch.config.yaml_text import read_text


def loaded(text: str = "", **more: Any) -> LoadedConfig:
    """Return the configuration of a text; messages call it x.yaml. `more` goes to `stack`."""
    return stack(read_text(text, "x.yaml"), **more)


def config_of(*overrides: str, text: str = "") -> Config:
    """Return the values of a text and of `KEY=VALUE` texts above it."""
    return loaded(text, overrides=overrides).config
