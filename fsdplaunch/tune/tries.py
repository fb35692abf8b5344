"""`--try KEY=V1,V2`: values to measure, read and refused as the schema says. Pure."""

from collections.abc import Sequence
from typing import Any

from fsdplaunch.config.load.flag_layer import read_assignments
from fsdplaunch.config.load.problems import ConfigError
from fsdplaunch.config.schema.walk import KeySpec, Path
from fsdplaunch.errors import UsageError

_OF_A_STEP = (
    "fsdp_config",
    "sharding",
    "parallelism_config",
    "precision",
    "fp8_config",
    "dynamo_config",
    "mixed_precision",
)
"""Sections, and a key at the top level, that decide how a step is computed; others say how runs are started."""


def read_tries(texts: Sequence[str]) -> dict[Path, list[Any]]:
    """Return the canonical values to try, by key, in the order given and each once.

    Args:
        texts: `KEY=V1,V2`; the key dotted or bare, each value as in YAML.

    Raises:
        UsageError: With everything that is wrong, in one message.
    """
    found: dict[Path, list[Any]] = {}
    wrong: list[str] = []
    for text in texts:
        try:
            for spec, value in _assignments(text):
                values = found.setdefault(spec.path, [])
                values += [] if value in values else [value]
        except ConfigError as error:
            wrong += [f"{problem.key} {problem.message}".strip() for problem in error.problems]
        except ValueError as error:
            wrong.append(str(error))
    if wrong:
        msg = f"--try: {'; '.join(dict.fromkeys(wrong))}"
        raise UsageError(msg, hint="write it as --try fsdp_reshard_after_forward=true,false")
    return found


def _assignments(text: str) -> list[tuple[KeySpec, Any]]:
    """Return the key with each of its values.

    Raises:
        ConfigError: A value is none of the key's, or there is no such key.
        ValueError: No value is given, or the key has no part in a step.
    """
    key, equals, values = text.partition("=")
    found = [one for value in values.split(",") for one in read_assignments([f"{key}{equals}{value}"])]
    spec = found[0][0]
    if any(value is None for _, value in found):
        msg = f"{spec.dotted} is given no value"
        raise ValueError(msg)
    if spec.path[0] not in _OF_A_STEP:
        msg = f"{spec.dotted} does not decide how a step is computed"
        raise ValueError(msg)
    return found
