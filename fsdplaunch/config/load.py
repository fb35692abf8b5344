"""Find the file, stack the layers, check everything: text -> Config, or every problem at once.

Layers, later ones win: defaults, file, environment, command line.
"""

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from fsdplaunch.config.layers import (
    BY_WORD,
    POLICY,
    Layer,
    SetValue,
    ValueOrigin,
    env_layer,
    file_layer,
    flag_layer,
)
from fsdplaunch.config.problems import ConfigError, Problem, TextPosition, in_order, note_lines
from fsdplaunch.config.resolve import keys_of_version_1, resolve
from fsdplaunch.config.rules.base import (
    RuleContext,
    Violation,
    find_notes,
    find_violations,
    rule_context,
)
from fsdplaunch.config.schema.config import Config, KeyPath, all_keys, build_config, keys_by_path
from fsdplaunch.config.yaml_text import MAX_BYTES, YamlText, read_text

DEFAULT_FILE = "fsdp.yaml"
FILE_VARIABLE = "FSDPLAUNCH_CONFIG"
_DEFAULT = ValueOrigin(layer="default", text="default")
_TYPE = "distributed_type"
_VERSION = ("fsdp_config", "fsdp_version")
_XLA, _SIZE = ("fsdp_config", "xla"), ("fsdp_config", "fsdp_min_num_params")
_NAMES = ("fsdp_config", "fsdp_transformer_layer_cls_to_wrap")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedConfig:
    """A configuration that has passed every check.

    Attributes:
        config: Resolved.
        path: The file that was read, or None when there is none.
        origins: Which layer decided each key.
        notes: What is set and changes nothing of this run, or is written in another way than the reference does.
        aliases: Names as the file spells them -> the canonical name, where the two differ.
    """

    config: Config
    path: Path | None
    origins: Mapping[KeyPath, ValueOrigin]
    notes: tuple[Problem, ...]
    aliases: Mapping[str, str]

    def note_lines(self) -> list[str]:
        """Return what a launch says of the notes: the first five, and how many more there are."""
        return note_lines(self.notes, file=self.path)


def find_file(given: Path | None, environ: Mapping[str, str], cwd: Path) -> Path | None:
    """Return the file to read: the given one, else $FSDPLAUNCH_CONFIG, else ./fsdp.yaml, else None.

    A file that was named need not exist here; reading it reports that.
    """
    if given is not None:
        return given
    named = environ.get(FILE_VARIABLE)
    if named:
        return Path(named)
    return Path(DEFAULT_FILE) if (cwd / DEFAULT_FILE).is_file() else None


def load_config(
    file: Path | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    overrides: Sequence[str] = (),
    assumed: Sequence[str] = (),
    cwd: Path | None = None,
    noted: Sequence[Problem] = (),
) -> LoadedConfig:
    """Read every layer and return the resolved configuration.

    Args:
        file: The file named on the command line; left out, `find_file` decides.
        environ: The environment; the process's own when left out.
        overrides: `KEY=VALUE` texts, the key dotted or bare, the value as in YAML.
        assumed: The same, from the scheduler that started this process; every other layer wins over them.
        cwd: Where relative names start; the process's own when left out.
        noted: Notes about options that are not keys.

    Raises:
        ConfigError: With every problem of every layer.
    """
    environ = os.environ if environ is None else environ
    cwd = Path.cwd() if cwd is None else cwd
    path = find_file(file, environ, cwd)
    text = YamlText("defaults") if path is None else read_file(path, cwd)
    loaded = stack(text, path=path, environ=environ, overrides=overrides, assumed=assumed)
    return replace(loaded, notes=(*loaded.notes, *noted)) if noted else loaded


def stack(
    text: YamlText,
    *,
    path: Path | None = None,
    environ: Mapping[str, str] | None = None,
    overrides: Sequence[str] = (),
    assumed: Sequence[str] = (),
) -> LoadedConfig:
    """Return the configuration that a text, an environment and overrides make together.

    Raises:
        ConfigError: With every problem of every layer.
    """
    layers = [file_layer(text), env_layer(environ or {}), flag_layer(overrides)]
    values, problems = _merge([flag_layer(assumed, name="env", source="scheduler"), *layers])
    broken = set().union(*(layer.broken for layer in layers))
    if any(problem.id == "unsupported-value" and problem.key == _TYPE for problem in problems):
        broken |= {spec.path for spec in all_keys() if len(spec.path) > 1}  # sections of another engine's file
    unread = path is not None and text.root is None and bool(text.problems)
    given = build_config({key: one.value for key, one in _with_units(_with_version(values)).items()})
    context = RuleContext(given=given, config=resolve(given), set_paths=frozenset(values))
    notes = tuple(note for layer in layers for note in layer.notes)
    if not unread:
        problems += _located(find_violations(context), values, text, broken)
        notes = _in_order_of_weight([*notes, *_located(find_notes(context), values, text, broken)])
    if problems:
        raise ConfigError(problems, notes=notes)
    origins = {spec.path: values[spec.path].origin if spec.path in values else _DEFAULT for spec in all_keys()}
    return LoadedConfig(
        config=context.config,
        path=path,
        origins=MappingProxyType(origins),
        notes=notes,
        aliases=MappingProxyType(layers[0].aliases),
    )


