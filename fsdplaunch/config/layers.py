"""What each source sets: a file, the environment, the command line. Canonical values, with their places."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from fsdplaunch.config.environment import raw_values
from fsdplaunch.config.names import (
    UnknownKey,
    closest,
    find_former,
    find_key,
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
_ALIKE = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueOrigin:
    """Which layer decided a value, and where: `fsdp.yaml:6`, `env FSDP_VERSION`, `command line`."""

    layer: LayerName
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SetValue:
    """One value that a layer sets. None takes back what lower layers set."""

    value: Any
    layer: LayerName
    place: TextPosition

    @property
    def origin(self) -> ValueOrigin:
        """Return what the user reads about where it comes from."""
        line = f":{self.place.line}" if self.place.line else ""
        return ValueOrigin(layer=self.layer, text=f"{self.place.source}{line}")


@dataclass(slots=True)
class Layer:
    """One source's values.

    Attributes:
        name: Which layer it is.
        values: Canonical values by path.
        broken: Keys it sets wrongly; rules that look at them stay silent.
        problems: What is wrong.
        notes: What is worth a note.
        aliases: Written name -> canonical name.
        variables: Single entries of `launch.env`, added to what lower layers set.
    """

    name: LayerName
    values: dict[KeyPath, SetValue] = field(default_factory=dict)
    broken: set[KeyPath] = field(default_factory=set)
    problems: list[Problem] = field(default_factory=list)
    notes: list[Problem] = field(default_factory=list)
    aliases: dict[str, str] = field(default_factory=dict)
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
            if (
                value == "" and spec.default is None and spec.key.kind in (TEXT, PORT)
            ):  # so some tools leave it out
                self.note("empty-value", spec.dotted, "says nothing: it is empty", place)
            elif spec.key.noise:  # whatever it says, no run reads it
                message = f"has no effect here, whatever it says: {shown(value)}"
                self.note("written-by-accelerate", spec.dotted, message, place)
            elif spec.key.leftover and len(spec.path) == 1:  # another engine's, which alone knows its form
                self.note("other-engine", spec.dotted, spec.key.leftover, place)
            else:
                self.refuse(spec, value, place, error)
            return
        self.values[spec.path] = SetValue(value=canonical, layer=self.name, place=place)

    def refuse(self, spec: KeySpec, value: Any, place: TextPosition, error: ValueError) -> None:
        """Add the problem of a value that the key does not take."""
        self.broken.add(spec.path)
        why = spec.key.kind.refusal(value)
        if isinstance(error, UnreadableValueError | NotedValueError):
            self.reject("wrong-value", spec.dotted, str(error), place)
        elif why is not None:
            self.reject("unsupported-value", spec.dotted, f"{value} is not supported: {why}", place)
        else:
            message = f"must be {spec.key.kind.expects}, got {shown(value)}"
            self.reject("wrong-value", spec.dotted, message, place, _value_hint(spec, value))


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


def _value_hint(spec: KeySpec, value: Any) -> str | None:
    if isinstance(value, str) and spec.key.kind.choices:
        near = closest(value.upper(), [choice.upper() for choice in spec.key.kind.choices])
        return next((f"did you mean {c}?" for c in spec.key.kind.choices if near and c.upper() == near[0]), None)
    return "leave the key out to get the default" if value == "" else None


OWN_VARIABLES = "FSDPLAUNCH_"
"""What our own variables begin with; the others are those that accelerate and transformers read."""


def variables_layer(environ: Mapping[str, str], *, own: bool) -> Layer:
    """Read the variables that carry keys: our own, or those of accelerate, in the encodings that it uses."""
    layer = Layer("env")
    for path, value in raw_values(environ).items():
        spec = keys_by_path()[path]
        if spec.env.startswith(OWN_VARIABLES) == own:
            layer.take(spec, value, TextPosition(source=f"env {spec.env}"))
    for name, meant in _strangers(environ).items() if own else ():
        layer.note(
            "unread-variable", "", f"is not read; did you mean {meant}?", TextPosition(source=f"env {name}")
        )
    return layer


def _strangers(environ: Mapping[str, str]) -> dict[str, str]:
    """Return variables that look like a key's but carry none -> the variable that was probably meant."""
    known = [spec.env for spec in all_keys()]
    unread = [name for name in environ if name.startswith(_PREFIXES) and name not in known]
    read = [spec.env for spec in all_keys() if not spec.key.unread]
    near = {name: closest(name, read, cutoff=_ALIKE) for name in unread}
    return {name: words[0] for name, words in near.items() if words}


def file_layer(text: YamlText) -> Layer:
    """Read a file's keys. The text's own problems are part of the layer's."""
    return _FileReader(text).read()


