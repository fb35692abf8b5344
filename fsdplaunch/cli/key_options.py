"""Every configuration key as an option of `launch`, generated from the schema.

typer cannot hold sixty generated options without spoiling the short help, so the command line is rewritten before
typer sees it: `--fsdp-sharding-strategy FULL_SHARD` becomes `--set fsdp_config.fsdp_sharding_strategy=FULL_SHARD`.
Only what stands before the script is looked at; everything after it belongs to the script.
"""

import re
from collections.abc import Sequence
from pathlib import Path

from fsdplaunch.config.names import (
    FOREIGN_OPTIONS,
    LETTERS,
    ForeignOption,
    closest,
    foreign_option,
    key_prefix,
    spellings,
)
from fsdplaunch.config.problems import Problem, TextPosition
from fsdplaunch.config.schema.config import KeySpec, all_keys, section_classes
from fsdplaunch.config.schema.kinds import FALSE_WORDS, FLAG, TRUE_WORDS
from fsdplaunch.errors import UsageError

_ALIKE, _VERY_ALIKE = 0.6, 0.85
_PAIR = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")
"""How accelerate's `--env` writes a variable."""


def keys_by_option() -> dict[str, KeySpec]:
    """Return every key by its names as an option, underscored: with its section, and without where unique."""
    names: dict[str, list[KeySpec]] = {}
    for spec in all_keys():
        names.setdefault(spec.name, []).append(spec)
    short = {name: specs[0] for name, specs in names.items() if len(specs) == 1}
    return {spec.dotted: spec for spec in all_keys()} | short


def _keys_by_alias() -> dict[str, KeySpec]:
    """Return every key by its other names, underscored: those of torchrun, and of accelerate with a prefix."""
    names = {alias: spec for spec in all_keys() for alias in spec.key.aliases}
    for section in section_classes():
        prefix = key_prefix(section)
        found = spellings(section).items() if prefix else ()
        names |= {name: spec for name, spec in found if name.startswith(prefix)}
    return names


def list_options() -> str:
    """Return every configuration key as an option of `launch`, by section, with what it takes and what it does."""
    import textwrap

    shortest: dict[str, str] = {}
    for name, spec in keys_by_option().items():
        shortest[spec.dotted] = min(shortest.get(spec.dotted, name), name, key=len)
    lines: list[str] = []
    section = None
    for spec in all_keys():
        home = spec.path[0] if len(spec.path) > 1 else "top level"
        if home != section:
            lines += ["", f"{home}:"]
            section = home
        lines.append(f"  --{shortest[spec.dotted].replace('_', '-')}  {spec.key.kind.expects}")
        lines += textwrap.wrap(spec.key.summary, 92, initial_indent="      ", subsequent_indent="      ")
    return "\n".join(lines).strip()


def expand(argv: Sequence[str], *, own_flags: set[str], own_options: set[str]) -> list[str]:
    """Rewrite key options of a command line, after `launch`, to `--set`.

    The command's own options, such as `--dry-run`, and such as `--config` that take a value, stay.
    """
    table = _keys_by_alias() | keys_by_option()
    own = own_flags | own_options
    rest = list(argv)
    done: list[str] = []
    setting: dict[str, tuple[str, str]] = {}
    while rest and rest[0].startswith("-") and rest[0] not in ("-", "--"):
        word = rest.pop(0)
        option, has_value, value = word.partition("=")
        name = LETTERS.get(option) or option.removeprefix("--").replace("-", "_")
        written = option.startswith("--") or option in LETTERS
        if option in own:
            done.append(word)
            if option in own_options and not has_value and rest:
                done.append(rest.pop(0))
        elif name == "fsdp_config":
            done += ["--config", _file(value if has_value else _take(option, rest))]
        elif written and name not in table and (foreign := foreign_option(name)):
            value = value if has_value or not foreign.has_value else _take(option, rest)
            done += _foreign(option, foreign, value, setting)
        elif written and name in table:
            is_flag = table[name].key.kind is FLAG and (
                not rest or rest[0].lower() not in TRUE_WORDS | FALSE_WORDS
            )
            # A flag may stand alone, and then means true.
            value = value if has_value else "true" if is_flag else _take(option, rest)
            done += ["--set", _assignment(option, name, table[name], value)]
        else:
            raise _no_such_option(option, {*table, *FOREIGN_OPTIONS}, own, rest)
    return done + rest


