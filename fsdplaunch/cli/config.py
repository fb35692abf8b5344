"""What `fsdplaunch config` and its commands do."""

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from fsdplaunch.cli.output import Output
from fsdplaunch.config import docs
from fsdplaunch.config.convert import to_fsdp2
from fsdplaunch.config.layers import file_layer, read_assignments
from fsdplaunch.config.load import DEFAULT_FILE, LoadedConfig, find_file, load_config, read_file, stack
from fsdplaunch.config.problems import ConfigError, Problem, in_order
from fsdplaunch.config.render import (
    find_preset,
    preset_files,
    preset_summary,
    render,
    set_keys,
    write_text_atomically,
)
from fsdplaunch.config.schema.config import all_keys, keys_by_path, value_at
from fsdplaunch.config.yaml_text import flow_text, plain_value, read_text
from fsdplaunch.errors import EXIT_USAGE, UsageError
from fsdplaunch.launch.secret_variables import with_hidden_values


def write_config(
    *,
    output: Path | None,
    overrides: Sequence[str],
    preset: str | None,
    source: Path | None,
    yes: bool,
    no_input: bool,
    overwrite: bool,
    as_json: bool,
    out: Output,
    **answers: str | None,
) -> int:
    """Write a configuration file, asking for what options do not say; each of `answers` is for one question."""
    from fsdplaunch.wizard.answers import closing_words
    from fsdplaunch.wizard.run import describe_facts, read_facts, run_wizard

    if preset is not None and source is not None:
        msg = "--preset and --from both name where to start"
        raise UsageError(msg, hint="give one of them")
    forbidden = no_input or as_json or os.environ.get("FSDPLAUNCH_NO_INPUT") or os.environ.get("CI")
    facts = read_facts(os.environ)
    out.say(describe_facts(facts))
    result = run_wizard(
        facts=facts,
        say=out.say,
        path=output or Path(DEFAULT_FILE),
        answers={name.replace("_", "-"): text for name, text in answers.items() if text is not None},
        overrides=overrides,
        start_from=find_preset(preset) if preset is not None else source,
        interactive=not forbidden and sys.stdin.isatty() and sys.stderr.isatty(),
        yes=yes,
        overwrite=overwrite,
    )
    write_text_atomically(result.path, result.text)
    for reason in result.reasons:
        out.say(out.dim(f"  {reason}"))
    for note in result.notes:
        out.note(note)
    if as_json:
        out.json({"path": str(result.path), "answers": dict(result.answers), "notes": list(result.notes)})
    out.say(closing_words(result))
    return 0


def _load(file: Path | None, overrides: Sequence[str] = ()) -> LoadedConfig:
    loaded = load_config(file, overrides=overrides)
    return replace(loaded, config=with_hidden_values(loaded.config))


def show(*, file: Path | None, overrides: Sequence[str], origin: bool, as_json: bool, out: Output) -> int:
    """Print the effective values; with `origin`, where each came from."""
    loaded = _load(file, overrides)
    if loaded.path is None:
        out.note(f"no {DEFAULT_FILE} here; these are the defaults")
    for note in loaded.notes:
        out.note(note.as_note())
    if as_json:
        out.json(_values(loaded, origin=origin))
        return 0
    if not origin:
        out.data(render(loaded.config, full=True, comments=False).rstrip())
        return 0
    rows = []
    for spec in all_keys():
        value, found = value_at(loaded.config, spec.path), loaded.origins[spec.path]
        if found.layer != "default" or (value is not None and not spec.key.unread):
            rows.append((f"{spec.dotted}: {flow_text(plain_value(spec, value))}", found.text))
    width = max(len(left) for left, _ in rows) + 2
    out.data("\n".join(f"{left:<{width}}# {right}" for left, right in rows))
    return 0


def _values(loaded: LoadedConfig, *, origin: bool) -> dict[str, Any]:
    """Return every key by section; with `origin`, as {"value", "layer", "from"}."""
    tree: dict[str, Any] = {}
    for spec in all_keys():
        place = tree
        for part in spec.path[:-1]:
            place = place.setdefault(part, {})
        value: Any = plain_value(spec, value_at(loaded.config, spec.path))
        if origin:
            source = loaded.origins[spec.path]
            value = {"value": value, "layer": source.layer, "from": source.text}
        place[spec.name] = value
    return {"file": None if loaded.path is None else str(loaded.path), "config": tree}


