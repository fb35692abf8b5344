"""Find the file, stack the layers, check everything: text -> Config, or every problem at once.

Layers, later ones win: defaults, variables that accelerate reads, file, FSDPLAUNCH_ variables, command line. A key
that is derived from another, or says the same in other words, follows it: what a higher layer sets takes back what
lower ones say there. So a contradiction is only what one layer says twice.
"""

import os
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fsdplaunch.config.environment import outside_of_run
from fsdplaunch.config.layers import Layer, SetValue, file_layer, flag_layer, variables_layer
from fsdplaunch.config.problems import ConfigError, Problem, TextPosition, in_order
from fsdplaunch.config.resolve import keys_of_version_1
from fsdplaunch.config.rules.base import NOTES, RULES, Check, RuleContext, Violation, find, fsdp, rule_context
from fsdplaunch.config.schema.config import Config, KeyPath, all_keys, build_config, keys_by_path, value_at
from fsdplaunch.config.schema.kinds import write
from fsdplaunch.config.yaml_text import MAX_BYTES, YamlText, read_text

DEFAULT_FILE = "fsdp.yaml"
FILE_VARIABLE = "FSDPLAUNCH_CONFIG"
_DEFAULT = SetValue(value=None, layer="default", place=TextPosition(source="default"))


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedConfig:
    """A configuration that has passed every check."""

    config: Config  # resolved
    path: Path | None  # the file that was read, or None when there is none
    origins: Mapping[KeyPath, SetValue]  # which layer decided each key
    # What is set and changes nothing of this run, or is written in another way than the reference does.
    notes: tuple[Problem, ...]

    def places(self) -> dict[str, str]:
        """Return where each key is set that is not left to its default: `fsdp.yaml:6`, `command line`."""
        return {".".join(path): one.text for path, one in self.origins.items() if one.layer != "default"}

    def note_lines(self) -> list[str]:
        """Return what a launch says of the notes: the first five, and how many more there are."""
        lines = [note.as_note() for note in self.notes[:5]]
        more = len(self.notes) - len(lines)
        if more > 0:
            file = f" {shlex.quote(str(self.path))}" if self.path else ""
            lines.append(f"{more} more {'note' if more == 1 else 'notes'}: fsdplaunch config validate{file}")
        return lines


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
    file: Path | None = None,  # named on the command line; left out, `find_file` decides
    *,
    environ: Mapping[str, str] | None = None,  # the process's own when left out
    overrides: Sequence[str] = (),  # `KEY=VALUE` texts, the key dotted or bare, the value as in YAML
    assumed: Sequence[str] = (),  # the same, from the scheduler that started this process; all others win
    cwd: Path | None = None,  # where relative names start; the process's own when left out
    noted: Sequence[Problem] = (),  # about options that are not keys
) -> LoadedConfig:
    """Read every layer and return the resolved configuration.

    Raises:
        ConfigError: With every problem of every layer.
    """
    environ = outside_of_run(os.environ if environ is None else environ)
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
    environ = environ or {}
    theirs, file = variables_layer(environ, own=False), file_layer(text)
    scheduler = flag_layer(assumed, name="env", source="scheduler")
    above = [file, variables_layer(environ, own=True), flag_layer(overrides)]
    overruled: set[KeyPath] = set().union(
        *(layer.values for layer in above)
    )  # a variable that nobody reads is not wrong
    theirs.broken -= overruled
    theirs.problems = [one for one in theirs.problems if tuple(one.key.split(".")) not in overruled]
    layers = [scheduler, theirs, *above]
    values, problems, followers = _merge(layers)
    broken: set[KeyPath] = set().union(*(layer.broken for layer in layers))
    if any(problem.id == "unsupported-value" and problem.key == "distributed_type" for problem in problems):
        broken |= {spec.path for spec in all_keys() if len(spec.path) > 1}  # sections of another engine's file
    unread = path is not None and text.root is None and bool(text.problems)
    given = build_config({key: one.value for key, one in _with_implied(values).items()})
    context = RuleContext(given, frozenset(values))
    notes = [note for layer in layers for note in layer.notes]
    for key, lost, source, leader in followers:  # what was taken back and differs from what runs
        if lost.value not in (keys_by_path()[key].default, value_at(context.config, key)):
            name = ".".join(source)
            message = f"{write(lost.value)} is overridden: it follows {name}, which is set by {leader.place}"
            notes.append(Problem(id="follows", key=".".join(key), message=message, place=lost.place))
    for key, one in theirs.values.items():
        if values.get(key) is one:
            message = f"sets {'.'.join(key)}: {write(one.value)}, because nothing else sets it"
            notes.append(Problem(id="variable-of-accelerate", key="", message=message, place=one.place))

    def located(rules: Mapping[str, Check]) -> list[Problem]:
        """Return violations with their places; what is said of a key that is wrong itself is left out."""
        found = [one for one in find(rules, context) if not broken & {*one[1].about}]
        return [_problem(rule, violation, values, text) for rule, violation in found]

    if not unread:
        problems += located(RULES)
        notes = list(in_order([*notes, *located(NOTES)]))
        notes.sort(key=lambda note: note.id == "written-by-accelerate")  # in every such file
    if problems:
        raise ConfigError(problems, notes=tuple(notes))
    origins = {spec.path: values.get(spec.path, _DEFAULT) for spec in all_keys()}
    return LoadedConfig(config=context.config, path=path, origins=origins, notes=tuple(notes))


