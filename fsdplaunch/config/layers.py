"""What each source sets: a file, the environment, the command line. Canonical values, with their places."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from fsdplaunch.config.environment import raw_values
from fsdplaunch.config.names import (
    UnknownKey,
    closest,
    find_key,
    former_places,
    is_bare_section,
    key_named,
    key_prefix,
    path_of,
)
from fsdplaunch.config.problems import MOST_SHOWN, ConfigError, Problem, TextPosition
from fsdplaunch.config.schema.config import KeyPath, KeySpec, all_keys, keys_by_path, section_classes
from fsdplaunch.config.schema.kinds import PORT, TEXT, NotedValueError, parse_flag
from fsdplaunch.config.yaml_text import UnreadableValueError, YamlEntry, YamlText, read_scalar

LayerName = Literal["default", "file", "env", "flag"]
_SHOWN = 60
_PREFIXES = ("FSDP_", "FSDPLAUNCH_", "PARALLELISM_CONFIG_")


@dataclass(frozen=True, slots=True, kw_only=True)
class SetValue:
    """One value that a layer sets, and where. None takes back what lower layers set."""

    value: Any
    layer: LayerName
    place: TextPosition

    @property
    def text(self) -> str:
        """Return where it comes from, for the user: `fsdp.yaml:6`, `env FSDP_VERSION`, `command line`."""
        return f"{self.place.source}:{self.place.line}" if self.place.line else self.place.source


@dataclass(slots=True)
class Layer:
    """One source's values."""

    name: LayerName  # which layer it is
    values: dict[KeyPath, SetValue] = field(default_factory=dict)  # canonical values by path
    broken: set[KeyPath] = field(default_factory=set)  # keys it sets wrongly; rules that look at them stay silent
    problems: list[Problem] = field(default_factory=list)  # what is wrong
    notes: list[Problem] = field(default_factory=list)  # what is worth a note
    # Single entries of `launch.env`, added to what lower layers set.
    variables: dict[str, str] = field(default_factory=dict)

    def reject(self, rule: str, key: str, message: str, place: TextPosition, hint: str | None = None) -> None:
        """Add a problem."""
        self.problems.append(Problem(id=rule, key=key, message=message, hint=hint, place=place))

    def note(self, rule: str, key: str, message: str, place: TextPosition) -> None:
        """Add a note."""
        self.notes.append(Problem(id=rule, key=key, message=message, place=place))

    def take(self, spec: KeySpec, value: Any, place: TextPosition) -> None:
        """Add a value, canonical if it can be made so, else a problem."""
        try:
            canonical = None if value is None else spec.key.kind.parse(value)
        except ValueError as error:
            if value == "" and spec.default is None and spec.key.kind in (TEXT, PORT):  # so tools leave it out
                self.note("empty-value", spec.dotted, "is ignored: it is empty", place)
            elif spec.key.noise:  # whatever it says, no run reads it
                message = f"has no effect here, whatever its value: {shown(value)}"
                self.note("written-by-accelerate", spec.dotted, message, place)
            elif spec.key.leftover and len(spec.path) == 1:  # another engine's, which alone knows its form
                self.note("other-engine", spec.dotted, spec.key.leftover, place)
            else:
                self._refuse(spec, value, place, error)
            return
        self.values[spec.path] = SetValue(value=canonical, layer=self.name, place=place)

    def _refuse(self, spec: KeySpec, value: Any, place: TextPosition, error: ValueError) -> None:
        self.broken.add(spec.path)
        kind, why = spec.key.kind, spec.key.kind.refusal(value)
        if isinstance(error, UnreadableValueError | NotedValueError):
            self.reject("wrong-value", spec.dotted, str(error), place)
        elif why is not None:
            self.reject("unsupported-value", spec.dotted, f"{value} is not supported: {why}", place)
        else:
            near = (
                closest(value.upper(), [name.upper() for name in kind.choices]) if isinstance(value, str) else []
            )
            meant = next((f"did you mean {name}?" for name in kind.choices if name.upper() in near[:1]), None)
            hint = meant or ("leave the key out to get the default" if value == "" else None)
            self.reject("wrong-value", spec.dotted, f"must be {kind.expects}, got {shown(value)}", place, hint)