def set_values(assignments: Sequence[str], *, file: Path | None, out: Output) -> int:
    """Change keys in the file, and those that follow them; a result that would be wrong is not written."""
    path = find_file(file, os.environ, Path.cwd()) or Path(DEFAULT_FILE)
    text = _text_of(path) if path.exists() else ""
    changes = read_assignments(assignments)
    # Keys of the file that follow one that is set are set too, or taken out.
    read = read_text(text, str(path))
    loaded = stack(read, path=path, overrides=assignments)
    version = loaded.config.fsdp_config.fsdp_version
    for key in file_layer(read).values:
        spec = keys_by_path()[key]
        if loaded.origins[key].layer == "default" and spec.key.follows:
            changes.append((spec, value_at(loaded.config, key) if version in spec.key.pinned else None))
    changed = set_keys(text, changes, source=str(path))
    stack(read_text(changed, str(path)), path=path)
    if changed != text:
        write_text_atomically(path, changed)
    keys = ", ".join(spec.dotted for spec, _ in changes)
    out.say(f"{path}: {keys}" + ("" if changed != text else " (no change)"))
    return 0


def _text_of(path: Path) -> str:
    """Return a file's text, line breaks as they are; raises the problems of a file that cannot be read."""
    read = read_file(path, Path.cwd())
    if read.problems:
        raise ConfigError(read.problems)
    return path.read_bytes().decode("utf-8")


def validate(files: Sequence[Path], *, strict: bool = False, as_json: bool, out: Output) -> int:
    """Check files and report every problem and note of each; environment and command line take no part.

    Left out, the files are the one that `launch` would take. Where it is strict, notes count as problems.
    """
    problems: list[Problem] = []
    notes: list[Problem] = []
    for path in list(files) or [find_file(None, os.environ, Path.cwd()) or Path(DEFAULT_FILE)]:
        wrong: Sequence[Problem] = ()
        odd: Sequence[Problem] = ()
        try:
            odd = stack(read_file(path, Path.cwd()), path=path).notes
        except ConfigError as error:
            wrong, odd = error.problems, error.notes
        if strict:
            wrong, odd = in_order([*wrong, *odd]), ()
        if not wrong and not as_json:
            out.data(f"{path}: no problems")
        problems += wrong
        notes += odd
    if as_json:
        shown = {"problems": [one.as_json() for one in problems], "notes": [one.as_json() for one in notes]}
        out.json({"ok": not problems, **shown})
        return EXIT_USAGE if problems else 0
    for note in notes:
        out.note(note.as_note())
    if problems:
        out.data(str(ConfigError(problems)))
    return EXIT_USAGE if problems else 0


def explain(word: str | None, *, file: Path | None, as_json: bool, out: Output) -> int:
    """Say what a key does, or list the keys of a section or of all; with a readable file, its values too."""
    specs = all_keys() if word is None else docs.keys_named(word)
    loaded: LoadedConfig | None = None
    with suppress(ConfigError):  # an explanation needs no file
        found = _load(file)
        loaded = found if found.path is not None else None
    if as_json:
        out.json([docs.describe(spec, loaded) for spec in specs])
    elif word is None or len(specs) > 1:
        out.data(docs.list_keys(specs))
    else:
        out.data(docs.explain(specs[0], loaded))
    return 0


def schema(*, out: Output) -> int:
    """Print the JSON Schema of the file."""
    out.json(docs.json_schema())
    return 0


def presets(name: str | None, *, as_json: bool, out: Output) -> int:
    """List the presets, or print one."""
    paths = list(preset_files().values()) if name is None else [find_preset(name)]
    found = [{"name": path.stem, "summary": preset_summary(path)} for path in paths]
    if name is not None:
        text = paths[0].read_text(encoding="utf-8")
        if as_json:
            out.json({**found[0], "text": text})
        else:
            out.data(text.rstrip())
    elif as_json:
        out.json(found)
    else:
        width = max(map(len, preset_files())) + 2
        out.data("\n".join(f"{one['name']:<{width}}{one['summary']}" for one in found))
    return 0


def convert(
    source: Path, target: Path | None, *, to: str, overwrite: bool, out: Output, as_json: bool = False
) -> int:
    """Write SOURCE to TARGET as a file for FSDP2, and name every key that changes."""
    if to != "fsdp2":
        msg = f"a file cannot be converted to {to}"
        raise UsageError(
            msg, hint="use --to fsdp2; accelerate reads files that have none of fsdplaunch's own sections"
        )
    target = target or source
    if target.exists() and not overwrite:
        msg = f"{target} exists"
        raise UsageError(msg, hint="name another file, or add --overwrite")
    text, changes = to_fsdp2(_text_of(source), source=str(source))
    write_text_atomically(target, text)
    if as_json:
        out.json({"file": str(target), "changes": [asdict(change) for change in changes]})
        return 0
    for change in changes:
        out.say(f"{change.action:<8} {change.key}: {change.message}")
    out.say(f"wrote {target}" + ("" if changes else ", with nothing to change"))
    return 0
