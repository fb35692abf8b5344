"""The text of a file: a new one, or an existing one with keys changed; and the presets.

A new file says what differs from the default and what must be pinned, with a comment per key. In an existing one
values are spliced in at the places that the YAML reader gives: ruamel.yaml's round trip loses comments (those of a
file without keys, those below a list that becomes a line), and writes JSON files half as YAML. What cannot be
changed safely, such as a value shared through an anchor, is refused, never guessed.
"""

import json
import os
import textwrap
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from yaml.nodes import CollectionNode, MappingNode, Node

import fsdplaunch
from fsdplaunch import __version__
from fsdplaunch.config.layers import file_layer
from fsdplaunch.config.names import closest, find_key, is_bare_section
from fsdplaunch.config.problems import ConfigError
from fsdplaunch.config.resolve import is_read_by_xla, resolve, shards_models, shards_on_xla
from fsdplaunch.config.schema.config import (
    Config,
    KeyPath,
    KeySpec,
    all_keys,
    build_config,
    keys_by_path,
    section_classes,
    value_at,
)
from fsdplaunch.config.yaml_text import YamlEntry, YamlText, block_lines, flow_text, plain_value, read_text
from fsdplaunch.errors import LaunchError, UsageError
from fsdplaunch.files import atomic_file

SCHEMA_FILE = "fsdp.schema.json"
_HEAD = (
    f"# yaml-language-server: $schema={SCHEMA_FILE}",
    f"# editors complete and check keys with that file: fsdplaunch config schema > {SCHEMA_FILE}",
    f"# fsdplaunch {__version__}; every key: fsdplaunch config explain",
    "",
)
_WIDTH = 100


def render(config: Config, *, full: bool = False, comments: bool = True) -> str:
    """Return the text of a file that gives `config` again; `full` says every key that has a value."""
    resolved = resolve(config)
    values = values_to_write(resolved)
    if full:
        version = resolved.fsdp_config.fsdp_version
        values = {
            spec.path: value
            for spec in all_keys()
            if (value := value_at(resolved, spec.path)) is not None
            and not _idle(resolved, spec)
            and (value != spec.default or not (spec.key.unread or version not in spec.key.versions))
        }
    lines, section = [*_HEAD] if comments else [], ""
    for path, value in values.items():
        spec, home = keys_by_path()[path], path[0] if len(path) > 1 else ""
        if home != section:
            section, about = home, (section_classes()[home].__doc__ or "").split(". ")[0].rstrip(".")
            lines += ["", *_comment(about, 0), f"{home}:"] if comments else [f"{home}:"]
        indent = 2 if home else 0
        lines += _comment(spec.key.summary, indent) if comments else []
        lines += block_lines(spec.name, plain_value(spec, value), indent)
    return "\n".join(lines) + "\n"


def _comment(text: str, indent: int) -> list[str]:
    lead = " " * indent + "# "
    return textwrap.wrap(text, _WIDTH, initial_indent=lead, subsequent_indent=lead)


def values_to_write(config: Config) -> dict[KeyPath, Any]:
    """Return the values a file must say so that reading it gives the resolved `config`, in the schema's order."""
    version, on_xla = config.fsdp_config.fsdp_version, shards_on_xla(config)
    written = {}
    for spec in all_keys():
        value = value_at(config, spec.path)
        is_read = is_read_by_xla(spec.path) or not on_xla
        pinned = version in spec.key.pinned and value is not None and not _idle(config, spec) and is_read
        if (spec.default is not None and value != spec.default) or pinned:
            written[spec.path] = value
    while (missing := _missing(config, written)) is not None:
        written[missing] = value_at(config, missing)
    return {spec.path: written[spec.path] for spec in all_keys() if spec.path in written}


def _missing(config: Config, written: dict[KeyPath, Any]) -> KeyPath | None:
    """Return the first key that would not come out as it is in `config` unless the file says it."""
    read = resolve(build_config(written))
    for spec in sorted(all_keys(), key=lambda spec: _idle(config, spec)):  # what shards nothing last, if at all
        value = value_at(config, spec.path)
        if value is not None and spec.path not in written and value_at(read, spec.path) != value:
            return spec.path
    return None