def check(config: Config) -> tuple[Problem, ...]:
    """Return the rules that are broken by a Config that was built in code, without places."""
    return tuple(_problem(rule, violation, {}, None) for rule, violation in find(RULES, rule_context(config)))


def read_file(path: Path, cwd: Path) -> YamlText:
    """Read a file's text. A file that cannot be read is a problem of the text."""
    text = YamlText(str(path))
    try:
        # A pipe that a shell names, for <(command), has its writer; one that stands in a folder may wait for ever.
        if (cwd / path).is_fifo() and "/pipe:[" not in os.path.realpath(cwd / path):
            text.report("no-file", "is a named pipe", hint="write its text to a file, or give it as <(command)")
            return text
        with (cwd / path).open("rb") as stream:
            return read_text(stream.read(MAX_BYTES + 1), str(path))
    except FileNotFoundError:
        text.report("no-file", "does not exist", hint="fsdplaunch config writes one")
    except IsADirectoryError:
        text.report("no-file", "is a folder", hint=f"name the file in it, for example {path / DEFAULT_FILE}")
    except OSError as error:
        text.report("no-file", f"cannot be read: {(error.strerror or 'unknown reason').lower()}")
    return text


_Follower = tuple[KeyPath, SetValue, KeyPath, SetValue]
"""A key and what a lower layer says of it, and the key that it follows, with what a higher layer says."""


def _merge(layers: Iterable[Layer]) -> tuple[dict[KeyPath, SetValue], list[Problem], list[_Follower]]:
    values: dict[KeyPath, SetValue] = {}
    problems: list[Problem] = []
    followers: list[_Follower] = []
    for layer in layers:
        problems += layer.problems
        said = {path: one for path, one in layer.values.items() if one.value is not None}
        for path in set(values) - set(layer.values):
            leader = next((source for source in leaders(path) if source in said), None)
            if leader is not None:
                followers.append((path, values.pop(path), leader, said[leader]))
        values = {path: one for path, one in values.items() if path not in layer.values} | said
        if layer.variables:
            spec, extra = keys_by_path()["launch", "env"], Layer(layer.name)
            known = values[spec.path].value if spec.path in values else {}
            extra.take(spec, {**known, **layer.variables}, TextPosition(source="command line"))
            values |= extra.values
            problems += extra.problems
    return values, problems, followers


def leaders(path: KeyPath) -> tuple[KeyPath, ...]:
    """Return the keys that a key follows."""
    return tuple(tuple(name.split(".")) for name in keys_by_path()[path].key.follows)


def _with_implied(values: dict[KeyPath, SetValue]) -> dict[KeyPath, SetValue]:
    """Add what a file means by the keys that it says.

    FSDP1 where a key that only FSDP1 has is set, even to its default, and no version is; units by size where
    PyTorch/XLA shards, a size is set and no policy is, as transformers has it.
    """
    implied: dict[KeyPath, SetValue] = {}
    of_fsdp1 = [values[spec.path] for spec in keys_of_version_1() if spec.path in values]
    if of_fsdp1:
        implied[fsdp("version")] = replace(of_fsdp1[0], value=1)
    xla, size = values.get(("fsdp_config", "xla")), values.get(fsdp("min_num_params"))
    if xla is not None and xla.value and size is not None and size.value:
        implied[fsdp("auto_wrap_policy")] = replace(size, value="SIZE_BASED_WRAP")
    return implied | values


def _problem(
    rule: str, violation: Violation, values: Mapping[KeyPath, SetValue], text: YamlText | None
) -> Problem:
    path = next((path for path in violation.about if path in values), violation.about[0])
    place = values[path].place if path in values else TextPosition(source=text.source if text else "")
    return Problem(id=rule, key=".".join(path), message=violation.message, hint=violation.hint, place=place)
