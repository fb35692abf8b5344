"""Change keys inside an existing file's text; every other byte stays as it is.

Values are spliced in at the places the YAML parser gives, so comments, order and spacing survive. What cannot be
changed safely (a value shared through an anchor, a document that does not parse) is refused, never guessed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from yaml.nodes import CollectionNode, MappingNode, Node, ScalarNode

from fsdplaunch.config.names import find_key, is_bare_section
from fsdplaunch.config.problems import ConfigError
from fsdplaunch.config.render import key_lines
from fsdplaunch.config.schema.config import KeySpec, section_classes
from fsdplaunch.config.yaml_text import (
    UnreadableValueError,
    YamlEntry,
    YamlText,
    flow_text,
    plain_value,
    read_text,
)
from fsdplaunch.errors import UsageError

_STEP = 2


@dataclass(frozen=True, slots=True)
class _Splice:
    """Replace text[start:end]."""

    start: int
    end: int
    text: str


def set_keys(text: str, changes: Sequence[tuple[KeySpec, Any]], *, source: str = "the file") -> str:
    """Return `text` with keys changed.

    Args:
        text: A file's text.
        changes: Keys and their new canonical values; None takes the key out.
        source: What messages call the text.

    Raises:
        ConfigError: The text is not YAML.
        UsageError: A value is shared through an anchor.
    """
    bom = "\ufeff" if text.startswith("\ufeff") else ""
    body = text.removeprefix("\ufeff")
    newline = "\r\n" if "\r\n" in body else "\n"
    for spec, value in changes:
        splice = _splice(body, spec, value, source)
        if splice is None:
            continue
        changed = body[: splice.start] + splice.text.replace("\n", newline) + body[splice.end :]
        if _others(changed, spec, source) != _others(body, spec, source):
            msg = f"{spec.dotted} cannot be changed in {source} without touching other keys"
            raise UsageError(msg, hint="change it by hand")
        body = changed
    return bom + body


def _read(text: str, source: str) -> YamlText:
    read = read_text(text, source)
    if read.problems:
        raise ConfigError(read.problems)
    return read


def _others(text: str, spec: KeySpec, source: str) -> Any:
    """Return what a text says apart from one key, to compare before and after."""
    try:
        read = _read(text, source)
        data = {entry.name: read.value(entry.node, verbatim=True) for entry in read.entries(read.root)}
    except (ConfigError, UnreadableValueError):
        return None
    home = "fsdp_config" if is_bare_section(data) else ""
    for name in [name for name in data if find_key(home, name) == spec]:
        del data[name]
    section = data.get(spec.path[0]) if len(spec.path) > 1 else None
    data = {name: value for name, value in data.items() if value not in (None, {}) and name != spec.path[0]}
    if isinstance(section, dict):
        data |= {
            (spec.path[0], name): value for name, value in section.items() if find_key(spec.path[0], name) != spec
        }
    return data


def _splice(text: str, spec: KeySpec, value: Any, source: str) -> _Splice | None:
    read = _read(text, source)
    top = read.entries(read.root)
    if is_bare_section(entry.name for entry in top):
        if spec.path[0] != "fsdp_config":
            msg = f"{source} holds keys of fsdp_config without that section"
            raise UsageError(msg, hint="put fsdp_config: above them and indent them")
        return _in_mapping(text, read.root, top, spec, value)
    if len(spec.path) == 1:
        keys = [entry for entry in top if entry.name not in section_classes()]
        return _in_mapping(text, read.root, keys, spec, value)
    section = next((entry for entry in top if entry.name == spec.path[0]), None)
    if section is None:
        return _new_section(text, read.root, spec, value)
    if section.is_null:
        return None if value is None else _fill_section(text, section, spec, value)
    if not isinstance(section.node, MappingNode) or _shared(section) or not _own(read.root, [section]):
        msg = f"{spec.path[0]} in {source} is shared through an anchor"
        raise UsageError(msg, hint="change it by hand")
    return _in_mapping(text, section.node, read.entries(section.node), spec, value)


def _own(node: MappingNode | None, entries: list[YamlEntry]) -> list[YamlEntry]:
    """Return the entries that stand in the mapping itself, not in one that `<<` names."""
    keys = [key for key, _ in node.value] if node is not None else []
    return [entry for entry in entries if any(entry.key_node is key for key in keys)]


def _in_mapping(
    text: str, node: MappingNode | None, entries: list[YamlEntry], spec: KeySpec, value: Any
) -> _Splice | None:
    section = ".".join(spec.path[:-1])
    own = _own(node, entries)
    for entry in own:
        if find_key(section, entry.name) == spec:
            return _replace(text, entry, spec, value, flow=bool(node and node.flow_style))
    if value is None:
        return None
    if node is None or not (node.value or node.flow_style):
        return _Splice(len(text), len(text), _separated(text) + "\n".join(key_lines(spec, value, 0)) + "\n")
    if node.flow_style:
        return _into_flow(text, node, spec.name, plain_value(spec, value))
    spans = [(entry.node, entry.key_node) for entry in own] or [(item, key) for key, item in node.value]
    return _after(text, max(_end(*span) for span in spans), key_lines(spec, value, spans[-1][1].start_mark.column))


def _replace(text: str, entry: YamlEntry, spec: KeySpec, value: Any, *, flow: bool) -> _Splice:
    key_end = entry.key_node.end_mark.index
    start, end = entry.node.start_mark.index, _end(entry.node, entry.key_node)
    if _shared(entry) or text[start : start + 1] in "&*":
        msg = f"{spec.dotted} is shared through an anchor"
        raise UsageError(msg, hint="change it by hand")
    plain = None if value is None else plain_value(spec, value)
    if flow:
        return _Splice(
            *_value_span(text, key_end, start, end), _lead(text, start) + _json_or_flow(text, key_end, plain)
        )
    if value is None:
        return _Splice(_line_start(text, entry.key_node.start_mark.index), _line_end(text, max(end, key_end)), "")
    block = isinstance(entry.node, CollectionNode) and not entry.node.flow_style
    literal = isinstance(entry.node, ScalarNode) and entry.node.style in ("|", ">")
    if block or literal or (isinstance(plain, dict) and plain):
        lines = "\n".join(key_lines(spec, value, entry.key_node.start_mark.column)).lstrip()
        end = len(text[:end].rstrip()) if literal else end
        return _Splice(key_end, end, lines.removeprefix(spec.name))
    return _Splice(*_value_span(text, key_end, start, end), _lead(text, start) + flow_text(plain))


def _value_span(text: str, key_end: int, start: int, end: int) -> tuple[int, int]:
    """Return where a value stands; an empty one stands right behind the colon."""
    if start < end:
        return start, end
    colon = text.index(":", key_end) + 1
    return colon, colon


def _lead(text: str, start: int) -> str:
    """Return a space between the colon and a value that was empty."""
    return " " if text[start - 1 : start] == ":" else ""


def _into_flow(text: str, node: MappingNode, name: str, value: Any) -> _Splice:
    close = node.end_mark.index - 1
    if not node.value:
        return _Splice(close, close, f"{name}: {flow_text(value)}")
    last_key, last = node.value[-1]
    end = _end(last, last_key)
    quoted = text[last_key.start_mark.index] == '"'
    written = _json(name) + ": " + _json(value) if quoted else f"{name}: {flow_text(value)}"
    before = text[: last_key.start_mark.index]
    gap = before[len(before.rstrip(" \r\n")) :]
    gap = gap if "\n" in gap else " "
    return _Splice(end, end, "," + gap.replace("\r\n", "\n") + written)


def _json_or_flow(text: str, key_end: int, value: Any) -> str:
    return _json(value) if text[key_end - 1] == '"' else flow_text(value)


def _json(value: Any) -> str:
    import json

    return json.dumps(value, ensure_ascii=False)


def _new_section(text: str, root: MappingNode | None, spec: KeySpec, value: Any) -> _Splice | None:
    if value is None:
        return None
    if root is not None and root.flow_style:
        return _into_flow(text, root, spec.path[0], {spec.name: plain_value(spec, value)})
    lines = [f"{spec.path[0]}:", *key_lines(spec, value, _STEP)]
    if root is None or not root.value:
        return _Splice(len(text), len(text), _separated(text) + "\n".join(lines) + "\n")
    column = root.value[0][0].start_mark.column
    last = max(_end(node, key) for key, node in root.value)
    return _after(text, last, ["", *(" " * column + line for line in lines)])


def _fill_section(text: str, section: YamlEntry, spec: KeySpec, value: Any) -> _Splice:
    lines = key_lines(spec, value, section.key_node.start_mark.column + _STEP)
    start, end = section.node.start_mark.index, section.node.end_mark.index
    if start < end:  # a null that is spelled out
        return _Splice(start, end, "\n" + "\n".join(lines))
    return _after(text, section.key_node.end_mark.index, lines)


def _after(text: str, index: int, lines: list[str]) -> _Splice:
    """Insert whole lines below the line that holds `index`."""
    at = _line_end(text, index)
    lead = "" if at == 0 or text[at - 1] == "\n" else "\n"
    tail = "\n" if not lead or at < len(text) else ""
    return _Splice(at, at, lead + "\n".join(lines) + tail)


def _separated(text: str) -> str:
    return "" if not text or text.endswith("\n") else "\n"


def _line_start(text: str, index: int) -> int:
    return text.rfind("\n", 0, index) + 1


def _line_end(text: str, index: int) -> int:
    """Return the place behind the line break of the line that holds `index`."""
    if index and text[index - 1] == "\n":
        return index
    found = text.find("\n", index)
    return len(text) if found < 0 else found + 1


def _shared(entry: YamlEntry) -> bool:
    """Tell whether the value is an alias: its text then stands somewhere before its key."""
    return bool(entry.node.start_mark.index < entry.key_node.start_mark.index)


def _end(node: Node, key: Node) -> int:
    """Return where a value's own text ends; block collections end with their last item, not at the next token."""
    if node.start_mark.index < key.start_mark.index:
        return int(key.end_mark.index)
    if isinstance(node, CollectionNode) and not node.flow_style and node.value:
        last = node.value[-1]
        inner_key, inner = last if isinstance(node, MappingNode) else (last, last)
        return _end(inner, inner_key)
    return max(int(node.end_mark.index), int(key.end_mark.index))