def _idle(config: Config, spec: KeySpec) -> bool:
    """Return whether a key says how to shard where nothing is sharded."""
    shards_nothing = not shards_models(config) and not spec.key.leftover
    return shards_nothing and spec.path[0] in ("fsdp_config", "parallelism_config")


def write_text_atomically(path: Path, text: str) -> None:
    """Put `text` into a file, whole or not at all. A link is followed, permissions of an old file are kept.

    Raises:
        LaunchError: The folder is missing, full or not writable.
    """
    target = Path(os.path.realpath(path))
    try:
        with atomic_file(target) as temporary:
            with temporary.open("x", encoding="utf-8", newline="") as stream:
                stream.write(text)
                stream.flush()
                os.fsync(stream.fileno())
            with suppress(FileNotFoundError):
                temporary.chmod(target.stat().st_mode & 0o7777)
    except OSError as error:
        msg = f"cannot write {path}: {(error.strerror or 'unknown reason').lower()}"
        raise LaunchError(msg, hint="name another file in a folder that can be written to") from error


def preset_files() -> dict[str, Path]:
    """Return every preset's file by its name: those inside the wheel, else those beside the package."""
    package = Path(fsdplaunch.__file__).parent
    shipped = package / "_presets"
    folder = shipped if shipped.is_dir() else package.parent / "configs"
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def find_preset(name: str) -> Path:
    """Return one preset's file.

    Raises:
        UsageError: There is none of that name.
    """
    presets = preset_files()
    wanted = name.removesuffix(".yaml").replace("-", "_")
    if wanted in presets:
        return presets[wanted]
    near = closest(wanted, list(presets))
    msg = f"{name} is not a preset"
    raise UsageError(msg, hint=f"did you mean {near[0]}?" if near else f"there are {', '.join(presets)}")


def preset_summary(path: Path) -> str:
    """Return what a preset's first comment says."""
    lines = path.read_text(encoding="utf-8").splitlines()
    comments = [line.removeprefix("#").strip() for line in lines if line.startswith("# ")]
    return next((line for line in comments if not line.startswith("yaml-language-server")), "")


def set_keys(text: str, changes: Sequence[tuple[KeySpec, Any]], *, source: str = "the file") -> str:
    """Return a file's text with keys changed to canonical values, None taking one out; JSON is written anew.

    Raises:
        ConfigError: The text is not YAML.
        UsageError: A key cannot be changed without touching others, as where a value is shared through an anchor.
    """
    bom = "\ufeff" if text.startswith("\ufeff") else ""
    body = text.removeprefix("\ufeff")
    newline = "\r\n" if "\r\n" in body else "\n"
    for spec, value in changes:
        start, end, new = _splice(body, spec, value, source)
        changed = body[:start] + new.replace("\n", newline) + body[end:]
        if _others(changed, spec, source) != _others(body, spec, source):
            msg = f"{spec.dotted} cannot be changed in {source} without touching other keys"
            raise UsageError(msg, hint="change it by hand")
        body = changed
    return bom + body


def _others(text: str, spec: KeySpec, source: str) -> dict[KeyPath, Any] | None:
    """Return what a text says apart from one key, to compare before and after; None where it cannot be read."""
    read = read_text(text, source)
    values = file_layer(read).values
    return None if read.problems else {path: one.value for path, one in values.items() if path != spec.path}


_Splice = tuple[int, int, str]  # where a text begins and ends that is replaced, and by what


def _splice(text: str, spec: KeySpec, value: Any, source: str) -> _Splice:
    read = read_text(text, source)
    top = read.entries(read.root)
    if read.problems:
        raise ConfigError(read.problems)
    is_bare = is_bare_section(entry.name for entry in top)
    if is_bare and spec.path[0] != "fsdp_config":
        msg = f"{source} holds keys of fsdp_config without that section"
        raise UsageError(msg, hint="put fsdp_config: above them and indent them")
    home = None if len(spec.path) == 1 or is_bare else spec.path[0]
    plain = None if value is None else plain_value(spec, value)
    if read.root is not None and read.root.flow_style:
        return 0, len(text), json.dumps(_changed(read, read.root, home, spec, plain), indent=2) + "\n"
    section = next((entry for entry in top if entry.name == home), None)
    if home is None:
        return _in_mapping(text, read, read.root, spec, plain)
    if section is None or section.is_null:
        return (0, 0, "") if plain is None else _new_section(text, read.root, section, spec, plain)
    _refuse_shared(text, section, home)
    if isinstance(section.node, MappingNode) and section.node.flow_style:
        lines = block_lines(section.name, _changed(read, section.node, None, spec, plain), 0)
        return _line_start(text, section.key_node), _line_end(text, _end(section.node)), "\n".join(lines) + "\n"
    return _in_mapping(text, read, section.node, spec, plain)