def shown(value: Any) -> str:
    """Return a value as a message quotes it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict | list):
        return "a mapping" if isinstance(value, dict) else f"a list of {len(value)}"
    if isinstance(value, str):
        text = value if value.strip() and value.isprintable() else ascii(value)
        return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."
    return str(value)


OWN_VARIABLES = "FSDPLAUNCH_"
"""What our own variables begin with; the others are those that accelerate and transformers read."""


def variables_layer(environ: Mapping[str, str], *, own: bool) -> Layer:
    """Read the variables that carry keys: our own, or those of accelerate, in the encodings that it uses."""
    layer = Layer("env")
    for path, value in raw_values(environ).items():
        spec = keys_by_path()[path]
        if spec.env.startswith(OWN_VARIABLES) == own:
            layer.take(spec, value, TextPosition(source=f"env {spec.env}"))
    if not own:
        return layer
    read = [spec.env for spec in all_keys() if not spec.key.unread]
    known = {spec.env for spec in all_keys()}
    for name in (name for name in environ if name.startswith(_PREFIXES) and name not in known):
        from difflib import get_close_matches  # milliseconds, which few runs need

        if near := get_close_matches(name, read, cutoff=0.9):
            place = TextPosition(source=f"env {name}")
            layer.note("unread-variable", "", f"is not read; did you mean {near[0]}?", place)
    return layer


def file_layer(text: YamlText) -> Layer:
    """Read a file's keys. The text's own problems are part of the layer's."""
    layer, entries = Layer("file"), text.entries(text.root)
    sections = any(entry.is_mapping and entry.name in section_classes() for entry in entries)
    bare = not sections and is_bare_section(entry.name for entry in entries)
    if bare:
        place = TextPosition(source=text.source)
        layer.note("bare-section", "", "all keys of the file are read as fsdp_config", place)
    found: list[tuple[str, YamlEntry]] = []
    for entry in entries:
        elsewhere = not entry.is_mapping and ("", entry.name) in former_places()
        if bare or entry.name not in section_classes() or elsewhere:
            found.append(("fsdp_config" if bare else "", entry))
        elif entry.is_mapping:
            found += ((entry.name, one) for one in text.entries(entry.node, entry.name))
        elif not entry.is_null:
            hint = "indent them below it"
            layer.reject("not-a-mapping", entry.name, "must hold keys of its own", entry.place, hint)
    # What a key's own place says is known when its former places are read.
    for section, entry in sorted(found, key=lambda one: (one[0], one[1].name) in former_places()):
        _read_entry(layer, text, section, entry, bare=bare)
    layer.problems[:0] = text.problems
    return layer


def _read_entry(layer: Layer, text: YamlText, section: str, entry: YamlEntry, *, bare: bool) -> None:
    place, dotted = entry.place, f"{section}.{entry.name}" if section else entry.name
    former = former_places().get((section, entry.name))
    spec = former[0] if former else find_key(section, entry.name, guess=len(layer.problems) < MOST_SHOWN)
    if isinstance(spec, UnknownKey):
        layer.reject(spec.id, dotted, spec.message, place, spec.hint)
        return
    if entry.is_null and not former:
        return
    try:
        value = text.value(entry.node, verbatim=spec.key.kind.verbatim)
        if former and former[1] is not None and value is not None:
            value = former[1] if parse_flag(value) else None
    except ValueError as error:  # UnreadableValueError is one
        layer.broken.add(spec.path)
        words = str(error) if isinstance(error, UnreadableValueError) else "must be true or false"
        layer.reject("wrong-value", dotted, words, place)
        return
    if former and value is None:
        layer.note("former-place", dotted, f"is ignored: it has no value, and the key is now {spec.dotted}", place)
    elif spec.path in layer.values:
        _say_again(layer, spec, value, dotted, place)
    else:
        if former:
            layer.note("former-place", dotted, f"is read as {spec.dotted}: {shown(value)}", place)
        elif entry.name != spec.name and not (bare and key_prefix(section) + entry.name == spec.name):
            layer.note("other-spelling", dotted, f"is read as {spec.name}", place)  # bare files write it so
        layer.take(spec, value, place)


def _say_again(layer: Layer, spec: KeySpec, value: Any, dotted: str, place: TextPosition) -> None:
    """Judge a key that the file has set in other words: the same value says nothing new."""
    earlier = layer.values[spec.path]
    try:
        is_same = spec.key.kind.parse(value) == earlier.value
    except ValueError:
        is_same = False
    if is_same:
        layer.note("other-spelling", dotted, f"repeats line {earlier.place.line}", place)
    else:
        message = f"sets {spec.name} again (first on line {earlier.place.line})"
        layer.reject("duplicate-key", dotted, message, place, "keep one of them")


def flag_layer(overrides: Iterable[str], *, name: LayerName = "flag", source: str = "command line") -> Layer:
    """Read `KEY=VALUE` texts; later ones win. An empty VALUE takes back what lower layers set."""
    layer, place = Layer(name), TextPosition(source=source)
    for override in overrides:
        word, equals, text = override.partition("=")
        path, spec = path_of(word), key_named(word)
        if not equals or not word.strip():
            hint = "write it as mixed_precision=bf16, for example"
            layer.reject("not-an-assignment", "", f"{shown(override)} is not KEY=VALUE", place, hint)
        elif path[:2] == ("launch", "env") and len(path) > 2:  # noqa: PLR2004  (launch.env.NAME)
            layer.variables[word.split(".", 2)[2]] = text
        elif isinstance(spec, UnknownKey):
            hint = spec.hint or "fsdplaunch config explain lists every key"
            layer.reject("unknown-key", ".".join(path), "is not a key", place, hint)
        else:
            try:
                layer.take(spec, read_scalar(text, verbatim=spec.key.kind.verbatim), place)
            except UnreadableValueError as error:
                layer.broken.add(spec.path)
                layer.reject("wrong-value", spec.dotted, f"{shown(text)} {error}", place)
    return layer


def read_assignments(assignments: Sequence[str]) -> list[tuple[KeySpec, Any]]:
    """Return keys and canonical values of `KEY=VALUE` texts, to be written into a file; None takes a key out.

    Raises:
        ConfigError: With every problem of the texts.
    """
    if len(assignments) == len(("key", "value")) and not any("=" in text for text in assignments):
        assignments = [" ".join(assignments)]  # one slip, one message
    layer = flag_layer(assignments)
    if layer.variables:
        place = TextPosition(source="command line")
        layer.reject("not-an-assignment", "launch.env", "must be set as a whole", place)
    if layer.problems:
        raise ConfigError(layer.problems)
    return [(keys_by_path()[path], one.value) for path, one in layer.values.items()]