class _FileReader:
    """Reads one file's keys into a layer."""

    def __init__(self, text: YamlText) -> None:
        self._text, self._layer, self._bare = text, Layer("file"), False

    def read(self) -> Layer:
        layer, text = self._layer, self._text
        entries = text.entries(text.root)
        sections = any(entry.is_mapping and entry.name in section_classes() for entry in entries)
        self._bare = not sections and is_bare_section(entry.name for entry in entries)
        if self._bare:
            place = TextPosition(source=text.source)
            layer.note("bare-section", "", "all keys of the file are read as fsdp_config", place)
        found = list(self._placed("fsdp_config" if self._bare else "", entries))
        # What a key's own place says is known when its former places are read.
        for section, entry in sorted(found, key=lambda one: find_former(one[0], one[1].name) is not None):
            self._entry(section, entry)
        layer.problems[:0] = text.problems
        return layer

    def _placed(self, home: str, entries: Iterable[YamlEntry]) -> Iterator[tuple[str, YamlEntry]]:
        """Yield every entry of a file with its section."""
        for entry in entries:
            elsewhere = not entry.is_mapping and find_former("", entry.name) is not None
            if home or entry.name not in section_classes() or elsewhere:
                yield home, entry
            elif not entry.is_null and not entry.is_mapping:
                hint = "indent them below it"
                self._layer.reject("not-a-mapping", entry.name, "must hold keys of its own", entry.place, hint)
            elif not entry.is_null:
                yield from ((entry.name, one) for one in self._text.entries(entry.node, entry.name))

    def _entry(self, section: str, entry: YamlEntry) -> None:
        layer, dotted, place = self._layer, _dotted(section, entry.name), entry.place
        former = find_former(section, entry.name)
        spec = former[0] if former else self._key_named(section, entry, dotted)
        if spec is None or (entry.is_null and not former):
            return
        try:
            value = self._text.value(entry.node, verbatim=spec.key.kind.verbatim)
            if former and former[1].means is not None and value is not None:
                value = former[1].means if parse_flag(value) else None
        except ValueError as error:  # UnreadableValueError is one
            layer.broken.add(spec.path)
            words = str(error) if isinstance(error, UnreadableValueError) else "must be true or false"
            layer.reject("wrong-value", dotted, words, place)
            return
        earlier = layer.values.get(spec.path)
        if former and value is None:
            layer.note("former-place", dotted, f"says nothing; {spec.dotted} is the key", place)
        elif earlier is not None:
            self._say_again(spec, value, earlier, dotted, place)
        else:
            if former:
                layer.note("former-place", dotted, f"is read as {spec.dotted}: {shown(value)}", place)
            elif entry.name != spec.name:
                layer.aliases[dotted] = spec.name
                if not (self._bare and key_prefix(section) + entry.name == spec.name):  # so such files write it
                    layer.note("other-spelling", dotted, f"is read as {spec.name}", place)
            layer.take(spec, value, place)

    def _key_named(self, section: str, entry: YamlEntry, dotted: str) -> KeySpec | None:
        found = find_key(section, entry.name, guess=len(self._layer.problems) < MOST_SHOWN)
        if isinstance(found, KeySpec):
            return found
        if found.meant is None or not found.meant.key.pending:
            self._layer.reject(found.id, dotted, found.message, entry.place, found.hint)
        return found.meant

    def _say_again(self, spec: KeySpec, value: Any, earlier: SetValue, dotted: str, place: TextPosition) -> None:
        """Judge a key that the file has set in other words: the same value says nothing new."""
        try:
            is_same = spec.key.kind.parse(value) == earlier.value
        except ValueError:
            is_same = False
        if is_same:
            self._layer.note("other-spelling", dotted, f"repeats line {earlier.place.line}", place)
        else:
            message = f"sets {spec.name} again (first on line {earlier.place.line})"
            self._layer.reject("duplicate-key", dotted, message, place, "keep one of them")


def _dotted(section: str, name: str) -> str:
    return f"{section}.{name}" if section else name


def flag_layer(overrides: Iterable[str], *, name: LayerName = "flag", source: str = "command line") -> Layer:
    """Read `KEY=VALUE` texts; later ones win. An empty VALUE takes back what lower layers set."""
    layer = Layer(name)
    for override in overrides:
        _override(layer, override, TextPosition(source=source))
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


def _override(layer: Layer, override: str, place: TextPosition) -> None:
    name, equals, text = override.partition("=")
    if not equals or not name.strip():
        hint = "write it as mixed_precision=bf16, for example"
        layer.reject("not-an-assignment", "", f"{shown(override)} is not KEY=VALUE", place, hint)
        return
    path = path_of(name)
    if path[:2] == ("launch", "env") and len(path) > 2:  # noqa: PLR2004  (launch.env.NAME)
        layer.variables[name.split(".", 2)[2]] = text
        return
    spec = key_named(name)
    if isinstance(spec, UnknownKey):
        hint = spec.hint or "fsdplaunch config explain lists every key"
        layer.reject("unknown-key", ".".join(path), "is not a key", place, hint)
        return
    try:
        layer.take(spec, read_scalar(text, verbatim=spec.key.kind.verbatim), place)
    except UnreadableValueError as error:
        layer.broken.add(spec.path)
        layer.reject("wrong-value", spec.dotted, f"{shown(text)} {error}", place)