def _changed(read: YamlText, node: Node, home: str | None, spec: KeySpec, plain: Any) -> dict[str, Any]:
    """Return a mapping's values with the key changed, which stands in its section `home`."""
    values: dict[str, Any] = read.value(node)
    place = values if home is None else (values.get(home) or {})
    name = next((name for name in place if find_key(".".join(spec.path[:-1]), name) == spec), spec.name)
    place = {**place, name: plain}
    if plain is None:
        del place[name]
    return place if home is None else {**values, home: place}


def _new_section(
    text: str, root: MappingNode | None, empty: YamlEntry | None, spec: KeySpec, plain: Any
) -> _Splice:
    """Add a section with one key; `empty` is a section that stands there without keys."""
    column = root.value[0][0].start_mark.column if root is not None else 0
    lines = "\n".join(block_lines(spec.name, plain, column + 2))
    if empty is not None:
        start, end = empty.node.start_mark.index, empty.node.end_mark.index
        return (start, end, f"\n{lines}") if start < end else _below(text, empty.key_node.end_mark.index, lines)
    if root is None:
        return _below(text, len(text), f"{spec.path[0]}:\n{lines}")
    return _below(text, _end(root), f"\n{' ' * column}{spec.path[0]}:\n{lines}")


def _in_mapping(text: str, read: YamlText, node: Node | None, spec: KeySpec, plain: Any) -> _Splice:
    section = ".".join(spec.path[:-1])
    entries = read.entries(node)
    entry = next((entry for entry in entries if find_key(section, entry.name) == spec), None)
    if entry is not None:
        _refuse_shared(text, entry, spec.dotted)
        end = _end(entry.node, entry.key_node)
        if plain is None:
            return _line_start(text, entry.key_node), _line_end(text, end), ""
        colon = text.index(":", entry.key_node.end_mark.index) + 1
        return colon, max(colon, len(text[:end].rstrip())), f" {flow_text(plain)}"
    if plain is None:
        return 0, 0, ""
    # A new key of the top level goes below its other keys, not below the last section.
    keys = [entry for entry in entries if section or not entry.is_mapping] or entries
    column = keys[0].key_node.start_mark.column if keys else 0
    foot = max((_end(entry.node, entry.key_node) for entry in keys), default=len(text))
    return _below(text, foot, "\n".join(block_lines(spec.name, plain, column)))


def _refuse_shared(text: str, entry: YamlEntry, key: str) -> None:
    start = entry.node.start_mark.index
    if start < entry.key_node.start_mark.index or text[start : start + 1] in ("&", "*"):
        msg = f"{key} is shared through an anchor"
        raise UsageError(msg, hint="change it by hand")


def _below(text: str, index: int, lines: str) -> _Splice:
    at = _line_end(text, index)
    return at, at, ("" if at == 0 or text[at - 1] == "\n" else "\n") + lines + "\n"


def _line_start(text: str, node: Node) -> int:
    return text.rfind("\n", 0, node.start_mark.index) + 1


def _line_end(text: str, index: int) -> int:
    if index and text[index - 1] == "\n":
        return index
    found = text.find("\n", index)
    return len(text) if found < 0 else found + 1


def _end(node: Node, key: Node | None = None) -> int:
    """Return where a value's own text ends; block collections end with their last item, not at the next token."""
    if isinstance(node, CollectionNode) and not node.flow_style and node.value:
        last = node.value[-1]
        return _end(last[1], last[0]) if isinstance(node, MappingNode) else _end(last)
    return max(int(node.end_mark.index), 0 if key is None else int(key.end_mark.index))