def check(config: Config) -> tuple[Problem, ...]:
    """Return the rules that are broken by a Config that was built in code, without places."""
    return tuple(_problem(rule, violation, {}, None) for rule, violation in find_violations(rule_context(config)))


def read_file(path: Path, cwd: Path) -> YamlText:
    """Read a file's text. A file that cannot be read is a problem of the text."""
    text = YamlText(str(path))
    try:
        with (cwd / path).open("rb") as stream:
            return read_text(stream.read(MAX_BYTES + 1), str(path))
    except FileNotFoundError:
        text.report("no-file", "does not exist", hint="fsdplaunch config writes one")
    except IsADirectoryError:
        text.report("no-file", "is a folder", hint=f"name the file in it, for example {path / DEFAULT_FILE}")
    except OSError as error:
        text.report("no-file", f"cannot be read: {(error.strerror or 'unknown reason').lower()}")
    return text


def _merge(layers: Iterable[Layer]) -> tuple[dict[KeyPath, SetValue], list[Problem]]:
    values: dict[KeyPath, SetValue] = {}
    problems: list[Problem] = []
    for layer in layers:
        problems += layer.problems
        for path, one in layer.values.items():
            values.pop(path, None)
            if one.value is not None:
                values[path] = one
        if layer.variables:
            _add_variables(layer, values, problems)
    return values, problems


def _add_variables(layer: Layer, values: dict[KeyPath, SetValue], problems: list[Problem]) -> None:
    spec = keys_by_path()["launch", "env"]
    table = {**(values[spec.path].value if spec.path in values else {}), **layer.variables}
    extra = Layer("flag")
    extra.take(spec, table, TextPosition(source="command line"))
    values.update(extra.values)
    problems += extra.problems


def _with_version(values: Mapping[KeyPath, SetValue]) -> dict[KeyPath, SetValue]:
    """Add FSDP1 where a key that only FSDP1 has is set, even to its default, and no version is."""
    if _VERSION in values:
        return dict(values)
    old = [values[spec.path] for spec in keys_of_version_1() if spec.path in values]
    one = replace(old[0], value=1) if old else None
    return {**values, _VERSION: one} if one else dict(values)


def _with_units(values: dict[KeyPath, SetValue]) -> dict[KeyPath, SetValue]:
    """Add units by size where PyTorch/XLA shards, a size is set and no policy is, as transformers has it.

    The policy that `--fsdp auto_wrap` sets is either of both there: by size, where there is one and no names.
    """
    xla, size, policy = values.get(_XLA), values.get(_SIZE), values.get(POLICY)
    if xla is None or not xla.value or size is None or not size.value:
        return values
    if policy is not None and (policy.place.source != BY_WORD or _NAMES in values):
        return values
    return {**values, POLICY: replace(size, value="SIZE_BASED_WRAP")}


def _located(
    found: Iterable[tuple[str, Violation]],
    values: Mapping[KeyPath, SetValue],
    text: YamlText,
    broken: Collection[KeyPath],
) -> list[Problem]:
    """Return violations with their places; what is said of a key that is wrong itself is left out."""
    return [
        _problem(rule, violation, values, text)
        for rule, violation in found
        if not set(broken) & {*violation.about}
    ]


def _in_order_of_weight(notes: Iterable[Problem]) -> tuple[Problem, ...]:
    """Return notes in the order of their places; what accelerate writes into every file comes last."""
    ordered = in_order(notes)
    last = [note for note in ordered if note.id == "written-by-accelerate"]
    return (*(note for note in ordered if note not in last), *last)


def _problem(
    rule: str, violation: Violation, values: Mapping[KeyPath, SetValue], text: YamlText | None
) -> Problem:
    path = next((path for path in violation.about if path in values), violation.about[0])
    place = values[path].place if path in values else TextPosition(source=text.source) if text else None
    return Problem(id=rule, key=".".join(path), message=violation.message, hint=violation.hint, place=place)