def _foreign(option: str, foreign: ForeignOption, value: str, setting: dict[str, tuple[str, str]]) -> list[str]:
    """Return what an option that is not a key comes to.

    `setting` has what such options have set so far, and which of them did, by key; this one is added.
    """
    if foreign.answer == "refused":
        msg = f"{option}: {foreign.text}" if "needs" in foreign.text else f"{option} {foreign.text}"
        raise UsageError(msg, hint=foreign.hint)
    if foreign.answer == "noted":
        return ["--noted", option]
    # Words are separated by blanks or commas, as in transformers' `--fsdp`, where `full shard` is one word.
    joined = value.lower().replace(",", " ")
    for word in sorted(foreign.words, key=len, reverse=True):  # hybrid_shard_zero2 before hybrid_shard
        joined = joined.replace(word.replace("_", " "), word)
    words = joined.split() if foreign.words else []
    if unknown := [word for word in words if word not in foreign.words]:
        msg = f"{option} {value!r}: {unknown[0]!r} is not one of {', '.join(foreign.words)}"
        raise UsageError(msg)
    done: list[str] = []
    for assignment in filter(None, [foreign.words[word] for word in words] or [foreign.sets.format(value)]):
        key = assignment.partition("=")[0]
        sets, before = setting.setdefault(key, (assignment, option))
        if sets != assignment:
            msg = f"{before} and {option} contradict each other: each sets {key}"
            raise UsageError(msg, hint="leave one of them out")
        done += ["--set", assignment]
    return done


def option_notes(options: Sequence[str]) -> tuple[Problem, ...]:
    """Return the notes about options that change nothing, by the names they were written with."""
    place = TextPosition(source="command line")
    found = {option: foreign_option(option.removeprefix("--").replace("-", "_")) for option in options}
    return tuple(
        Problem(id="option-without-effect", key=option, message=foreign.text, place=place)
        for option, foreign in found.items()
        if foreign
    )


def _no_such_option(option: str, names: set[str], own: set[str], rest: Sequence[str]) -> UsageError:
    dashes = {name: "--" + name.replace("_", "-" if "_" not in option else "_") for name in names}
    from difflib import get_close_matches  # milliseconds, which few runs need

    word = option.removeprefix("--").replace("-", "_")
    script = next((word for word in rest if word.endswith(".py")), None)
    longer = sorted((name for name in names if name.endswith(f"_{word}") and "." not in name), key=len)
    longer = [] if script and "_" not in word else longer
    known = [*own, *dashes.values()]
    if script and not word.startswith("fsdp"):  # it may be the script's own: only a slip of the finger is ours
        near = get_close_matches(option, known, cutoff=_VERY_ALIKE)
    else:
        near = closest(option, known, cutoff=_ALIKE)
    near = [dashes[name] for name in longer] or near
    hint = "fsdplaunch launch --help-all lists every option"
    if near:
        hint = f"did you mean {near[0]}?"
    elif script:
        hint = f"the script's own options come after it: fsdplaunch launch {script} {option} ..."
    return UsageError(f"no such option: {option}", hint=hint)


def _assignment(option: str, name: str, spec: KeySpec, value: str) -> str:
    """Return the key an option sets, with its value; torchrun's `--nnodes` says a number or a range."""
    if not value.strip():  # a shell's unset variable must not turn a run over nodes into one on this node
        msg = f"{option} has no value"
        raise UsageError(
            msg, hint=f"leave it out; --set {spec.dotted}= sets the default instead of the file's value"
        )
    if name == "env" and _PAIR.match(value):
        return f"launch.env.{value}"
    return f"launch.nodes={value}" if name == "nnodes" and ":" in value else f"{spec.dotted}={value}"


def _take(option: str, rest: list[str]) -> str:
    if not rest:
        msg = f"{option} needs a value"
        raise UsageError(msg)
    return rest.pop(0)


def _file(value: str) -> str:
    """Return the file that `--fsdp_config` names, itself or as the one YAML file of a folder."""
    path = Path(value)
    if not path.is_dir():
        return value
    found = sorted(item for item in path.iterdir() if item.suffix in (".yaml", ".yml", ".json"))
    if len(found) != 1:
        names = ", ".join(item.name for item in found) or "none"
        msg = f"--fsdp_config {value}: the folder must hold one configuration file, found {names}"
        raise UsageError(msg, hint="name the file itself")
    return str(found[0])
