"""What each source sets: a file, the environment, the command line. Canonical values, with their places."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from fsdplaunch.config.environment import raw_values
from fsdplaunch.config.names import (
    AUTO_WRAP,
    UnknownKey,
    closest,
    find_bare,
    find_former,
    find_key,
    is_bare_section,
    key_prefix,
    path_of,
)
from fsdplaunch.config.problems import MOST_SHOWN, ConfigError, Problem, TextPosition
from fsdplaunch.config.schema.config import KeyPath, KeySpec, all_keys, keys_by_path, section_classes
from fsdplaunch.config.schema.key import FormerPlace
from fsdplaunch.config.schema.kinds import FLAG, PORT, TEXT, NotedValueError
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
    origin: ValueOrigin
    place: TextPosition


@dataclass(slots=True)
class Layer:
    """One source's values.

    Attributes:
        values: Canonical values by path.
        broken: Keys it sets wrongly; rules that look at them stay silent.
        problems: What is wrong.
        notes: What is worth a note.
        aliases: Written name -> canonical name.
        variables: Single entries of `launch.env`, added to what lower layers set.
    """

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

    def take(self, spec: KeySpec, value: Any, place: TextPosition, origin: ValueOrigin) -> None:
        """Add a value, canonical if it can be made so, else a problem."""
        try:
            canonical = None if value is None else spec.key.kind.parse(value)
        except ValueError as error:
            if (
                value == "" and spec.default is None and spec.key.kind in (TEXT, PORT)
            ):  # as some writers leave it out
                self.note("empty-value", spec.dotted, "says nothing: it is empty", place)
                return
            if spec.key.noise:  # whatever it says, no run reads it
                message = f"has no effect here, whatever it says: {shown(value)}"
                self.note("written-by-accelerate", spec.dotted, message, place)
                return
            if spec.key.leftover and len(spec.path) == 1:  # another engine's, which alone knows its form
                self.note("other-engine", spec.dotted, spec.key.leftover, place)
                return
            self.broken.add(spec.path)
            self.refuse(spec, value, place, error)
            return
        self.values[spec.path] = SetValue(value=canonical, origin=origin, place=place)

    def refuse(self, spec: KeySpec, value: Any, place: TextPosition, error: ValueError) -> None:
        """Add the problem of a value that the key does not take."""
        why = spec.key.kind.refusal(value)
        if isinstance(error, NotedValueError):
            self.reject("wrong-value", spec.dotted, str(error), place)
            return
        if why is not None:
            self.reject("unsupported-value", spec.dotted, f"{value} is not supported: {why}", place)
            return
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


def env_layer(environ: Mapping[str, str]) -> Layer:
    """Read the variables that carry keys, in the encodings accelerate uses."""
    layer = Layer()
    for path, value in raw_values(environ).items():
        spec = keys_by_path()[path]
        source = f"env {spec.env}"
        layer.take(spec, value, TextPosition(source=source), ValueOrigin(layer="env", text=source))
    for name, meant in _strangers(environ).items():
        place = TextPosition(source=f"env {name}")
        layer.note("unread-variable", "", f"is not read; did you mean {meant}?", place)
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
    layer = Layer()
    entries = text.entries(text.root)
    sections = any(entry.is_mapping and entry.name in section_classes() for entry in entries)
    bare = not sections and is_bare_section(entry.name for entry in entries)
    if bare:
        place = TextPosition(source=text.source)
        layer.note("bare-section", "", "all keys of the file are read as fsdp_config", place)
    found = list(_placed(layer, text, "fsdp_config" if bare else "", entries))
    for section, entry in found:
        if find_former(section, entry.name) is None:
            _entry(layer, text, section, entry, bare=bare)
    for section, entry in found:
        _former_entry(layer, text, section, entry)  # last: what a key's own place says is known then
    layer.problems[:0] = text.problems
    return layer


def _placed(
    layer: Layer, text: YamlText, home: str, entries: Iterable[YamlEntry]
) -> Iterator[tuple[str, YamlEntry]]:
    """Yield every entry of a file with its section."""
    for entry in entries:
        elsewhere = not entry.is_mapping and find_former("", entry.name) is not None
        if home or entry.name not in section_classes() or elsewhere:
            yield home, entry
        elif not entry.is_null and not entry.is_mapping:
            hint = "indent them below it"
            layer.reject("not-a-mapping", entry.name, "must hold keys of its own", entry.place, hint)
        elif not entry.is_null:
            yield from ((entry.name, one) for one in text.entries(entry.node, entry.name))


def _dotted(section: str, name: str) -> str:
    return f"{section}.{name}" if section else name


def _entry(layer: Layer, text: YamlText, section: str, entry: YamlEntry, *, bare: bool) -> None:
    found = find_key(section, entry.name, guess=len(layer.problems) < MOST_SHOWN)
    dotted = _dotted(section, entry.name)
    if isinstance(found, UnknownKey):
        if found.meant is None or not found.meant.key.pending:
            layer.reject(found.id, dotted, found.message, entry.place, found.hint)
        if found.meant is None:
            return
        found = found.meant
    if entry.is_null:
        return
    if found.path in layer.values:
        _second_spelling(layer, text, found, dotted, entry)
        return
    if entry.name != found.name:
        layer.aliases[dotted] = found.name
        if not (bare and key_prefix(section) + entry.name == found.name):  # how files of one section write it
            layer.note("other-spelling", dotted, f"is read as {found.name}", entry.place)
    origin = ValueOrigin(layer="file", text=f"{text.source}:{entry.place.line}")
    try:
        value = text.value(entry.node, verbatim=found.key.kind.verbatim)
    except UnreadableValueError as error:
        layer.broken.add(found.path)
        layer.reject("wrong-value", dotted, str(error), entry.place)
        return
    layer.take(found, value, entry.place, origin)


def _second_spelling(layer: Layer, text: YamlText, found: KeySpec, dotted: str, entry: YamlEntry) -> None:
    """Judge a key that the file has set under another spelling: the same value says nothing new."""
    earlier = layer.values[found.path]
    try:
        value = found.key.kind.parse(text.value(entry.node, verbatim=found.key.kind.verbatim))
    except ValueError:  # UnreadableValueError is one
        value = None
    if value == earlier.value:
        layer.note("other-spelling", dotted, f"repeats line {earlier.place.line}", entry.place)
        return
    message = f"sets {found.name} again (first on line {earlier.place.line})"
    layer.reject("duplicate-key", dotted, message, entry.place, "keep one of them")


def _former_entry(layer: Layer, text: YamlText, section: str, entry: YamlEntry) -> None:
    """Take a key from where older files say it; what its own place says must agree."""
    found = find_former(section, entry.name)
    if found is None:
        return
    spec, former = found
    dotted = _dotted(section, entry.name)
    try:
        value = None if entry.is_null else _meaning(spec, former, text.value(entry.node, verbatim=False))
    except UnreadableValueError as error:
        layer.reject("wrong-value", dotted, str(error), entry.place)
        return
    except ValueError as error:
        layer.broken.add(spec.path)
        if former.means is None:
            layer.refuse(spec, text.value(entry.node, verbatim=False), entry.place, error)
        else:
            layer.reject("wrong-value", dotted, "must be true or false", entry.place)
        return
    if value is None:
        layer.note("former-place", dotted, f"says nothing; {spec.dotted} is the key", entry.place)
        return
    earlier = layer.values.get(spec.path)
    if earlier is not None and earlier.value != value:
        message = f"means {value}, but {spec.dotted} is {earlier.value} on line {earlier.place.line}"
        layer.reject("duplicate-key", dotted, message, entry.place, "keep one of them")
        return
    layer.note("former-place", dotted, f"is read as {spec.dotted}: {value}", entry.place)
    if earlier is None:
        layer.take(spec, value, entry.place, ValueOrigin(layer="file", text=f"{text.source}:{entry.place.line}"))


def _meaning(spec: KeySpec, former: FormerPlace, value: Any) -> Any:
    """Return what a value in a key's former place means for it, None where it says nothing.

    Raises:
        ValueError: It is none of the values that stand there.
    """
    if former.means is None:
        return spec.key.kind.parse(value)
    return former.means if FLAG.parse(value) else None


POLICY: KeyPath = ("fsdp_config", "fsdp_auto_wrap_policy")
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


def _named(layer: Layer, path: KeyPath, place: TextPosition) -> KeySpec | None:
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


def _sections() -> set[KeyPath]:
    return {(), *((name,) for name in section_classes())}
