"""What `KEY=VALUE` on the command line sets."""

from collections.abc import Iterable, Sequence
from typing import Any

from fsdplaunch.config.load.key_names import AUTO_WRAP, find_bare, find_key, path_of
from fsdplaunch.config.load.layers import Layer, ValueOrigin, shown
from fsdplaunch.config.load.problems import ConfigError, TextPosition
from fsdplaunch.config.load.yaml_reader import read_scalar
from fsdplaunch.config.load.yaml_text import UnreadableValueError
from fsdplaunch.config.schema.walk import KeySpec, Path, keys_by_path, section_classes

POLICY: Path = ("fsdp_config", "fsdp_auto_wrap_policy")
BY_WORD = f"--fsdp {AUTO_WRAP}"
"""The origin of a policy that the word has set, and no policy by its name."""


def flag_layer(overrides: Iterable[str]) -> Layer:
    """Read `KEY=VALUE` texts; later ones win. An empty VALUE takes back what lower layers set."""
    layer = Layer()
    for override in overrides:
        _override(layer, override)
    return layer


def read_assignments(assignments: Sequence[str]) -> list[tuple[KeySpec, Any]]:
    """Return keys and canonical values of `KEY=VALUE` texts, to be written into a file; None takes a key out.

    Raises:
        ConfigError: With every problem of the texts.
    """
    layer = flag_layer(assignments)
    if layer.variables:
        layer.reject(
            "not-an-assignment", "launch.env", "must be set as a whole", TextPosition(source="command line")
        )
    if layer.problems:
        raise ConfigError(layer.problems)
    return [(keys_by_path()[path], one.value) for path, one in layer.values.items()]


def _override(layer: Layer, override: str) -> None:
    name, equals, text = override.partition("=")
    place = TextPosition(source="command line")
    if not equals or not name.strip():
        layer.reject("not-an-assignment", "", f"{shown(override)} is not KEY=VALUE", place)
        return
    path = path_of(name)
    if path[:2] == ("launch", "env") and len(path) > 2:  # noqa: PLR2004  (launch.env.NAME)
        layer.variables[name.split(".", 2)[2]] = text
        return
    spec = _named(layer, path, place)
    if spec is None:
        return
    said = "command line"
    if spec.path == POLICY and text == AUTO_WRAP:
        text, said = "TRANSFORMER_BASED_WRAP", BY_WORD
    try:
        value = read_scalar(text, verbatim=spec.key.kind.verbatim)
    except UnreadableValueError as error:
        layer.broken.add(spec.path)
        layer.reject("wrong-value", spec.dotted, f"{shown(text)} {error}", place)
        return
    layer.take(spec, value, place, ValueOrigin(layer="flag", text=said))


def _named(layer: Layer, path: Path, place: TextPosition) -> KeySpec | None:
    dotted = ".".join(path)
    bare = find_bare(path[0]) if len(path) == 1 else None
    if bare is not None:
        return bare
    found = find_key(".".join(path[:-1]), path[-1]) if path[:-1] in _sections() else None
    if isinstance(found, KeySpec):
        return found
    hint = found.hint if found else "fsdplaunch config explain lists every key"
    layer.reject("unknown-key", dotted, "is not a key", place, hint)
    return None


def _sections() -> set[Path]:
    return {(), *((name,) for name in section_classes())}
